"""What a step waits for: collectives, transfers and the host's optimizer, after what the GPU's work hides."""

from __future__ import annotations

from dataclasses import dataclass

from memc.clock.collectives import Ring, occupied_share, pass_seconds, waited_for
from memc.clock.constants import ClockFacts
from memc.clock.microbatch import MicroBatch
from memc.clock.workload import Layout, Sharding
from memc.config import Offload
from memc.units import ceil_div

_BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's bucket_cap_mb


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """Elements that a step moves.

    Attributes:
        total: Base model.
        quantized: Of these, 4-bit.
        adapters: LoRA pairs.
        trainable: Elements with a gradient.
    """

    total: int
    quantized: int
    adapters: int
    trainable: int

    def gathered_bytes(self, layout: Layout) -> float:
        """Returns bytes of all weights as collectives and transfers move them."""
        whole = 2.0 if self.quantized else layout.weight_bytes
        packed = layout.weight_bytes if self.quantized else 0.0
        return (self.total - self.quantized) * whole + self.quantized * packed + self.adapters * 2.0


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds of one optimizer step that the GPU spends waiting.

    Attributes:
        communication: For collectives, and for the slowest node.
        transfers: For PCIe and NVMe.
        host: For the optimizer on the host.
        optimizer: Optimizer step on the GPU: work, not a wait.
    """

    communication: float
    transfers: float
    host: float
    optimizer: float


def waits(work: MicroBatch, layout: Layout, elements: Elements, facts: ClockFacts) -> Waits:
    """Returns what one optimizer step waits for.

    Collectives and copies of one layer run beside the computation of others, so a phase takes the longer of the two,
    and its first gather and last reduction are always waited for.

    Source: FSDP (arXiv 2304.11277, prefetching and reduction beside backward), DeepSpeed's overlap_comm and
        prefetch, DistributedDataParallel's buckets; rates of `ClockFacts`.
    """
    transfers, host = _offload(work, layout, elements, facts)
    slowest = facts.straggling * (layout.nodes - 1).bit_length() * layout.micro_batches * work.seconds
    return Waits(
        communication=_communication(work, layout, elements, facts) + slowest,
        transfers=transfers,
        host=host,
        optimizer=_optimizer(layout, elements, facts),
    )


def rings(layout: Layout) -> tuple[Ring, Ring]:
    """Returns the ring that shares one copy, and the one that links its replicas."""
    ranks, per_node = layout.shard_ranks, layout.gpus_per_node
    inside = Ring(ranks, ceil_div(ranks, per_node), per_node)
    copies = max(1, layout.data_ranks // ranks)
    if ranks >= per_node:  # each GPU of a node is linked with its like in the other copies
        return inside, Ring(copies, copies if layout.nodes > 1 else 1)
    return inside, Ring(copies, layout.nodes, max(1, per_node // ranks) if layout.nodes > 1 else 1)


def _communication(work: MicroBatch, layout: Layout, elements: Elements, facts: ClockFacts) -> float:
    """Returns seconds that collectives add to a step."""
    if layout.data_ranks <= 1:
        return 0.0
    passing = _passed(work, layout, facts)
    if layout.sharding is Sharding.NONE:
        return passing + _all_reduced(work, layout, elements, facts)
    shard, replicas = rings(layout)
    layers, passes = max(1, work.layers), layout.micro_batches
    occupied = occupied_share(shard, facts)
    gradients = elements.trainable * layout.gradient_bytes
    reduced = pass_seconds(gradients, layers, shard, facts)
    if layout.sharding is Sharding.STATES:
        reduced *= 2  # every rank receives every gradient
    if replicas.ranks > 1:
        reduced += 2 * pass_seconds(gradients / shard.ranks, layers, replicas, facts)
    gathered = 0.0
    if layout.gathers_in_forward:
        gathered = pass_seconds(elements.gathered_bytes(layout), layers, shard, facts)
    again = _gathered_again(gathered, layout, elements, work, facts)
    forward, backward = work.forward_seconds, work.backward_seconds
    there = waited_for(layout.gathered_forwards * gathered, gathered / layers, forward, occupied)
    last = waited_for(again + reduced, (again + reduced) / layers, backward, occupied)
    earlier = last if layout.reduce_every_pass else waited_for(again, again / layers, backward, occupied)
    waited = passing + passes * there + (passes - 1) * earlier + last
    if not layout.gathers_in_forward:
        updated = elements.trainable * 2.0
        waited += pass_seconds(updated, max(1.0, updated / _GATHER_BYTES), shard, facts)
    return waited


def _gathered_again(gathered: float, layout: Layout, elements: Elements, work: MicroBatch, facts: ClockFacts) -> float:
    """Returns seconds of gathering weights for backward: as in forward, or from a copy that fewer ranks share."""
    if layout.sharding is not Sharding.WEIGHTS:
        return 0.0
    ranks = layout.regather_ranks
    if not ranks:
        return gathered
    near = Ring(ranks, ceil_div(ranks, layout.gpus_per_node), layout.gpus_per_node)
    return pass_seconds(elements.gathered_bytes(layout), max(1, work.layers), near, facts)


def _passed(work: MicroBatch, layout: Layout, facts: ClockFacts) -> float:
    """Returns seconds that passing keys and values round a sequence's ranks adds; backward passes twice as much."""
    if not work.passed_bytes:
        return 0.0
    ranks = layout.context_parallel
    ring = Ring(ranks, ceil_div(ranks, layout.gpus_per_node), layout.gpus_per_node)
    there = pass_seconds(work.passed_bytes, work.layers, ring, facts)
    hidden = waited_for(there, 0.0, work.forward_seconds, occupied_share(ring, facts))
    back = waited_for(2 * there, 0.0, work.backward_seconds, occupied_share(ring, facts))
    return layout.micro_batches * (hidden + back)


def _all_reduced(work: MicroBatch, layout: Layout, elements: Elements, facts: ClockFacts) -> float:
    """Returns seconds that DistributedDataParallel's buckets add to the last backward of a step."""
    gradients = float(elements.trainable * layout.gradient_bytes)
    buckets = max(1.0, gradients / _BUCKET_BYTES)
    ring = Ring(layout.data_ranks, layout.nodes, layout.gpus_per_node)
    reduced = 2 * pass_seconds(gradients, buckets, ring, facts)
    return waited_for(reduced, reduced / buckets, work.backward_seconds, occupied_share(ring, facts))


_GATHER_BYTES = 1e9  # DeepSpeed's allgather_bucket_size: 5e8 elements of 2 bytes


def _optimizer(layout: Layout, elements: Elements, facts: ClockFacts) -> float:
    """Returns seconds of the optimizer step on the GPU."""
    if layout.offload_optimizer is not Offload.NONE:
        return 0.0
    ranks = layout.shard_ranks if layout.sharding is not Sharding.NONE else 1
    return layout.adam_bytes * elements.trainable / ranks / facts.memory_bytes_per_second


def _offload(work: MicroBatch, layout: Layout, elements: Elements, facts: ClockFacts) -> tuple[float, float]:
    """Returns seconds of transfers that a step waits for, and of the optimizer on the host."""
    passes, pcie = layout.micro_batches, facts.pcie_bytes_per_second
    ranks = layout.shard_ranks if layout.sharding is not Sharding.NONE else 1
    waited = host = 0.0
    layers = max(1, work.layers)
    if layout.paged_bytes:
        waited += 2 * layout.paged_bytes * elements.trainable / ranks / pcie
    if layout.offload_activations:
        once = work.input_bytes / pcie
        waited += passes * waited_for(once, once / layers, work.forward_seconds, 0.0)
        waited += passes * waited_for(once, once / layers, work.backward_seconds, 0.0)
    if layout.offload_optimizer is not Offload.NONE:
        own = elements.trainable / ranks
        down = layout.gradient_bytes * own / pcie
        waited += passes * waited_for(down, down / layers, work.backward_seconds, 0.0)
        rate = facts.torch_host_params_per_second if layout.torch_host_adam else facts.host_params_per_second
        host = elements.trainable / layout.nodes / rate
        up = 2 * own / pcie
        waited += max(0.0, up - host)
        if layout.offload_optimizer is Offload.NVME:
            states = 12 * elements.trainable / layout.nodes
            drives = states / facts.nvme_read_bytes_per_second + states / facts.nvme_write_bytes_per_second
            waited += max(0.0, drives - host)
    if layout.offload_weights is not Offload.NONE:
        share = elements.gathered_bytes(layout) / layout.shard_ranks
        once = share / pcie
        if layout.offload_weights is Offload.NVME:
            once = max(once, share * layout.gpus_per_node / facts.nvme_read_bytes_per_second)
        there = layout.gathered_forwards * once
        waited += passes * waited_for(there, once / layers, work.forward_seconds, 0.0)
        waited += passes * waited_for(once, once / layers, work.backward_seconds, 0.0)
    return waited, host
