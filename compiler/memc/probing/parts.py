"""The parts of a probe: what each measures, what it needs, and how the time is shared."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Part:
    """One thing that is measured.

    Attributes:
        name: Kebab-case.
        figures: Names of the figures it may give, or what they begin with.
        weight: Its share of the time, beside those of the other parts that run.
        gpus: GPUs that it needs.
        compiles: Whether a library compiles an operator for it at its first use, which does not count as measuring.
    """

    name: str
    figures: tuple[str, ...]
    weight: float
    gpus: int = 0
    compiles: bool = False


PARTS: tuple[Part, ...] = (
    Part(name="host-memory", figures=("host_memory_bytes_per_second",), weight=3),
    Part(name="host-adam", figures=("torch_host_adam_params_per_second",), weight=5),
    Part(name="disk", figures=("nvme_write_bytes_per_second", "nvme_read_bytes_per_second"), weight=8),
    Part(name="products", figures=("matmul_flops_per_second.",), weight=18, gpus=1),
    Part(name="card-memory", figures=("memory_bytes_per_second",), weight=3, gpus=1),
    Part(name="pcie", figures=("pcie_bytes_per_second", "pcie_unpinned_bytes_per_second"), weight=6, gpus=1),
    Part(name="all-reduce", figures=("allreduce_bytes_per_second",), weight=12, gpus=2),
    Part(name="deepspeed-adam", figures=("host_adam_params_per_second",), weight=5, compiles=True),
)
"""In the order in which they run: what has to wait for a compiler comes last."""
HOST = frozenset(part.name for part in PARTS if not part.gpus)
