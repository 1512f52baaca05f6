"""The rates that the clock needs, as one frozen record."""

from __future__ import annotations

from dataclasses import dataclass

from memc.clock.workload import AttentionKernel
from memc.config import Precision
from memc.errors import Location, usage_error
from memc.facts import GpuFacts, load_fact

_HOPPER = (9, 0)
_AMPERE = (8, 0)
_CONSUMER_BLACKWELL = (12, 0)
_GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockFacts:
    """Achievable rates of one machine.

    Attributes:
        flops_per_second: Matrix products in the run's precision, as training shapes reach them with full tiles.
        multiprocessors: Of the card; 0 when unknown, and then no wave of tiles is counted as partly empty.
        attention_rates: Operations per second of attention, forward and backward, by kernel.
        attention_block_keys: Keys that such a kernel treats at once.
        attention_width_step: Head widths between multiples of this are padded by such a kernel.
        memory_bytes_per_second: GPU memory.
        dequantized_params_per_second: 4-bit weights that are written out as 16-bit ones.
        pcie_bytes_per_second: Host to device, pinned, one direction.
        bus_bytes_per_second: Bus bandwidth of collectives between the GPUs of a node, large payloads.
        bus_hop_seconds: Latency of one hop of a ring within a node.
        network_bytes_per_second: What one GPU's share of a node's adapters sends to another node.
        network_hop_seconds: Latency of one hop of a ring between nodes.
        collective_seconds: Latency of a collective before its first hop.
        channels_in_node, channels_between_nodes: Multiprocessors that a collective occupies while it runs.
        straggling: Share of a step that each doubling of nodes adds in waiting for the slowest.
        host_params_per_second: Elements that DeepSpeed's CPU Adam updates on one node, all ranks together.
        nvme_read_bytes_per_second, nvme_write_bytes_per_second: One drive.
        operation_seconds: Host time of one operation of eager PyTorch.
        kernel_launch_seconds: Host time to launch one kernel of compiled code.
        sharded_layer_seconds: Host time of gathering and freeing one layer's weights, over forward and backward.
        torch_host_params_per_second: Elements that torch's fused AdamW updates on one node, all ranks together.
        assumptions: Which of these are not measurements of this card.
        unknown: Facts of the card that are not known, and that something stands in for: what is timed with such rates
            can be compared, and is no time.
    """

    flops_per_second: float
    multiprocessors: int
    attention_rates: dict[str, tuple[float, float]]
    attention_block_keys: int
    attention_width_step: int
    memory_bytes_per_second: float
    dequantized_params_per_second: float
    pcie_bytes_per_second: float
    bus_bytes_per_second: float
    bus_hop_seconds: float
    network_bytes_per_second: float
    network_hop_seconds: float
    collective_seconds: float
    channels_in_node: int
    channels_between_nodes: int
    straggling: float
    host_params_per_second: float
    nvme_read_bytes_per_second: float
    nvme_write_bytes_per_second: float
    operation_seconds: float
    kernel_launch_seconds: float
    sharded_layer_seconds: float
    torch_host_params_per_second: float
    assumptions: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    def launch_seconds(self, *, compiled: bool) -> float:
        """Returns the host time of one kernel."""
        return self.kernel_launch_seconds if compiled else self.operation_seconds


def clock_facts(
    gpu: GpuFacts,
    precision: Precision,
    world_size: int,
    *,
    products: str = "",
    power_limit_watts: float | None = None,
    nodes: int = 1,
    network_bytes_per_second: float | None = None,
) -> ClockFacts:
    """Returns the rates of one card: measured ones where the catalogue has them, else a share of the datasheet.

    Args:
        gpu: The card.
        precision: Of the run.
        world_size: GPUs; what concerns collectives is noted only when there are several.
        products: Type of matrix products where it is not the precision's: ``tf32``, ``fp8``.
        power_limit_watts: Power limit of the card where it is below the board's own.
        nodes: Machines; what concerns their network is noted only when there are several.
        network_bytes_per_second: What a GPU's share of its node's adapters could send; None for the generation's usual.

    Raises:
        MemcError: ``fact-unknown`` when the card has neither figure.
    """
    notes = _own_notes(gpu)
    name = {Precision.FP16: "fp16", Precision.FP32: "tf32" if "tf32" in gpu.peak_flops_per_second else "fp32"}.get(
        precision, "bf16"
    )
    name = products or name
    memory = gpu.achieved_memory_bytes_per_second
    if memory is None:
        share = _share("kernels.memory_share_of_datasheet")
        memory = share * _known(gpu.memory_bytes_per_second, gpu, "memory_gb_per_second")
        notes.append(f"memory rate of {gpu.key} is {share:.0%} of the datasheet: not measured")
    pcie = gpu.achieved_pcie_bytes_per_second
    if pcie is None:
        pcie = _share("pcie.achieved_share") * (gpu.pcie_bytes_per_second or _share("pcie.gen4_x16_bytes_per_second"))
        notes.append(f"PCIe rate of {gpu.key} is a share of its link rate: not measured")
    several = notes if world_size > 1 else []
    network = _network(gpu, network_bytes_per_second, notes if nodes > 1 else [])
    slowed = 1.0
    if power_limit_watts is not None and gpu.board_power_watts is not None:
        slowed = min(1.0, power_limit_watts / gpu.board_power_watts) ** _share("kernels.power_exponent")
    return ClockFacts(
        flops_per_second=_training_products(gpu, name, slowed, notes),
        multiprocessors=gpu.multiprocessors or 0,
        attention_rates=_attention_rates(gpu, slowed),
        attention_block_keys=int(_share("kernels.attention_block_keys")),
        attention_width_step=int(_share("kernels.flash_head_width_step")),
        memory_bytes_per_second=memory,
        dequantized_params_per_second=memory * _share("kernels.dequantized_params_per_byte"),
        pcie_bytes_per_second=pcie,
        bus_bytes_per_second=_bus(gpu, several),
        bus_hop_seconds=_share(
            "nccl.ring_hop_nvlink_seconds" if gpu.nvlink_bytes_per_second else "nccl.ring_hop_pci_seconds"
        ),
        network_bytes_per_second=network,
        network_hop_seconds=_share("nccl.ring_hop_network_seconds"),
        collective_seconds=_share("nccl.ring_base_seconds"),
        channels_in_node=int(_share("nccl.collective_channels_node")),
        channels_between_nodes=int(_share("nccl.collective_channels_network")),
        straggling=_share("kernels.straggling_per_doubling_of_nodes"),
        host_params_per_second=_host(gpu, "host_adam_params_per_second", "cpu_adam_params_per_second_node"),
        nvme_read_bytes_per_second=_host(gpu, "nvme_read_bytes_per_second", "nvme_gen4_read_bytes_per_second"),
        nvme_write_bytes_per_second=_host(gpu, "nvme_write_bytes_per_second", "nvme_gen4_write_bytes_per_second"),
        operation_seconds=_share("kernels.operation_seconds"),
        kernel_launch_seconds=_share("kernels.launch_seconds"),
        sharded_layer_seconds=_share("kernels.sharded_layer_seconds"),
        torch_host_params_per_second=_host(
            gpu, "torch_host_adam_params_per_second", "torch_fused_cpu_adam_params_per_second_node"
        ),
        assumptions=tuple(notes),
    )


def _own_notes(gpu: GpuFacts) -> list[str]:
    """Returns a note on rates that the user measured, where any stands in for the catalogue's."""
    own = gpu.calibration
    rates = [] if own is None else [name for name in own.figures if "_per_second" in name]
    return [f"{len(rates)} rates of {gpu.key} are the user's own measurements"] if rates else []


def _training_products(gpu: GpuFacts, name: str, slowed: float, notes: list[str]) -> float:
    """Returns the rate of matrix products in training: as the user's own steps show it, else a share of large ones."""
    if (own := gpu.measured(f"training_flops_per_second.{name}")) is not None:
        return own.median
    return slowed * _matmul(gpu, name, notes) * _share("kernels.training_share_of_matmul")


def _host(gpu: GpuFacts, figure: str, fact: str) -> float:
    """Returns a rate of the machine that the card is in: as the user measured it, else that of a usual one."""
    own = gpu.measured(figure)
    return _share(f"host.{fact}") if own is None else own.median


def _matmul(gpu: GpuFacts, name: str, notes: list[str]) -> float:
    """Returns the rate of large matrix products under lasting load.

    Measured where the catalogue has it; else a share of the best measured rate, or of the datasheet's. A card whose
    sustained rate is known in one precision slows down as much in the others.
    """
    best, lasting = gpu.achieved_flops_per_second, gpu.sustained_flops_per_second or {}
    share = _share("kernels.sustained_share_of_matmul")
    for precision, rate in lasting.items():
        if precision in best:
            share = min(1.0, rate / best[precision])
    # bf16 and fp16 run on the same units: where their peaks are equal, the better measurement stands for both.
    twin = {"bf16": "fp16", "fp16": "bf16"}.get(name, name)
    if gpu.peak_flops_per_second.get(twin) != gpu.peak_flops_per_second.get(name):
        twin = name
    for precision in (name, twin):
        if precision in lasting:
            return lasting[precision]
    if name in best or twin in best:
        return share * max(best.get(name, 0.0), best.get(twin, 0.0))
    of_peak = _share("kernels.matmul_share_of_datasheet")
    notes.append(f"matmul rate of {gpu.key} is {of_peak:.0%} of the datasheet: not measured")
    return share * of_peak * _known(gpu.peak_flops_per_second.get(name), gpu, f"peak_tflops.{name}")


def _attention_rates(gpu: GpuFacts, slowed: float) -> dict[str, tuple[float, float]]:
    """Returns operations per second of each attention kernel, forward and backward.

    Kernels of the first two versions use the tensor cores as Ampere has them; data-centre cards from Hopper on keep
    those instructions at a rate that their larger peak does not raise.
    """
    capability = gpu.compute_capability or _AMPERE
    peaks = gpu.peak_flops_per_second
    peak = peaks.get("bf16") or peaks.get("fp16") or peaks.get("fp32") or 0.0
    forward = peak * _share("kernels.flash2_forward_share")
    third = forward
    if _HOPPER <= capability < _CONSUMER_BLACKWELL:
        forward = min(forward, _share("kernels.flash2_forward_flops_hopper"))
        third = peak * _share("kernels.flash3_forward_share_hopper")
    first = forward * _share("kernels.flash1_over_flash2")
    back = _share("kernels.flash2_backward_over_forward")
    rates = {
        AttentionKernel.FLASH1: first,
        AttentionKernel.FLASH2: forward,
        AttentionKernel.FLASH3: third,
        AttentionKernel.MASKED: forward,
        AttentionKernel.EAGER: forward,
    }
    return {kernel.value: (slowed * rate, slowed * rate * back) for kernel, rate in rates.items()}


def _bus(gpu: GpuFacts, notes: list[str]) -> float:
    """Returns the all-reduce bus bandwidth inside a node."""
    if gpu.achieved_allreduce_bytes_per_second:
        return gpu.achieved_allreduce_bytes_per_second
    if gpu.nvlink_bytes_per_second:
        notes.append(f"all-reduce rate of {gpu.key} is a share of NVLink's: not measured")
        return _share("kernels.nvlink_share_of_datasheet") * gpu.nvlink_bytes_per_second / 2
    notes.append(f"{gpu.key} has no NVLink in the catalogue: collectives share PCIe")
    return _share("pcie.gen4_x16_shared_bytes_per_second")


def _network(gpu: GpuFacts, given: float | None, notes: list[str]) -> float:
    """Returns what one GPU's share of a node's adapters sends: what is given, else the generation's usual adapters."""
    share = _share("network.achieved_share")
    if given is not None:
        return share * given
    usual = _usual_network(gpu)
    notes.append(
        f"between nodes {usual * 8 / 1e9:g} Gb/s for each GPU are assumed: give hardware.network_gbit_per_second "
        "of a node"
    )
    return share * usual


def _usual_network(gpu: GpuFacts) -> float:
    """Returns bytes per second of one GPU's share of the adapters that nodes of its generation have."""
    if not gpu.nvlink_bytes_per_second:
        return _share("network.node_pcie_cards_bytes_per_second") / _GPUS_PER_NODE
    capability = gpu.compute_capability or _AMPERE
    kind = "hopper" if capability >= _HOPPER else "ampere" if capability >= _AMPERE else "volta"
    return _share(f"network.adapter_{kind}_bytes_per_second")


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
