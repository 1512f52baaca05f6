"""Starts the emitted train.py of several folders in one process, one after the other, each as its launcher would.

Run as: python fault_runs.py CASES, a JSON list of {folder, start, arguments, constants}; prints one line ENDED with a
JSON object for each: how `main` ended and what it printed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Returns status and text of one run."""
    sys.argv = ["train.py", "--device", "cpu", *case["arguments"]]
    os.chdir(case["start"])
    spec = importlib.util.spec_from_file_location("train", Path(case["folder"]) / "train.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for name, value in case["constants"].items():
        assert hasattr(script, name)
        setattr(script, name, value)
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            status = script.main()
        except BaseException:
            status = "raised"
            traceback.print_exc()
    return {"status": status, "text": text.getvalue()}


def main() -> None:
    """Runs all cases."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, case in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")).items():
        print("ENDED " + json.dumps({"name": name, **run_case(case)}), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    main()
