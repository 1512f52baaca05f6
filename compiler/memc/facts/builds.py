"""Builds of torch: which cards the one of PyPI runs on, and where the one for other cards is."""

from __future__ import annotations

from dataclasses import dataclass

from memc.facts.libraries import load_fact
from memc.facts.records import GpuFacts


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """A build of torch that is not the one of PyPI.

    Attributes:
        tag: What follows the release in its version, for example ``cu126``.
        index: Address of the package index that holds it.
        releases: Releases of torch that have it, as a range; empty when all that are known have.
        reason: Why the card needs it, as a clause.
    """

    tag: str
    index: str
    releases: str
    reason: str


def torch_build(gpu: GpuFacts) -> TorchBuild | None:
    """Returns the build that runs on a card; None when that of PyPI does, or when nothing is known of another one."""
    if gpu.vendor == "amd":
        reason = f"torch from PyPI is built for CUDA, and {gpu.name} runs ROCm"
        return TorchBuild(tag=_text("amd_build"), index=_text("amd_index"), releases="", reason=reason)
    has, least = gpu.compute_capability, _capability("pypi_least_compute_capability")
    if has is None or has >= least or has < _capability("older_cards_least_compute_capability"):
        return None
    reason = (
        f"torch from PyPI begins with compute capability {least[0]}.{least[1]}, and {gpu.name} has {has[0]}.{has[1]}"
    )
    return TorchBuild(
        tag=_text("older_cards_build"),
        index=_text("older_cards_index"),
        releases=_text("older_cards_releases"),
        reason=reason,
    )


def _text(name: str) -> str:
    return str(load_fact(f"torch.{name}").value)


def _capability(name: str) -> tuple[int, int]:
    major, _, minor = _text(name).partition(".")
    return int(major), int(minor)
