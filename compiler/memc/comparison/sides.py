"""The two sides of `memc diff`: folders, specs or git revisions, each as a lock document."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memc import driver
from memc.comparison.locks import parse_lock, read_lock
from memc.comparison.revisions import Revision, find_revision
from memc.document import lock_document
from memc.driver import LOCK_NAME, Answer
from memc.errors import MemcError, usage_error
from memc.plan import Infeasible
from memc.spec import parse_spec


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a comparison.

    Attributes:
        name: What it is called on the command line, or the revision and path that this stood for.
        lock: Its lock, or what its lock would be.
        fits: Whether it is a plan; of a spec that does not fit, the nearest configuration is compared.
    """

    name: str
    lock: dict[str, Any]
    fits: bool = True


def read_sides(before: str, after: str) -> tuple[Side, Side]:
    """Returns both sides. A name that is no file or folder is a git revision, of what the other side names.

    Raises:
        MemcError: When one of them cannot be read, is no lock, or is a spec that is wrong.
    """
    first, second = (Path(text) if _exists(Path(text)) else None for text in (before, after))
    return _side(before, first, second), _side(after, second, first)


def _exists(path: Path) -> bool:
    try:
        return path.exists() or path.is_symlink()
    except (OSError, ValueError):
        return False


def _side(text: str, path: Path | None, other: Path | None) -> Side:
    if path is None:
        return _revision_side(find_revision(text, other))
    if path.is_dir():
        return Side(name=text, lock=read_lock(path))
    if path.name == LOCK_NAME:
        return Side(name=text, lock=read_lock(path.parent))
    return _spec_side(text, driver.answer(path))


def _revision_side(revision: Revision) -> Side:
    """Returns the side of a path at a commit: a folder with a lock, a lock, or a spec.

    A spec of an earlier commit is solved with the facts and the data files of today.

    Raises:
        MemcError: ``not-in-revision`` when the commit has no such file.
    """
    kind, name = revision.kind(), str(revision)
    if kind == "tree":
        content = revision.read(LOCK_NAME)
        if content is None:
            raise _not_there(revision, f"{name} holds no {LOCK_NAME}")
        return Side(name=name, lock=parse_lock(content, f"{name}/{LOCK_NAME}".replace(":/", ":")))
    content = revision.read()
    if content is None:
        raise _not_there(revision, f"{revision.name} has no {revision.path or 'such path'}")
    if revision.path.rpartition("/")[2] == LOCK_NAME:
        return Side(name=name, lock=parse_lock(content, name))
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _not_there(revision, f"{name} is neither a lock nor a spec: it is not UTF-8 text") from None
    return _spec_side(name, driver.answer_of(parse_spec(text, str(revision.root / revision.path))))


def _not_there(revision: Revision, message: str) -> MemcError:
    return usage_error(
        "not-in-revision",
        message,
        hint="name a folder that memc compile wrote, its lock or a spec, as it was called in that revision; "
        "its path starts at the top of the repository, or at the current folder with ./",
    )


def _spec_side(name: str, answer: Answer) -> Side:
    if isinstance(answer.result, Infeasible):
        return Side(name=name, lock=answer.document() | {"facts": {}, "files": {}}, fits=False)
    spec = answer.loaded.spec
    lock = lock_document(answer.result, spec_digest=spec.digest(), resolved=spec.resolved(), files={}, command="")
    return Side(name=name, lock=lock)
