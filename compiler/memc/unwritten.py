"""What of a plan has a price and no file that could say it: `memc explain` prices it, `memc compile` refuses it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from memc.config import Task
from memc.errors import Diagnostic
from memc.facts import ModelFacts, Objective
from memc.plan import Plan
from memc.solver.combinations import unreadable_checkpoint
from memc.spec import LoadedSpec


def priced_only(loaded: LoadedSpec, plan: Plan) -> list[Diagnostic]:
    """Returns what of the plan has a price, and no file that could say it."""
    found = []
    model = plan.model
    written = (Objective.CAUSAL_LM, Objective.IMAGE_TEXT_LM)
    if model.objective not in written and loaded.spec.task is not Task.CLASSIFICATION:
        found.append(_not_written(loaded, model))
    found += _images_not_written(loaded, plan)
    if not plan.run.train_data:
        found.append(
            loaded.diagnostic(
                "data.train",
                "no-training-file",
                "data.train is not given: there is nothing that train.py could read",
                "name the training file; data.samples alone is enough for memc explain",
            )
        )
    found += _unreadable_data(loaded)
    found += unreadable_checkpoint(loaded, plan.config, plan.model, plan.gpu)
    if plan.config.fsdp is not None and plan.config.fsdp.version != 2:
        found.append(
            loaded.diagnostic(
                "pin.fsdp_version",
                "fsdp1-not-written",
                f"FSDP {plan.config.fsdp.version} can be priced, but memc writes FSDP 2 only",
                "write fsdp_version: 2, or remove the line; memc explain prices version 1",
            )
        )
    return found


def _not_written(loaded: LoadedSpec, model: ModelFacts) -> Diagnostic:
    """Returns why no file is written for a model that is trained as something else than a causal language model."""
    return loaded.diagnostic(
        "model",
        "objective-not-emitted",
        f"{model.key} ({model.model_type}) is trained as {model.objective.replace('_', ' ')}: memc explain prices its "
        "training, and memc writes the training of causal language models only",
        "memc models names the family of each model; choose a causal language model",
    )


def _images_not_written(loaded: LoadedSpec, plan: Plan) -> list[Diagnostic]:
    """Returns why no file is written for a model that reads images; nothing when one is.

    Source: trl 1.16.0 trainer/sft_trainer.py (DataCollatorForVisionLanguageModeling); its other trainers and
        transformers' Trainer have no collator of images for what memc writes.
    """
    model, spec = plan.model, loaded.spec
    if model.objective is not Objective.IMAGE_TEXT_LM:
        return []
    reasons = []
    if spec.task is not Task.SFT:
        fix = "use task sft, or choose a causal language model"
        reasons.append(("task", f"memc writes its supervised fine-tuning, not task {spec.task}", fix))
    elif not plan.config.images_per_sample:
        fix = "remove the line, or choose a causal language model for text alone"
        reasons.append(("data.images_per_sample", "memc writes its training on samples with images", fix))
    if plan.config.context_parallel > 1:
        fix = "remove the line: a sequence with images stays on one GPU"
        reasons.append(
            ("pin.context_parallel", "accelerate cuts token rows, and its places of images are not cut", fix)
        )
    return [
        loaded.diagnostic(field, "images-not-written", f"{model.key} ({model.model_type}) reads images: {why}", fix)
        for field, why, fix in reasons
    ]


_READABLE = (".jsonl", ".ndjson", ".json", ".parquet")


def _unreadable_data(loaded: LoadedSpec) -> list[Diagnostic]:
    """Returns the data files that train.py cannot read, as their names say: it takes JSON Lines, JSON and Parquet."""
    found = []
    for field, name in (("data.train", loaded.spec.data.train), ("data.eval", loaded.spec.data.eval)):
        if not name or name.lower().endswith(_READABLE):
            continue
        place = loaded.path.parent / name
        with contextlib.suppress(OSError, ValueError):
            if place.is_file() and not Path(name).suffix:
                continue  # without a suffix it is read line by line
        found.append(
            loaded.diagnostic(
                field,
                "data-not-readable",
                f"{name} is no file that train.py can read: {_what_it_is(name, place)}",
                "write the rows to one .jsonl, .json or .parquet file, with datasets' "
                "`load_dataset(...).to_json('train.jsonl')` for example, and name that",
            )
        )
    return found


def _what_it_is(name: str, place: Path) -> str:
    """Returns what a name of data looks like that is no file of rows."""
    with contextlib.suppress(OSError, ValueError):
        if name.endswith("/") or place.is_dir():
            return "it is a folder"
    suffix = Path(name).suffix
    if suffix in (".csv", ".tsv", ".txt", ".gz", ".zst", ".arrow"):
        return f"a {suffix} file"
    if name.count("/") == 1 and not name.startswith((".", "/")):
        return "it looks like a dataset of the Hugging Face hub, which is not loaded from there"
    return f"its name ends in {suffix}" if suffix else "its name has no suffix"
