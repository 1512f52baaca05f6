"""Whatever a spec's strings hold, `memc compile` writes inside its folder alone, and files that read back to them."""

from __future__ import annotations

import ast
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lawmaker import config_json
from memc.cli import main

HOSTILE = (
    "'",
    '"',
    '"""\nimport os\nos.system("touch pwned")\n"""',
    "a\\",
    "a\nb",
    "$(touch pwned)",
    "`touch pwned`",
    "; touch pwned; #",
    "{{ 7 * 7 }}{% raw %}{# #}",
    "../../../escaped",
    "/../escaped",
    "..",
    ".",
    "-o",
    "a b\tc",
    "- [x]: {y}, *z &w !t %u @v |q >r",
    "null",
    "1e3",
    "---\nevil: true",
    "# coding: rot13",
    "<script>alert(1)</script> | a | </details>",
    "\u202egpj.exe",
    "ünïcode 模型 🤖",
)
CHARACTERS = st.characters(exclude_categories=("Cc", "Cs"), include_characters="\n\t")
text = st.one_of(st.sampled_from(HOSTILE), st.text(CHARACTERS, min_size=1, max_size=30)).filter(str.strip)
component = text.filter(lambda name: "/" not in name and name.strip() not in (".", "..") and len(name.encode()) < 200)


def constants(source: str) -> dict[str, object]:
    """Returns the string constants at the top of train.py."""
    return {
        statement.targets[0].id: ast.literal_eval(statement.value)
        for statement in ast.parse(source).body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Name)
        and isinstance(statement.value, ast.Constant)
    }


def files_below(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@given(
    folder=component, train=text, evaluation=text, output_dir=text, spec_name=component, count=st.sampled_from([1, 2])
)
@example(folder="m", train="../" * 40 + "x.jsonl", evaluation="e", output_dir="/etc", spec_name="train.py", count=1)
@example(folder="m", train="x" * 4000 + ".jsonl", evaluation="e", output_dir="../..", spec_name="memc.lock", count=2)
@settings(max_examples=40, deadline=None)
def test_compile_writes_inside_its_folder_alone(
    folder: str, train: str, evaluation: str, output_dir: str, spec_name: str, count: int
) -> None:
    root = Path(tempfile.mkdtemp(prefix="memc-strings-"))
    train, evaluation = f"{train}.jsonl", f"{evaluation}.jsonl"  # other data are refused by their names
    try:
        work = root / "a" / "b" / "work"
        config_json(work / "models" / folder)
        spec: dict[str, Any] = {
            "model": f"models/{folder}",
            "data": {"train": train, "eval": evaluation, "max_length": 128},
            "method": "lora",
            "training": {"output_dir": output_dir, "global_batch_size": 2},
            "hardware": {"gpu": "rtx-4090", "count": count},
            "pin": {"engine": "deepspeed"},
        }
        path = work / spec_name
        path.write_text(json.dumps(spec, ensure_ascii=False), encoding="utf-8")  # what looks like a number stays text
        before = files_below(root)
        with pytest.raises(SystemExit) as stop:
            main(["compile", "-o", str(work / "out"), "--", str(path)])
            raise SystemExit(0)
        assert not stop.value.code
        after = files_below(root)
        written = {name.removeprefix("a/b/work/out/") for name in after.keys() - before.keys()}
        assert before.items() <= after.items()
        assert written == set(json.loads((work / "out" / "memc.lock").read_text(encoding="utf-8"))["files"]) | {
            "memc.lock"
        }
        found = constants((work / "out" / "train.py").read_text(encoding="utf-8"))
        assert found["MODEL"] == f"models/{folder}"
        assert found["TRAIN_FILE"] == train
        assert found["EVAL_FILE"] == evaluation
        assert found["OUTPUT_DIR"] == output_dir
        lock = json.loads((work / "out" / "memc.lock").read_text(encoding="utf-8"))
        assert lock["run"]["train_data"] == train
        with pytest.raises(SystemExit) as stop:
            main(["compile", "--check", "-o", str(work / "out"), "--", str(path)])
            raise SystemExit(0)
        assert not stop.value.code
    finally:
        shutil.rmtree(root)
