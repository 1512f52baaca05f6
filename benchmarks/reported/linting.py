"""Files that a report shows, and files that memc wrote and somebody changed, as memc's lint sees them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from memc.errors import MemcError
from memc.lint import Given, Remark, Weight, lint_path

from reported.answers import Answers
from reported.reading import card

_NAMES = {
    "accelerate": "accelerate.yaml",
    "ds_config": "ds_config.json",
    "deepspeed": "ds_config.json",
    "train_args": "training_args.json",
    "training_args": "training_args.json",
    "trainer": "training_args.json",
    "adapter": "adapter_config.json",
    "peft": "adapter_config.json",
    "fsdp_config": "fsdp_config.json",
    "model_config": "config.json",
    "script": "train.py",
    "train_script": "train.py",
    "launch": "launch.sh",
    "launcher": "launch.sh",
    "slurm": "job.sbatch",
    "requirements": "requirements.txt",
}


def shown_files(artifacts: Mapping[str, Any]) -> dict[str, str]:
    """Returns the text of every file that a report shows, by file name.

    A DeepSpeed config gets the name that the Accelerate config gives it.
    """
    accelerate = artifacts.get("accelerate")
    inner = accelerate.get("deepspeed_config") if isinstance(accelerate, Mapping) else None
    named = inner.get("deepspeed_config_file") if isinstance(inner, Mapping) else None
    files = {}
    for key, content in artifacts.items():
        name = _NAMES.get(str(key).lower(), str(key) if "." in str(key) else f"{key}.yaml")
        if name == "ds_config.json" and named:
            name = Path(str(named)).name
        files[name] = _text(name, content)
    return files


def _text(name: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if name.endswith(".json"):
        return json.dumps(content, indent=2)
    if name.endswith(".txt"):
        lines = [f"{key}=={value}" for key, value in content.items()] if isinstance(content, Mapping) else content
        return "".join(f"{line}\n" for line in lines)
    return yaml.safe_dump(content, sort_keys=False)


def given(answers: Answers) -> Given:
    """Returns what a report says beside its files: versions, card, model, processes."""
    sketch = answers.report.get("spec") or {}
    said = sketch.get("hardware")
    hardware = said if isinstance(said, Mapping) else {}
    gpu = card(str(hardware.get("gpu", ""))) if hardware else None
    model = answers.reading.model if isinstance(sketch.get("model"), Mapping) else None
    return Given(
        versions={str(name): str(version) for name, version in (sketch.get("libs") or {}).items()},
        gpu=None if gpu is None else gpu.key,
        model=model,
        gpus_per_node=hardware.get("gpus_per_node"),
        nodes=hardware.get("nodes"),
        told="the report",
    )


def remarks_on(files: Mapping[str, str], folder: Path, told: Given) -> tuple[Remark, ...]:
    """Returns what the lint says of some files, which are written into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return lint_path(folder, told).remarks


def weights_of(severity: str) -> tuple[Weight, ...]:
    """Returns the weights that a report's word for severity allows; an error is always severe enough."""
    return (Weight.ERROR, Weight.WARNING) if "warning" in severity.lower() else (Weight.ERROR,)


def said(remarks: Sequence[Remark]) -> str:
    """Returns the text of remarks, in lower case."""
    return " ".join(f"{item.code} {item.message} {item.hint}" for item in remarks).lower()


def lint_text(answers: Answers) -> tuple[tuple[Remark, ...], str]:
    """Returns what the lint says of the files that a report shows; a reason where it cannot be asked."""
    artifacts = (answers.report.get("spec") or {}).get("artifacts")
    if not isinstance(artifacts, Mapping) or not artifacts:
        return (), "the report shows no files"
    try:
        return remarks_on(shown_files(artifacts), answers.folder / "shown", given(answers)), ""
    except MemcError as error:
        return (), str(error)
