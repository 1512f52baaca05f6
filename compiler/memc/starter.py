"""A first spec: values in, commented text out; every field carries its own sentence and hostile values stay values."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from memc.errors import Diagnostic, MemcError
from memc.facts import GpuFacts, Objective, load_gpu, load_model
from memc.schema import modeline
from memc.spec import LoadedSpec, Section, Spec, parse_spec
from memc.spec_sentences import add_sentences
from memc.spec_source import scalar_value

Values = Mapping[str, Any]
TEXT_FIELDS = frozenset({"model", "data.train", "data.eval", "hardware.gpu", "training.output_dir"})
_ALWAYS_SHOWN = (
    "model",
    "task",
    "data",
    "method",
    "training",
    "hardware",
    "memory",
    "time",
    "objective",
)
_PLAIN = re.compile(r"[A-Za-z0-9_./$][A-Za-z0-9_./+$-]*")
_STAND_INS: dict[str, Any] = {"model": "model", "data.train": "train", "data.max_length": 2**24, "hardware.gpu": "gpu"}
_HEAD = """\
# What memc compiles. A line that begins with "# " and a key shows a default: to change it, remove the "# ", and that
# of its section.
"""


def starter_text(values: Values) -> str:
    """Returns the text of a spec that holds `values`, by dotted field; what is not among them stands as a comment."""
    add_sentences()
    lines = [modeline(), _HEAD.rstrip()]
    for name in _ALWAYS_SHOWN:
        info = Spec.model_fields[name]
        section = info.annotation
        lines += ["", f"# {info.description}"]
        if isinstance(section, type) and issubclass(section, Section):
            lines += _section(name, section, values)
        else:
            lines.append(_line(name, info, name, values))
    lines += _rest(values)
    return "\n".join(lines) + "\n"


def answer_value(field: str, answer: str) -> Any:
    """Returns what an answer means where a spec has it: text for names and paths, else as YAML 1.2 reads it.

    A comma separates the items of a list of methods.
    """
    if field in TEXT_FIELDS:
        return answer
    if field == "method" and "," in answer:
        return [part.strip() for part in answer.strip("[] ").split(",") if part.strip()]
    return scalar_value(answer)


def problems_of(field: str, values: Values, folder: Path) -> list[Diagnostic]:
    """Returns what is wrong with one field among `values`, as `memc compile` would say it; required ones may miss.

    Args:
        field: The dotted field that was just answered.
        values: Everything answered so far.
        folder: Where the spec will lie: a model may be a path relative to it.
    """
    try:
        parse_spec(starter_text({**_STAND_INS, **values}), "spec.yaml")
    except MemcError as error:
        found = [problem for problem in error.diagnostics if problem.where and _same(problem.where.field, field)]
        if found:
            return found
    return _fact_problems(field, values, folder)


def checked(values: Values, name: str, folder: Path) -> LoadedSpec:
    """Returns the spec that `starter_text` writes for `values`.

    Raises:
        MemcError: With everything that is wrong with it, unknown models and GPUs included.
    """
    found: list[Diagnostic] = []
    loaded = None
    try:
        loaded = parse_spec(starter_text(values), name)
    except MemcError as error:
        found += error.diagnostics
    found += [problem for field in ("model", "hardware.gpu") for problem in _fact_problems(field, values, folder)]
    if found or loaded is None:
        raise MemcError(tuple(found))
    return loaded


def catalogue_gpu(name: str) -> GpuFacts | None:
    """Returns the catalogue's record of a GPU by its device name; None when there is none or several."""
    try:
        return load_gpu(name)
    except MemcError:
        return None


def yaml_text(value: Any) -> str:
    """Returns `value` as YAML on one line that reads back as the same value."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(yaml_text(item) for item in value)}]"
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN.fullmatch(value) and scalar_value(value) == value:
        return value
    return json.dumps(value, ensure_ascii=not value.isprintable())


def _section(name: str, section: type[Section], values: Values) -> list[str]:
    lines = [f"  {_line(field, info, f'{name}.{field}', values)}" for field, info in section.model_fields.items()]
    empty = not any(key.startswith(f"{name}.") for key in values)
    return [f"# {name}:" if empty else f"{name}:", *lines]


def _line(key: str, info: FieldInfo, field: str, values: Values) -> str:
    sentence = f"  # {info.description}" if "." in field else ""
    if field in values:
        return f"{key}: {yaml_text(values[field])}{sentence}"
    return f"# {key}: {_default(info, field)}{sentence}"


def _default(info: FieldInfo, field: str) -> str:
    shown = {"method": "auto", "memory.target": "auto", "time.budget": "none", "training.epochs": "3"}
    if field in shown:
        return shown[field]
    return "null" if info.default is None else yaml_text(info.default)


def _rest(values: Values) -> list[str]:
    """Returns the sections that a first spec rarely has: in full where a value is given, else as one comment."""
    lines: list[str] = []
    for name in ("launch", "lora", "dpo", "ladder", "pin", "libraries"):
        info = Spec.model_fields[name]
        section = info.annotation
        assert isinstance(section, type) and issubclass(section, Section)
        given = [field for field in section.model_fields if f"{name}.{field}" in values]
        keys = textwrap.wrap(f"Keys: {', '.join(section.model_fields)}.", 110)
        lines += ["", f"# {info.description}", *(f"# {line}" for line in keys)]
        lines += [f"{name}:"] if given else [f"# {name}: {{}}"]
        lines += [f"  {_line(field, section.model_fields[field], f'{name}.{field}', values)}" for field in given]
    return lines


def _fact_problems(field: str, values: Values, folder: Path) -> list[Diagnostic]:
    try:
        if field == "model":
            model = load_model(str(values[field]), base_dir=folder)
            if model.objective is not Objective.CAUSAL_LM:
                message = f"{model.key} is trained as {model.objective.replace('_', ' ')}, not as a causal LM"
                hint = "memc models names the family of each model"
                return [Diagnostic(code="objective-not-emitted", message=message, hint=hint)]
            if model.unpriced:
                message = f"parameters of model_type {model.model_type!r} can be counted, but {model.unpriced}"
                return [Diagnostic(code="family-not-priced", message=message, hint="memc models lists those that are")]
        elif field == "hardware.gpu":
            load_gpu(str(values[field]))
    except MemcError as error:
        return list(error.diagnostics)
    return []


def _same(found: str, field: str) -> bool:
    return found == field or found.startswith(f"{field}.")
