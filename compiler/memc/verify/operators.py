"""Locks of operators that are compiled at their first use, as DeepSpeed's are.

Torch guards such a build with a file, which the process that compiles holds open. One that is killed meanwhile leaves
the file, and from then on every run that needs the operator waits for ever (torch.utils.file_baton.FileBaton.wait has
no end).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

_NAME = "lock"
_PROCESSES = Path("/proc")


def operators_folder(environment: Mapping[str, str]) -> Path:
    """Returns where torch keeps compiled operators.

    Source: torch.utils.cpp_extension._get_build_directory and torch._appdirs.user_cache_dir.
    """
    if chosen := environment.get("TORCH_EXTENSIONS_DIR"):
        return Path(chosen)
    cache = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "~")).expanduser() / ".cache"
    return Path(cache) / "torch_extensions"


def locks_held_by(pids: Iterable[int], environment: Mapping[str, str]) -> frozenset[Path]:
    """Returns the locks that these processes hold; none where there is no /proc."""
    folder = operators_folder(environment).resolve()
    held = []
    for pid in pids:
        with contextlib.suppress(OSError):
            for handle in (_PROCESSES / str(pid) / "fd").iterdir():
                with contextlib.suppress(OSError):
                    held.append(handle.readlink())
    return frozenset(path for path in held if path.name == _NAME and folder in path.parents)


def abandoned_locks(environment: Mapping[str, str]) -> tuple[Path, ...]:
    """Returns the locks that no process of this machine holds, by name; none where there is no /proc.

    Assumes: no other machine compiles in the same folder just now.
    """
    if not (_PROCESSES / "self" / "fd").is_dir():
        return ()
    found = sorted(operators_folder(environment).resolve().glob(f"**/{_NAME}"))
    if not found:
        return ()
    pids = [int(entry.name) for entry in _PROCESSES.iterdir() if entry.name.isdecimal()]
    held = locks_held_by(pids, environment)
    return tuple(path for path in found if path not in held)


def release(locks: Iterable[Path], environment: Mapping[str, str]) -> None:
    """Removes the locks, all of processes that have ended, that nobody else has taken since."""
    wanted = frozenset(locks)
    if wanted:
        for path in wanted.intersection(abandoned_locks(environment)):
            path.unlink(missing_ok=True)


def removing(locks: Iterable[Path]) -> str:
    """Returns the command that removes them, and why it should be given."""
    shown = " ".join(map(str, locks))
    return f"a process that was killed while it compiled an operator left a lock: rm {shown}"
