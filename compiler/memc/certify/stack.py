"""Which libraries a trace needs, and which are here; found out without importing them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from memc.config import LossHead, Method, Optimizer, TrainingConfig
from memc.facts import load_fact
from memc.resources import sources_root

_ALWAYS = ("torch", "transformers")


def needed_libraries(config: TrainingConfig) -> tuple[str, ...]:
    """Returns the libraries whose code a trace of this configuration runs."""
    needed = list(_ALWAYS)
    if config.lora is not None:
        needed.append("peft")
    if config.loss is LossHead.CHUNKED:
        needed.append("trl")
    eight_bit = config.optimizer not in (Optimizer.ADAMW, Optimizer.ADAMW_FOREACH)
    if config.method is Method.QLORA or eight_bit:
        needed.append("bitsandbytes")
    return tuple(needed)


def missing_libraries(config: TrainingConfig) -> tuple[str, ...]:
    """Returns the needed libraries that are not installed."""
    return tuple(name for name in needed_libraries(config) if _version(name) is None)


def stack_is_here() -> bool:
    """Returns whether any trace can run here."""
    return all(_version(name) is not None for name in _ALWAYS)


def installed_versions(config: TrainingConfig) -> dict[str, str]:
    """Returns the versions of the needed libraries that are installed, without a local part (`+cpu`)."""
    found = ((name, _version(name)) for name in needed_libraries(config))
    return {name: found_version.partition("+")[0] for name, found_version in found if found_version is not None}


def planned_versions(names: Iterable[str]) -> dict[str, str]:
    """Returns the versions of libraries that plans are made for."""
    return {name: str(load_fact(f"stack.{name}").value) for name in names}


@cache
def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@cache
def tracer_digest() -> str:
    """Returns a digest of the trace's own source: another trace may find another peak."""
    folder = sources_root().joinpath("trace")
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".py")), key=lambda file: file.name)
    return _digest(file.read_bytes() for file in files)


def _digest(parts: Iterable[bytes]) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
