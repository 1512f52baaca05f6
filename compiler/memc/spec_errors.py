"""What pydantic found, as diagnostics with a place in the text, what was got, what is allowed and what to write."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from memc.errors import Diagnostic, Location
from memc.spec_sentences import add_sentences
from memc.spec_source import Document, shown_text, shown_value, source_lines

Path = tuple[str | int, ...]

# Keys that other tools use for the same thing, and where a spec keeps it.
FOREIGN_KEYS = {
    "batch_size": "training.global_batch_size",
    "bf16": "pin.precision",
    "block_size": "data.max_length",
    "budget": "time.budget",
    "dataset": "data.train",
    "eval_dataset": "data.eval",
    "fp16": "pin.precision",
    "gpus": "hardware.count",
    "gradient_checkpointing": "pin.activation_checkpointing",
    "lora_r": "pin.lora_rank",
    "lr": "training.learning_rate",
    "lr_scheduler_type": "training.lr_scheduler",
    "max_seq_length": "data.max_length",
    "max_seq_len": "data.max_length",
    "model_name_or_path": "model",
    "num_gpus": "hardware.count",
    "num_train_epochs": "training.epochs",
    "optim": "pin.optimizer",
    "per_device_eval_batch_size": "pin.eval_batch_size",
    "per_device_train_batch_size": "pin.micro_batch_size",
    "r": "lora.rank",
    "seq_len": "data.max_length",
    "sequence_length": "data.max_length",
    "stage": "pin.zero_stage",
    "train_file": "data.train",
    "validation_file": "data.eval",
}
_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing_size": "a whole number",
    "bool_type": "true or false",
    "string_type": "text",
    "float_type": "a number",
    "tuple_type": "a list",
    "model_type": "a section",
    "model_attributes_type": "a section",
}
_COMPARISONS = {
    "greater_than": "above",
    "greater_than_equal": "at least",
    "less_than": "below",
    "less_than_equal": "at most",
}
_COMPARISON_LIMITS = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "less_than_equal": "le"}
_YAML_1_1_BOOLEANS = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the known name that `name` most likely means; empty when none is near."""
    by_folded = {_folded(candidate): candidate for candidate in known}
    matches = difflib.get_close_matches(_folded(name[:80]), list(by_folded), n=1, cutoff=0.6)
    return by_folded[matches[0]] if matches else ""


def field_at(model: type[BaseModel], path: Path) -> FieldInfo | None:
    """Returns the field of `model` that `path` names (list indices at its end are dropped); None for none."""
    info: FieldInfo | None = None
    owner: Any = model
    for step in path:
        if isinstance(step, int):
            break
        if not (isinstance(owner, type) and issubclass(owner, BaseModel)) or step not in owner.model_fields:
            return None
        info = owner.model_fields[step]
        owner = info.annotation
    return info


def section_fields(model: type[BaseModel], path: Path) -> Mapping[str, FieldInfo]:
    """Returns the fields of the section at `path`; none when there is no such section."""
    info = field_at(model, path)
    owner = model if not path else info.annotation if info else None
    return owner.model_fields if isinstance(owner, type) and issubclass(owner, BaseModel) else {}


def field_paths(model: type[BaseModel]) -> list[str]:
    """Returns the dotted paths of every field that is not a section."""
    paths = []
    for name, info in model.model_fields.items():
        owner = info.annotation
        nested = isinstance(owner, type) and issubclass(owner, BaseModel)
        paths += [f"{name}.{inner}" for inner in owner.model_fields] if nested else [name]  # type: ignore[union-attr]
    return paths


def located(document: Document, path: Path, code: str, message: str, hint: str, *, key: bool = False) -> Diagnostic:
    """Returns a diagnostic at `path` (of its key when `key`), or at the nearest section that exists."""
    position, _ = document.find(path, key=key)
    where = Location(file=document.file, line=position.line, column=position.column, field=dotted(path))
    return Diagnostic(
        code=code, message=message, where=where, context=source_lines(document.lines, position), hint=hint
    )


def dotted(path: Path) -> str:
    """Returns `path` for display, for example ``ladder.forbid.0``; nothing unprintable in it."""
    return ".".join(step if _plain(step) else shown_text(str(step)) for step in map(str, path))


def diagnose(document: Document, model: type[BaseModel], errors: Iterable[Mapping[str, Any]]) -> list[Diagnostic]:
    """Returns one diagnostic for each of pydantic's errors on the text of `document`.

    A missing key is not reported next to an unknown one that most likely means it.
    """
    found = list(errors)
    meant = {
        (*path[:-1], _known_key(model, path))
        for path in (error_path(error) for error in found if error["type"] == "extra_forbidden")
    }
    return [
        _diagnose_one(document, model, error)
        for error in found
        if error["type"] != "missing" or error_path(error) not in meant
    ]


_UNION_TAGS = ("<word>", "<list>")


def error_path(error: Mapping[str, Any]) -> Path:
    """Returns where an error lies in the spec: pydantic's location without the tags of its unions.

    The last step of an unknown key is the key itself, whatever it looks like.
    """
    steps = tuple(error["loc"])
    inner, last = (steps[:-1], steps[-1:]) if error["type"] == "extra_forbidden" else (steps, ())
    return (*(step for step in inner if step not in _UNION_TAGS), *last)


def _diagnose_one(document: Document, model: type[BaseModel], error: Mapping[str, Any]) -> Diagnostic:
    path, kind = error_path(error), str(error["type"])
    context = error.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(document, model, path)
    if kind == "missing":
        return _missing(document, model, path)
    name, got = f"`{dotted(path)}`", error["input"]
    if "hint" in context:
        return located(document, path, kind, f"{name}: {context['message']}", context["hint"])
    if kind in _EXPECTED:
        message = f"{name} must be {_EXPECTED[kind]}, got {shown_value(got)}"
        return located(document, path, "spec-wrong-type", message, _type_hint(model, path, kind, got))
    if kind in ("enum", "literal_error"):
        return _unknown_value(document, path, got, re.findall(r"'([^']*)'", str(context["expected"])))
    code, message = _range_message(name, kind, context, got) or ("spec-invalid", f"{name}: {error['msg']}")
    return located(document, path, code, message, f"write {_range_hint(kind, context)}{_sentence(model, path)}")


def _range_hint(kind: str, context: Mapping[str, Any]) -> str:
    if kind in _COMPARISONS:
        return f"a number {_COMPARISONS[kind]} {_limit(kind, context)}"
    return {"finite_number": "a finite number", "string_unicode": "whole characters"}.get(kind, "a shorter value")


def _limit(kind: str, context: Mapping[str, Any]) -> str:
    limit = context[_COMPARISON_LIMITS[kind]]
    return f"{limit:,}" if isinstance(limit, int) else f"{limit:g}"


def _range_message(name: str, kind: str, context: Mapping[str, Any], got: Any) -> tuple[str, str] | None:
    if kind in _COMPARISONS:
        return (
            "spec-out-of-range",
            f"{name} must be {_COMPARISONS[kind]} {_limit(kind, context)}, got {shown_value(got)}",
        )
    if kind == "finite_number":
        return "spec-out-of-range", f"{name} must be a finite number, got {shown_value(got)}"
    if kind in ("too_long", "string_too_long"):
        unit = "items" if kind == "too_long" else "characters"
        return "spec-too-long", f"{name} must have at most {context['max_length']:,} {unit}, got {len(got):,}"
    if kind == "string_unicode":
        return "spec-control-character", f"{name} holds half of a surrogate pair, which is not a character"
    return None


def _unknown_key(document: Document, model: type[BaseModel], path: Path) -> Diagnostic:
    key, section = str(path[-1]), path[:-1]
    known = section_fields(model, section)
    place = f"`{dotted(section)}`" if section else "the spec"
    message = f"{place} has no key {shown_text(key)}"
    near = _known_key(model, path)
    elsewhere = [p for p in field_paths(model) if p.rpartition(".")[2] == _folded(key)]
    foreign = FOREIGN_KEYS.get(_folded(key))
    if elsewhere and _folded(key) not in known:
        message, hint = f"{message}; it belongs elsewhere", f"write it as `{elsewhere[0]}`"
    elif foreign:
        message, hint = f"{message}; memc calls it `{foreign}`", f"write it as `{foreign}`"
    elif near:
        message, hint = f"{message}; did you mean `{near}`?", f"write `{near}`"
    else:
        hint = f"use one of {', '.join(known)}" if known else "remove it"
    return located(document, path, "spec-unknown-key", message, hint, key=True)


def _known_key(model: type[BaseModel], path: Path) -> str:
    """Returns the key of the same section that the unknown key at the end of `path` most likely means."""
    return nearest(str(path[-1]), section_fields(model, path[:-1]))


def _missing(document: Document, model: type[BaseModel], path: Path) -> Diagnostic:
    info = field_at(model, path)
    example = info.examples[0] if info and info.examples else "..."
    below = f" below `{dotted(path[:-1])}`" if len(path) > 1 else ""
    sentence = f": {_description(model, path)}" if _description(model, path) else ""
    hint = f"add `{path[-1]}: {example}`{below}"
    return located(document, path, "spec-missing-key", f"`{dotted(path)}` is missing{sentence}", hint)


def _unknown_value(document: Document, path: Path, got: object, allowed: list[str]) -> Diagnostic:
    choices = ", ".join(allowed)
    message = f"`{dotted(path)}` must be one of {choices}; got {shown_value(got)}"
    near = nearest(got, allowed) if isinstance(got, str) else ""
    if near:
        message += f"; did you mean {near}?"
    return located(document, path, "spec-unknown-value", message, f"write {near or 'one of ' + choices}")


def _type_hint(model: type[BaseModel], path: Path, kind: str, got: object) -> str:
    info = field_at(model, path)
    default = "" if info is None or info.is_required() else ", or remove the line for the default"
    if kind.startswith("model"):
        keys = ", ".join(section_fields(model, path))
        return f"write its keys below `{dotted(path)}:`, each on an indented line{default}: {keys}"
    if got is None:
        return f"write {_EXPECTED[kind]}{default}"
    if kind == "string_type" and not isinstance(got, dict | list):
        return (
            f'put it in quotes: "{str(got).lower() if isinstance(got, bool) else got}"' if _short(got) else "write text"
        )
    if kind == "bool_type" and isinstance(got, str) and got.lower() in _YAML_1_1_BOOLEANS:
        return f"write {_YAML_1_1_BOOLEANS[got.lower()]}; {got} is text in YAML 1.2"
    if kind in ("int_type", "float_type") and isinstance(got, str):
        digits = re.sub(r"[,_ ]", "", got)
        if re.fullmatch(r"0*[0-9]{1,20}", digits):
            return f"write {int(digits)}, without quotes, leading zeros or separators"
        return "write a plain number, without a unit or quotes"
    return f"write {_EXPECTED[kind]}{_sentence(model, path)}"


def _sentence(model: type[BaseModel], path: Path) -> str:
    text = _description(model, path)
    return f". {text}" if text else ""


def _description(model: type[BaseModel], path: Path) -> str:
    add_sentences()
    info = field_at(model, path)
    return (info.description or "").rstrip(".") if info else ""


def _short(value: object) -> bool:
    return not isinstance(value, int) or abs(value) < 10**21


def _folded(name: str) -> str:
    return name.strip().lower().replace("-", "_").replace(" ", "_")


def _plain(step: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9_-]{1,60}", step) is not None
