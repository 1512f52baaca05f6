"""Runs the emitted train.py of a folder in this process and tells which parameters had a gradient before each step.

Run as: python observe.py FOLDER [arguments of train.py]; prints one line OBSERVED with a JSON object: how `main` ended,
what it printed, and by trainable parameter whether it had a gradient when the optimizer was about to step first.
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


def main() -> None:
    """Runs the script and prints what was seen."""
    folder, *arguments = sys.argv[1:]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    sys.argv = ["train.py", "--device", "cpu", *arguments]
    spec = importlib.util.spec_from_file_location("train", Path(folder) / "train.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    seen: dict[str, bool] = {}

    class Watching(script.Meter):  # type: ignore[name-defined,misc]
        """The script's own callback, which looks at the gradients as well."""

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Gradients are whole, and nothing has moved yet."""
            if not seen:
                for name, parameter in kwargs["model"].named_parameters():
                    if parameter.requires_grad:
                        seen[name] = parameter.grad is not None

    script.Meter = Watching
    text = io.StringIO()
    status: Any = "raised"
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            status = script.main()
        except BaseException:
            traceback.print_exc()
    print("OBSERVED " + json.dumps({"status": status, "text": text.getvalue(), "gradients": seen}))


if __name__ == "__main__":
    main()
