"""Units: sizes in bytes, durations in seconds, money. Parsing of what people type and display of integers."""

from __future__ import annotations

import re

KIB = 1024
MIB = 1024**2
GIB = 1024**3
GB = 10**9

_SIZE_UNITS = {
    "B": 1,
    "KIB": KIB,
    "MIB": MIB,
    "GIB": GIB,
    "TIB": 1024**4,
    "KB": 10**3,
    "MB": 10**6,
    "GB": GB,
    "TB": 10**12,
}
_DURATION_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER_UNIT = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z]+)\s*")
_MONEY = re.compile(r"\s*\$\s*(\d+(?:\.\d+)?|\.\d+)\s*")


def parse_bytes(text: str) -> int:
    """Returns the number of bytes that `text` (``22GiB``, ``64 GB``, ``512MiB``) names.

    GiB is 2**30 and GB is 10**9.

    Raises:
        ValueError: When the text is not a number followed by a known unit.
    """
    match = _NUMBER_UNIT.fullmatch(text)
    if match is None or match.group(2).upper() not in _SIZE_UNITS:
        raise ValueError(f"{text!r} is not a size; write a number and a unit, for example 22GiB or 512MiB")
    return int(float(match.group(1)) * _SIZE_UNITS[match.group(2).upper()])


def parse_seconds(text: str) -> float:
    """Returns the seconds that `text` (``24h``, ``90min``, ``3d``) names.

    Raises:
        ValueError: When the text is not a number followed by s, m, min, h or d.
    """
    match = _NUMBER_UNIT.fullmatch(text)
    if match is None or match.group(2).lower() not in _DURATION_UNITS:
        raise ValueError(f"{text!r} is not a duration; write a number and a unit, for example 24h, 90min or 3d")
    return float(match.group(1)) * _DURATION_UNITS[match.group(2).lower()]


def parse_usd(text: str) -> float:
    """Returns the US dollars that `text` (``$40``) names.

    Raises:
        ValueError: When the text is not a dollar sign followed by a number.
    """
    match = _MONEY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an amount of money; write for example $40")
    return float(match.group(1))


def format_gib(size_bytes: int) -> str:
    """Returns `size_bytes` for display, in GiB with two decimals (MiB below 0.1 GiB)."""
    if abs(size_bytes) < GIB // 10:
        return f"{size_bytes / MIB:.1f} MiB"
    return f"{size_bytes / GIB:.2f} GiB"


def format_seconds(seconds: float) -> str:
    """Returns a duration for display: ``42.0 ms``, ``0.42 s``, ``12.3 min``, ``7.5 h``, ``3.2 days``."""
    if seconds < 0.1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"


def ceil_div(numerator: int, denominator: int) -> int:
    """Returns the smallest integer not below numerator / denominator."""
    return -(-numerator // denominator)


def round_up(value: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is not below `value`."""
    return ceil_div(value, multiple) * multiple


def next_power_of_two(value: int) -> int:
    """Returns the smallest power of two that is not below `value` (0 for 0)."""
    return 0 if value <= 0 else 1 << (value - 1).bit_length()
