"""The rates that the clock needs, as one frozen record."""

from __future__ import annotations

from dataclasses import dataclass

from memc.config import Precision
from memc.errors import Location, usage_error
from memc.facts import GpuFacts, load_fact


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockFacts:
    """Achievable rates of one machine.

    Attributes:
        flops_per_second: Matrix products in the run's precision, as training shapes reach them.
        memory_bytes_per_second: GPU memory.
        pcie_bytes_per_second: Host to device, pinned, one direction.
        bus_bytes_per_second: All-reduce bus bandwidth between the GPUs of a node.
        host_params_per_second: Elements that DeepSpeed's CPU Adam updates on one node, all ranks together.
        kernel_launch_seconds: Host time to launch one kernel.
        overlap: Share of compute time behind which communication and transfers can hide.
        assumptions: Which of these are not measurements of this card.
    """

    flops_per_second: float
    memory_bytes_per_second: float
    pcie_bytes_per_second: float
    bus_bytes_per_second: float
    host_params_per_second: float
    kernel_launch_seconds: float
    overlap: float
    assumptions: tuple[str, ...] = ()


def clock_facts(gpu: GpuFacts, precision: Precision, world_size: int) -> ClockFacts:
    """Returns the rates of one card: measured ones where the catalogue has them, else a share of the datasheet.

    Raises:
        MemcError: ``fact-unknown`` when the card has neither figure.
    """
    notes: list[str] = []
    name = {Precision.FP16: "fp16", Precision.FP32: "tf32" if "tf32" in gpu.peak_flops_per_second else "fp32"}.get(
        precision, "bf16"
    )
    matmul = gpu.achieved_flops_per_second.get(name)
    if matmul is None:
        share = _share("kernels.matmul_share_of_datasheet")
        matmul = share * _known(gpu.peak_flops_per_second.get(name), gpu, f"peak_tflops.{name}")
        notes.append(f"matmul rate of {gpu.key} is {share:.0%} of the datasheet: not measured")
    memory = gpu.achieved_memory_bytes_per_second
    if memory is None:
        share = _share("kernels.memory_share_of_datasheet")
        memory = share * _known(gpu.memory_bytes_per_second, gpu, "memory_gb_per_second")
        notes.append(f"memory rate of {gpu.key} is {share:.0%} of the datasheet: not measured")
    pcie = gpu.achieved_pcie_bytes_per_second
    if pcie is None:
        pcie = _share("pcie.achieved_share") * (gpu.pcie_bytes_per_second or _share("pcie.gen4_x16_bytes_per_second"))
        notes.append(f"PCIe rate of {gpu.key} is a share of its link rate: not measured")
    return ClockFacts(
        flops_per_second=matmul * _share("kernels.training_share_of_matmul"),
        memory_bytes_per_second=memory,
        pcie_bytes_per_second=pcie,
        bus_bytes_per_second=_bus(gpu, notes if world_size > 1 else []),
        host_params_per_second=_share("host.cpu_adam_params_per_second_node"),
        kernel_launch_seconds=_share("kernels.launch_seconds"),
        overlap=_share("kernels.overlap_share"),
        assumptions=tuple(notes),
    )


def _bus(gpu: GpuFacts, notes: list[str]) -> float:
    """Returns the all-reduce bus bandwidth inside a node."""
    if gpu.achieved_allreduce_bytes_per_second:
        return gpu.achieved_allreduce_bytes_per_second
    if gpu.nvlink_bytes_per_second:
        notes.append(f"all-reduce rate of {gpu.key} is a share of NVLink's: not measured")
        return _share("kernels.nvlink_share_of_datasheet") * gpu.nvlink_bytes_per_second / 2
    notes.append(f"{gpu.key} has no NVLink in the catalogue: collectives share PCIe")
    return _share("pcie.gen4_x16_shared_bytes_per_second")


def _share(key: str) -> float:
    return float(load_fact(key).value)


def _known(value: float | None, gpu: GpuFacts, fact: str) -> float:
    if value is None:
        raise usage_error(
            "fact-unknown",
            f"the catalogue has no {fact} of {gpu.key}, so its time cannot be estimated",
            where=Location(file=f"specs/gpus/{gpu.key}.yaml", field=fact),
            hint="use another card: memc gpus says which can be planned for",
        )
    return value
