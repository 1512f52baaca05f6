"""Value types of the spec: sizes, limits on time, text, counts; each refuses what it cannot mean, and says why."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    PlainSerializer,
    PlainValidator,
    SerializationInfo,
    Tag,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from memc.config import Method
from memc.spec_source import shown_text, shown_value
from memc.units import parse_bytes, parse_seconds, parse_usd

MAX_SIZE_BYTES = 1 << 60
MAX_SECONDS = 10 * 365 * 86400.0
MAX_USD = 1e9
MAX_TEXT = 4096
MAX_UNIT_TEXT = 40
CANONICAL = "canonical"
_RELEASE = r"[0-9]+(\.[0-9]+){1,3}((\.post|rc|\.dev)[0-9]+)?"


class Objective(StrEnum):
    """What is preferred among the plans that fit."""

    LOWEST_RUNG = "lowest-rung"
    FASTEST = "fastest"
    CHEAPEST = "cheapest"


class Scheduler(StrEnum):
    """What starts the run on its machines."""

    NONE = "none"
    SLURM = "slurm"
    SKYPILOT = "skypilot"
    KUBERNETES = "kubernetes"


class PreferenceLoss(StrEnum):
    """Loss of preference training, by the name of TRL's `loss_type`."""

    SIGMOID = "sigmoid"
    SIGMOID_NORM = "sigmoid_norm"
    HINGE = "hinge"
    IPO = "ipo"
    ROBUST = "robust"
    EXO_PAIR = "exo_pair"
    NCA_PAIR = "nca_pair"
    BCO_PAIR = "bco_pair"
    SPPO_HARD = "sppo_hard"
    AOT = "aot"
    AOT_UNPAIRED = "aot_unpaired"
    APO_ZERO = "apo_zero"
    APO_DOWN = "apo_down"
    DISCOPOP = "discopop"


class ReferencePlace(StrEnum):
    """Where the reference of preference training is, when all weights train."""

    MODEL = "model"
    PRECOMPUTED = "precomputed"


class LrScheduler(StrEnum):
    """Learning rate schedule, by its transformers name. Only those that need no further arguments."""

    LINEAR = "linear"
    COSINE = "cosine"
    COSINE_WITH_RESTARTS = "cosine_with_restarts"
    POLYNOMIAL = "polynomial"
    CONSTANT = "constant"
    CONSTANT_WITH_WARMUP = "constant_with_warmup"
    INVERSE_SQRT = "inverse_sqrt"


class ModuleSet(StrEnum):
    """Linear modules that carry an adapter, named as a set: those of attention, or all in the blocks."""

    ATTENTION = "attention"
    ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Size:
    """An amount of memory.

    Attributes:
        bytes: The amount.
        text: As it was written, for display; not compared.
    """

    bytes: int
    text: str = field(compare=False)


@dataclass(frozen=True)
class RunLimit:
    """The longest or dearest run that is allowed; exactly one of the two is set.

    Attributes:
        seconds: Wall clock; None when the limit is money.
        usd: US dollars; None when the limit is time.
        text: As it was written, for display; not compared.
    """

    seconds: float | None
    usd: float | None
    text: str = field(compare=False)


def fault(code: str, message: str, hint: str) -> PydanticCustomError:
    """Returns an error that keeps its own code, message and hint through pydantic."""
    return PydanticCustomError(code, "{message}", {"message": message, "hint": hint})


def parse_size(value: object) -> Size:
    """Returns the size that ``22GiB`` names.

    Raises:
        PydanticCustomError: Not text, no unit, not positive, or 1 EiB and more.
    """
    if isinstance(value, Size):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        shown = f"{value:g}" if abs(value) < 1e9 else "22"
        raise fault("spec-size", f"a size needs a unit, got {shown_value(value)}", f"write for example {shown}GiB")
    if not isinstance(value, str):
        raise fault(
            "spec-size", f"a size must be a number and a unit, got {shown_value(value)}", "write for example 22GiB"
        )
    try:
        size_bytes = parse_bytes(value) if len(value) <= MAX_UNIT_TEXT else 0
    except ValueError:
        raise fault(
            "spec-size",
            f"{shown_text(value)} is not a size",
            "write a number and one of MiB, GiB, TiB, MB, GB, TB, for example 22GiB",
        ) from None
    if not 0 < size_bytes < MAX_SIZE_BYTES:
        raise fault(
            "spec-out-of-range",
            f"a size must be above 0 and below 1024 PiB, got {shown_text(value)}",
            "write a real size",
        )
    return Size(size_bytes, value.strip())


def parse_size_or_auto(value: object) -> Size | None:
    """Returns the size; None for ``auto`` (or no value)."""
    return None if value is None or value == "auto" else parse_size(value)


def parse_run_limit(value: object) -> RunLimit | None:
    """Returns the limit that ``24h`` or ``$40`` names; None for ``none`` (or no value).

    Raises:
        PydanticCustomError: Neither, not positive, above ten years or a billion dollars.
    """
    if value is None or value == "none" or isinstance(value, RunLimit):
        return value if isinstance(value, RunLimit) else None
    hint = "write for example 24h, 90min, 3d, $40 or none"
    if not isinstance(value, str):
        raise fault("spec-run-limit", f"a limit must be a duration or money, got {shown_value(value)}", hint)
    try:
        short = value if len(value) <= MAX_UNIT_TEXT else "0s"
        usd = parse_usd(short) if "$" in short else None
        seconds = None if "$" in short else parse_seconds(short)
    except ValueError:
        raise fault("spec-run-limit", f"{shown_text(value)} is neither a duration nor money", hint) from None
    if not (0 < seconds <= MAX_SECONDS if seconds is not None else 0 < (usd or 0) <= MAX_USD):
        allowed = "above 0 and at most ten years or 10^9 dollars"
        raise fault("spec-out-of-range", f"a limit must be {allowed}, got {shown_text(value)}", hint)
    return RunLimit(seconds, usd, value.strip())


def check_text(value: str) -> str:
    """Returns `value` unchanged when it can be a name or a path.

    New lines and tabs may stand in a path and pass; other control characters, NUL and lone surrogates may not: no file
    system or terminal takes them well.

    Raises:
        PydanticCustomError: Blank, or with such a character.
    """
    if not value.strip():
        raise fault(
            "spec-empty-text",
            f"the text must not be empty, got {shown_text(value)}",
            "write a value or remove the line",
        )
    for char in value:
        if unicodedata.category(char) in ("Cc", "Cs") and char not in "\n\t":
            raise fault(
                "spec-control-character",
                f"the text holds the control character U+{ord(char):04X}, which no path or name can carry safely",
                "remove the character",
            )
    return value


def check_line(value: str) -> str:
    """Returns `value` unchanged when it stands on one line: it goes where only the end of a line ends it.

    Raises:
        PydanticCustomError: With a new line in it, or no text at all.
    """
    if "\n" in value:
        raise fault(
            "spec-control-character",
            "the text holds a new line, and what follows it would be read as a line of its own",
            "remove the new line",
        )
    return check_text(value)


def check_version(value: object) -> object:
    """Returns `value` without blanks around it when it is one release, as a package index names it.

    Raises:
        PydanticCustomError: A number, which has lost its zeros (0.10 is 0.1), a range, or no version.
    """
    if isinstance(value, str) and re.fullmatch(_RELEASE, value.strip()):
        return value.strip()
    number = isinstance(value, int | float) and not isinstance(value, bool)
    shown = f"the number {value}" if number else shown_value(value)
    hint = f'write it in quotes, with its zeros: "{value}"' if number else "write one release, for example 4.57.1"
    raise fault("spec-version", f"a version must be one release as text, got {shown}", hint)


def check_unique(values: tuple[str, ...]) -> tuple[str, ...]:
    """Returns `values` unchanged when none stands twice.

    Raises:
        PydanticCustomError: One does.
    """
    for position, value in enumerate(values):
        if value in values[:position]:
            raise fault(
                "spec-repeated-item", f"{shown_text(str(value))} stands twice in the list", "remove one of the two"
            )
    return values


def check_modules(values: tuple[str, ...]) -> tuple[str, ...]:
    """Returns `values` unchanged when there is at least one and none stands twice.

    Raises:
        PydanticCustomError: Otherwise.
    """
    if not values:
        raise fault("spec-empty-list", "the list of modules is empty", "write attention, all-linear or module names")
    return check_unique(values)


def _whole(value: object) -> object:
    """Returns 5e8 as 500000000, as DeepSpeed's own files spell bucket sizes; everything else unchanged."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def _methods(value: object) -> object:
    if value == "auto":
        return ()
    if isinstance(value, list | tuple) and not value:
        raise fault("spec-empty-list", "the list of methods is empty", "write auto, or at least one method")
    return (value,) if isinstance(value, str) else value


def _every(value: object) -> object:
    return int(value) if isinstance(value, bool) else value


def _serializer(auto: str, canonical: Callable[[Any], str]) -> PlainSerializer:
    def serialize(value: Any, info: SerializationInfo) -> str:
        if value is None:
            return auto
        return canonical(value) if info.context == CANONICAL else str(value.text)

    return PlainSerializer(serialize)


def _canonical_size(size: Size) -> str:
    return f"{size.bytes}B"


def _canonical_limit(limit: RunLimit) -> str:
    number = f"{limit.seconds if limit.usd is None else limit.usd:.6f}".rstrip("0").rstrip(".")
    return f"{number}s" if limit.usd is None else f"${number}"


_NUMBER = r"([0-9]+(\.[0-9]+)?|\.[0-9]+)"
_SIZE_SCHEMA = {"type": "string", "pattern": rf"^\s*{_NUMBER}\s*([KMGTkmgt][Ii]?)?[Bb]\s*$"}
_LIMIT_PATTERN = rf"^(none|\s*\$\s*{_NUMBER}\s*|\s*{_NUMBER}\s*([SsMmHhDd]|[Mm][Ii][Nn])\s*)$"
SizeField = Annotated[
    Size, PlainValidator(parse_size), _serializer("auto", _canonical_size), WithJsonSchema(_SIZE_SCHEMA)
]
SizeOrAuto = Annotated[
    Size | None,
    PlainValidator(parse_size_or_auto),
    _serializer("auto", _canonical_size),
    WithJsonSchema({"anyOf": [{"const": "auto"}, _SIZE_SCHEMA, {"type": "null"}]}),
]
RunLimitField = Annotated[
    RunLimit | None,
    PlainValidator(parse_run_limit),
    _serializer("none", _canonical_limit),
    WithJsonSchema({"anyOf": [{"type": "string", "pattern": _LIMIT_PATTERN}, {"type": "null"}]}),
]

Text = Annotated[str, Field(strict=True, max_length=MAX_TEXT), AfterValidator(check_text)]
Line = Annotated[str, Field(strict=True, max_length=MAX_TEXT), AfterValidator(check_line)]
Version = Annotated[
    str,
    BeforeValidator(check_version),
    WithJsonSchema({"type": "string", "pattern": rf"^\s*{_RELEASE}\s*$"}),
]
Names = Annotated[tuple[Text, ...], Field(max_length=200), AfterValidator(check_unique)]
Flag = Annotated[bool, Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Elements = Annotated[
    int,
    BeforeValidator(_whole, json_schema_input_type=float),
    Field(strict=True, ge=0, le=10**15),
]
Methods = Annotated[
    tuple[Method, ...],
    AfterValidator(check_unique),
    BeforeValidator(_methods),
    PlainSerializer(lambda methods: [str(method) for method in methods] or "auto"),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["auto", *Method]},
                {"type": "array", "minItems": 1, "uniqueItems": True, "items": {"enum": list(Method)}},
            ]
        }
    ),
]
CheckpointEvery = Annotated[
    int,
    BeforeValidator(_every),
    Field(strict=True, ge=0, le=10_000),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 10_000}]}),
]
WORD, LIST = "<word>", "<list>"
TargetModules = Annotated[
    Annotated[ModuleSet, Tag(WORD)]
    | Annotated[tuple[Text, ...], Field(max_length=200), AfterValidator(check_modules), Tag(LIST)],
    Discriminator(lambda value: WORD if isinstance(value, str) else LIST),
]
