"""What an emitted script makes of rows with images, asked in a process of its own.

Run as: python pictured.py FOLDER ROWS...; prints one JSON object after ANSWER: by file of rows, what stops it, or the
tokens of the first batch of all its rows.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch_extensions import framework_environment


def ask(folder: Path, start: Path, rows: list[Path]) -> dict[str, Any]:
    """Returns what the script of `folder` says of each file of rows."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, str(folder), *map(str, rows)],
        capture_output=True, text=True, timeout=600, cwd=start,
        env=framework_environment() | {"PYTHONPATH": str(Path(__file__).parent.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    answer = next(line for line in done.stdout.splitlines() if line.startswith("ANSWER "))
    found: dict[str, Any] = json.loads(answer.removeprefix("ANSWER "))
    return found


def _said(script: Any, collator: Any, path: str) -> Any:
    try:
        rows = list(script.read_rows(path, 0, 0))
        script.check_pictures(rows, SimpleNamespace(process_index=0, world_size=1))
        batch = collator(rows)
    except script.PlanError as error:
        return str(error)
    seen = batch["input_ids"] == collator.image_token
    return {
        "length": batch["input_ids"].shape[1],
        "images": seen.sum(dim=1).tolist(),
        "labelled_images": int((batch["labels"][seen] != -100).sum()),
        "pixels": list(batch["pixel_values"].shape),
    }


def _serve(folder: str, paths: list[str]) -> None:
    spec = importlib.util.spec_from_file_location("train", Path(folder) / "train.py")
    assert spec is not None
    assert spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    processor = script.load_processor(SimpleNamespace(random_weights=False))
    inner = DataCollatorForVisionLanguageModeling(processor, max_length=script.MAX_LENGTH)
    collator = script.Pictures(inner, script.load_config().image_token_id)
    print("ANSWER " + json.dumps({path: _said(script, collator, path) for path in paths}), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2:])
