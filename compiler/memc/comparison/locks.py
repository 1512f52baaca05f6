"""Reading of memc.lock for comparison: what it must hold is checked once, here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from memc.document import LOCK_SCHEMA
from memc.driver import LOCK_NAME
from memc.errors import Diagnostic, ExitCode, Location, MemcError

MAX_LOCK_BYTES = 64 * 1024 * 1024
_AGAIN = "run memc compile again; --force replaces what is there"
_SECTIONS = ("spec", "facts", "files", "plan", "ledger", "clock", "hardware", "model", "budget")


def read_lock(folder: Path) -> dict[str, Any]:
    """Returns the lock in a folder.

    Raises:
        MemcError: ``no-lock`` and ``lock-unreadable`` with exit code 2; as `parse_lock`, with exit code 4.
    """
    path = folder / LOCK_NAME
    if path.exists() and not path.is_file():
        raise _refused("lock-unreadable", f"{path} is no regular file", path, _AGAIN, ExitCode.USAGE)
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_LOCK_BYTES + 1)
    except FileNotFoundError:
        raise _refused("no-lock", f"{folder} holds no {LOCK_NAME}", path, "name a folder that memc compile wrote",
                       ExitCode.USAGE) from None  # fmt: skip
    except OSError as error:
        reason = error.strerror or str(error)
        raise _refused("lock-unreadable", f"{path} cannot be read: {reason}", path, "make the file readable",
                       ExitCode.USAGE) from error  # fmt: skip
    return parse_lock(content, str(path))


def parse_lock(content: bytes, name: str) -> dict[str, Any]:
    """Returns the document that the text of a lock holds.

    Args:
        content: The bytes of the file.
        name: What diagnostics call it.

    Raises:
        MemcError: With exit code 4: ``lock-malformed`` when it is no lock, or lacks what every lock holds;
            ``lock-foreign`` when another version of memc wrote it in another form.
    """
    if len(content) > MAX_LOCK_BYTES:
        raise _refused("lock-malformed", f"{name} is larger than {MAX_LOCK_BYTES} bytes", name, _AGAIN)
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _not_json(content, name, error) from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if not isinstance(document, dict) or not isinstance(schema, str):
        raise _refused("lock-malformed", f"{name} names no schema, so it is no lock of memc", name, _AGAIN)
    if schema != LOCK_SCHEMA:
        message = f"{name} is of schema {schema[:60]!r}; this memc reads {LOCK_SCHEMA!r}"
        hint = f"{_AGAIN}, or use the memc that wrote it"
        raise _refused("lock-foreign", message, name, hint)
    if lacking := _lacking(document):
        raise _refused("lock-malformed", f"{name} holds no usable {', '.join(lacking)}", name, _AGAIN)
    return document


def _not_json(content: bytes, name: str, error: Exception) -> MemcError:
    if any(line.startswith((b"<<<<<<< ", b">>>>>>> ")) for line in content.splitlines()):
        hint = "settle the merge in the spec, then run memc compile --force"
        return _refused("lock-malformed", f"{name} holds the marks of a merge conflict", name, hint)
    reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
    where = Location(file=name)
    if isinstance(error, json.JSONDecodeError):
        where = Location(file=name, line=error.lineno, column=error.colno)
    return _refused("lock-malformed", f"{name} is not JSON: {reason}", where, _AGAIN)


def _lacking(document: dict[str, Any]) -> list[str]:
    """Returns the parts that a lock must hold and this one does not, by dotted key."""
    lacking = [section for section in _SECTIONS if not isinstance(document.get(section), dict)]
    if not isinstance(document.get("memc"), str):
        lacking.append("memc")
    if lacking:
        return lacking
    tables = {"files": document["files"], "facts": document["facts"]}
    lacking = [name for name, table in tables.items() if not all(isinstance(text, str) for text in table.values())]
    inner = (("spec", "resolved"), ("plan", "settings"))
    lacking += [f"{outer}.{name}" for outer, name in inner if not isinstance(document[outer].get(name), dict)]
    if not isinstance(document["spec"].get("digest"), str):
        lacking.append("spec.digest")
    lacking += [f"ledger.{name}" for name, bill in document["ledger"].items() if not _is_bill(bill)]
    if "gpu" not in document["ledger"]:
        lacking.append("ledger.gpu")
    return lacking


def _is_bill(bill: Any) -> bool:
    if not isinstance(bill, dict) or not isinstance(bill.get("entries"), list):
        return False
    if not _is_size(bill.get("required_bytes")) or not isinstance(bill.get("binding_phase"), str):
        return False
    return all(
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("account"), str)
        and _is_size(entry.get("bytes"))
        and all(isinstance(moment, str) for moment in _list(entry.get("moments", [])))
        for entry in bill["entries"]
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [None]


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _refused(
    code: str, message: str, where: Path | Location | str, hint: str, exit_code: ExitCode = ExitCode.STALE
) -> MemcError:
    place = where if isinstance(where, Location) else Location(file=str(where))
    return MemcError((Diagnostic(code=code, message=message, where=place, hint=hint),), exit_code)
