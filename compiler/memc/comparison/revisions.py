"""Files as git has them: read by name of a revision, without touching the work tree."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from memc.errors import MemcError, usage_error

_TIMEOUT_SECONDS = 60
_QUIET = {"GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "LC_ALL": "C"}


@dataclass(frozen=True, kw_only=True)
class Revision:
    """A path at one commit.

    Attributes:
        root: Top folder of the work tree.
        name: The revision as it was written, for display.
        commit: Its full object name.
        path: Path from the top folder, with forward slashes; empty for the top itself.
    """

    root: Path
    name: str
    commit: str
    path: str

    def __str__(self) -> str:
        return f"{self.name}:{self.path}"

    def kind(self) -> str | None:
        """Returns ``blob`` for a file, ``tree`` for a folder, None when the commit has nothing there."""
        done = _git(self.root, "cat-file", "-t", f"{self.commit}:{self.path}")
        return done.stdout.decode().strip() if done.returncode == 0 else None

    def read(self, name: str = "") -> bytes | None:
        """Returns the bytes of the file at the path, or of `name` below it; None when there is none."""
        inner = "/".join(part for part in (self.path, name) if part)
        done = _git(self.root, "cat-file", "blob", f"{self.commit}:{inner}")
        return done.stdout if done.returncode == 0 else None


def find_revision(text: str, beside: Path | None) -> Revision:
    """Returns the path and commit that `text` names: ``revision:path``, or a revision alone.

    Args:
        text: As git spells it: the path starts at the top of the repository, or at the current folder with ``./``.
        beside: For a revision alone: the folder or file of the work tree that is meant.

    Raises:
        MemcError: ``git-missing``, ``not-a-repository``, ``revision-unknown``, ``revision-without-path``.
    """
    name, colon, path = text.partition(":")
    if not colon and beside is None:
        raise usage_error(
            "revision-without-path",
            f"{text!r} is neither a file nor a folder, and as a revision it does not say of what",
            hint=f"write {text}:path/to/folder, or give the folder as the other argument",
        )
    start = _existing_folder(Path() if colon or beside is None else beside)
    root = _toplevel(start, text)
    if not colon and beside is not None:
        path = _below(root, beside.absolute())
    elif path.startswith(("./", "../")):
        path = _below(root, Path(path).absolute())
    return Revision(root=root, name=name, commit=_commit(root, name, text), path=path.strip("/"))


def _below(root: Path, path: Path) -> str:
    """Returns `path` from the top folder, which git names without symbolic links."""
    inside = (path.parent.resolve() / path.name) if path.name not in ("", "..") else path.resolve()
    try:
        relative = inside.relative_to(root.resolve()).as_posix()
    except ValueError:
        raise usage_error("outside-repository", f"{path} lies outside the repository {root}") from None
    return "" if relative == "." else relative


def _existing_folder(path: Path) -> Path:
    """Returns the nearest folder that exists, from `path` upwards."""
    path = path.absolute()
    return next((folder for folder in (path, *path.parents) if folder.is_dir()), Path())


def _toplevel(start: Path, text: str) -> Path:
    done = _git(start, "rev-parse", "--show-toplevel")
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        dubious = bool(said) and "dubious ownership" in said[0]
        raise usage_error(
            "not-a-repository",
            f"{text!r} is neither a file nor a folder, and {start} "
            + ("is in a git repository of another user" if dubious else "is in no git repository with a work tree"),
            hint="name two folders or specs, or run inside the repository whose revision is meant",
        )
    return Path(os.fsdecode(done.stdout.removesuffix(b"\n")))


def _commit(root: Path, name: str, text: str) -> str:
    done = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}") if name else None
    if done is None or done.returncode != 0:
        raise usage_error(
            "revision-unknown",
            f"{text!r} is neither a file nor a folder, and the repository {root} has no revision {name!r}",
            hint="git log and git branch --all list what there is; a shallow clone has only its last commits",
        )
    return done.stdout.decode().strip()


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Returns what one git command ended with.

    Raises:
        MemcError: ``git-missing`` when there is no git; ``git-timeout``.
    """
    command = ["git", "-C", str(folder), *arguments]
    try:
        return subprocess.run(
            command, capture_output=True, check=False, env=os.environ | _QUIET, timeout=_TIMEOUT_SECONDS
        )
    except OSError as error:
        raise _git_failed("git-missing", f"git cannot be started: {error.strerror or error}") from error
    except subprocess.TimeoutExpired as error:
        raise _git_failed("git-timeout", f"git {arguments[0]} took more than {_TIMEOUT_SECONDS} s") from error


def _git_failed(code: str, message: str) -> MemcError:
    return usage_error(code, message, hint="name two folders or specs, which need no git")
