"""Names that their reader does not know: renamed, removed, not there yet, or misspelt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from memc.lint.context import Context
from memc.lint.records import Document, Kind, Remark, Weight
from memc.lint.settings import Table, close_name, successors, table

_TRL = ("sft-config", "dpo-config", "grpo-config", "reward-config", "kto-config")
_BESIDE = ("model-config", "script-arguments")
_FREE = ("", "command", "section", "llama-factory")
"""Dialects whose documents may hold keys of somebody's own."""


@dataclass(frozen=True, kw_only=True)
class _Reader:
    """Who reads a section.

    Attributes:
        tables: The names it knows.
        who: What to call it.
        prefix: What stands before each name in the file.
        strict: Whether it stops at a name that it does not know.
        closed: Whether every name of the section is meant for it.
        extra: Names that it takes besides.
    """

    tables: Sequence[Table]
    who: str
    prefix: str = ""
    strict: bool = True
    closed: bool = True
    extra: frozenset[str] = frozenset()


_CLASSES = {
    "training-arguments": "TrainingArguments",
    "sft-config": "SFTConfig",
    "dpo-config": "DPOConfig",
    "grpo-config": "GRPOConfig",
    "reward-config": "RewardConfig",
    "kto-config": "KTOConfig",
    "model-config": "ModelConfig",
    "script-arguments": "ScriptArguments",
}
"""What to call the reader of a table."""


def key_remarks(context: Context) -> Iterator[Remark]:
    """Yields a remark for each name that nobody reads, or reads under another name now."""
    for document in context.statements.documents:
        for steps, reader in _sections(document):
            node = document.find(*steps)
            if node is None or not node.keys:
                continue
            for name in node.keys:
                remark = _judged(document, (*steps, name), reader, context)
                if remark is not None:
                    yield remark


def _sections(document: Document) -> Iterator[tuple[tuple[str, ...], _Reader]]:
    """Yields the sections of a document with their readers."""
    kind = document.kind
    if kind is Kind.ARGUMENTS and document.dialect != "axolotl":
        yield (), _arguments(document)
    elif kind is Kind.ACCELERATE:
        launch = table("accelerate-launch")
        yield (), _Reader(tables=[table("accelerate-config")], who="accelerate")
        yield ("deepspeed_config",), _Reader(tables=[launch], who="accelerate", strict=False)
    elif kind is Kind.FSDP:
        owner = document.owner
        inside = owner is not None and owner.kind is Kind.ACCELERATE
        if owner is not None and owner.dialect in ("axolotl", "llama-factory"):
            return
        if inside:
            yield (), _Reader(tables=[table("accelerate-launch")], who="accelerate", prefix="fsdp_", strict=False)
        else:
            yield (), _Reader(tables=[table("fsdp-config")], who="TrainingArguments", prefix="", strict=False)
    elif kind is Kind.DEEPSPEED:
        top = table("deepspeed")
        yield (), _Reader(tables=[top], who="DeepSpeed", strict=False, extra=frozenset({"zero_optimization"}))
        yield ("zero_optimization",), _Reader(tables=[table("deepspeed-zero")], who="DeepSpeed")
        for side in ("param", "optimizer"):
            yield (
                ("zero_optimization", f"offload_{side}"),
                _Reader(tables=[table(f"deepspeed-offload-{side}")], who="DeepSpeed"),
            )
    elif (
        kind is Kind.ADAPTER
        and (document.owner is None or document.has("peft_type"))
        and str(document.value("peft_type") or "LORA").upper() == "LORA"
    ):
        yield (), _Reader(tables=[table("adapter-config")], who="PEFT", strict=bool(document.extra.get("script")))
    elif kind is Kind.QUANTIZATION and document.extra.get("script"):
        yield (), _Reader(tables=[table("quantization-config")], who="BitsAndBytesConfig", strict=False)
    elif kind is Kind.LAUNCH and document.dialect == "accelerate":
        yield (), _Reader(tables=[table("accelerate-launch")], who="accelerate launch", extra=frozenset({"m", "h"}))


def _arguments(document: Document) -> _Reader:
    own = f"{document.dialect}-config"
    if document.dialect == "class":
        return _Reader(tables=[table("training-arguments")], who="TrainingArguments")
    if own in _TRL:
        script = bool(document.extra.get("script"))
        beside = () if script else _BESIDE
        tables = [table(key) for key in (own, "training-arguments", *beside)]
        return _Reader(tables=tables, who=_CLASSES[own], closed=script)
    tables = [table(key) for key in ("training-arguments", *_TRL, *_BESIDE)]
    return _Reader(tables=tables, who="TrainingArguments", closed=False)


def _judged(document: Document, steps: tuple[str, ...], reader: _Reader, context: Context) -> Remark | None:
    """Returns the remark on one name; None when its reader knows it or it may be somebody else's."""
    written = steps[-1]
    name = _bare(written, reader)
    if name in reader.extra or written.startswith(("_", "$", "//")) or "comment" in written.lower():
        return None
    versions = {known.package: context.versions[known.package].text for known in reader.tables}
    if any(known.has(name, versions[known.package]) for known in reader.tables):
        return None
    place = document.place(*steps)
    past = next((known for known in reader.tables if name in known.names), None)
    for known in reader.tables:
        successor = successors(known.package).get(name)
        if successor is not None and (past is None or past.package == known.package):
            last = (past or known).last_with(name)
            gone = f" (gone after {last})" if last else ""
            renamed = "setting-renamed" if successor.new else "setting-removed"
            version = context.versions[known.package]
            who = _called(_CLASSES.get((past or known).key, reader.who), known.package)
            message = f"{who} {version.text} ({version.told}) has no {written}{gone}"
            if document.dialect == "command" and past is None:
                return None
            others = (version.place,) if version.place is not None else ()
            return Remark(
                code=renamed, weight=Weight.ERROR, message=message, hint=successor.advice, place=place, others=others
            )
    if past is not None:
        return _of_another_version(written, name, past, reader, context, document, steps)
    return _unknown(written, name, reader, versions, document, steps)


def _called(who: str, package: str) -> str:
    """Returns how a reader is called beside a version of its package."""
    return package if who.lower() == package else f"{who} of {package}"


def _bare(written: str, reader: _Reader) -> str:
    if reader.prefix:
        return written if written.startswith(reader.prefix) else reader.prefix + written
    return (
        written.removeprefix("fsdp_")
        if reader.who == "TrainingArguments" and reader.closed and not reader.strict
        else written
    )


def _of_another_version(
    written: str, name: str, past: Table, reader: _Reader, context: Context, document: Document, steps: tuple[str, ...]
) -> Remark:
    version = context.versions[past.package]
    added, last = past.added_in(name), past.last_with(name)
    if last:
        when, hint = f"it was there up to {last}", f"remove {written}, or install {past.package} {last}"
    else:
        when, hint = f"{added} has it", f"remove {written}, or install {past.package} {added} or later"
    who = _called(_CLASSES.get(past.key, reader.who), past.package)
    message = f"{who} {version.text} ({version.told}) has no {written}: {when}"
    others = (version.place,) if version.place is not None else ()
    return Remark(
        code="setting-of-another-version",
        weight=Weight.ERROR if reader.strict else Weight.WARNING,
        message=message,
        hint=hint,
        place=document.place(*steps),
        others=others,
    )


def _unknown(
    written: str,
    name: str,
    reader: _Reader,
    versions: Mapping[str, str],
    document: Document,
    steps: tuple[str, ...],
) -> Remark | None:
    """Returns the remark on a name that no version knows; in a file of several readers, on one like a known name."""
    known = sorted({n for table_ in reader.tables for n in table_.known(versions[table_.package])})
    close = close_name(name, known)
    alike = bool(close) and _alike(name, close)
    if not reader.closed and (not alike or document.dialect == "llama-factory"):
        return None
    siblings = document.find(*steps[:-1])
    if not reader.closed and siblings is not None and close in siblings.keys:
        return None
    package = reader.tables[0].package
    what = "stops at it" if reader.strict else "passes over it in silence"
    message = f"{_called(reader.who, package)} {versions[package]} knows no {written}, and {what}"
    spelt = (
        close
        if written == name or not reader.prefix
        else close.removeprefix(reader.prefix if not written.startswith(reader.prefix) else "")
    )
    hint = f"write {spelt}" if alike else f"remove {written}" + (f", or write {spelt}" if close else "")
    error = reader.strict and reader.closed
    return Remark(
        code="setting-unknown",
        weight=Weight.ERROR if error else Weight.WARNING,
        message=message,
        hint=hint,
        place=document.place(*steps),
    )


def _alike(name: str, close: str) -> bool:
    """Whether two names differ by no more than a slip of the hand: one letter in six."""
    slips = _distance(name.lower(), close.lower())
    return 0 < slips <= max(1, len(close) // 6) or name.lower() == close.lower()


def _distance(one: str, other: str) -> int:
    """Returns the edits of single characters that lead from one text to the other; neighbours that swap are one."""
    if abs(len(one) - len(other)) > 6 or max(len(one), len(other)) > 80:
        return 99
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, start=1):
        last, before, row = before, row, [i]
        for j, b in enumerate(other, start=1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and one[i - 2] == b:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
    return row[-1]
