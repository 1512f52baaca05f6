"""The environment of processes that run the frameworks: their compiled operators lie in this checkout's build folder.

The first use of DeepSpeed compiles an operator and guards it with a lock file. A process that is killed meanwhile
leaves the lock, and every later one would wait for it for ever. So the folder is shared with nothing else here, and a
lock that is left is removed before a test session starts its own processes. A worker of a session that has several
removes none: another one may be compiling.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent.parent / "build" / "torch-extensions"


@cache
def _prepared_folder() -> Path:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        for lock in _FOLDER.glob("**/lock"):
            lock.unlink(missing_ok=True)
    _FOLDER.mkdir(parents=True, exist_ok=True)
    return _FOLDER


def framework_environment() -> dict[str, str]:
    """Returns the environment for a process that trains: offline, one thread, this interpreter's programs first."""
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "TORCH_EXTENSIONS_DIR": str(_prepared_folder()),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
