"""Seconds of collectives: a ring's latency and bandwidth, within a node and across nodes."""

from __future__ import annotations

from dataclasses import dataclass

from memc.clock.constants import ClockFacts


@dataclass(frozen=True, slots=True)
class Ring:
    """Ranks that take part in a collective.

    Attributes:
        ranks: How many.
        nodes: Nodes that they sit in.
        per_node: GPUs of a node whose adapters carry it: all of the node's in a ring through it, one in a ring that
            links one GPU of each node.
    """

    ranks: int
    nodes: int
    per_node: int = 1


def pass_seconds(moved_bytes: float, calls: float, ring: Ring, facts: ClockFacts) -> float:
    """Returns seconds of an all-gather or a reduce-scatter; an all-reduce is one of each.

    Each of the n ranks sends (n - 1)/n of the bytes to its neighbour, in n - 1 hops, at the rate of the slowest link:
    within a node the bus, between nodes the adapters of one node, which every ring through it shares.

    Args:
        moved_bytes: Size of the whole tensor, all calls together.
        calls: Collectives that it is moved in.
        ring: Who takes part.
        facts: Rates.

    Source: NVIDIA nccl-tests doc/PERFORMANCE.md (bus bandwidth); NCCL src/graph/tuning.cc (latency per hop).
    """
    ranks, nodes = ring.ranks, ring.nodes
    if ranks <= 1 or not calls:
        return 0.0
    rate = facts.bus_bytes_per_second
    if nodes > 1:
        rate = min(rate, facts.network_bytes_per_second * ring.per_node)
    between = nodes if nodes > 1 else 0
    hops = max(0, ranks - 1 - between) * facts.bus_hop_seconds + between * facts.network_hop_seconds
    return moved_bytes * (ranks - 1) / ranks / rate + calls * (facts.collective_seconds + hops)


def waited_for(communication: float, first: float, work: float, occupied: float) -> float:
    """Returns what collectives add to a phase when layers' collectives run while others compute.

    Args:
        communication: All of the phase's collectives, one after the other.
        first: The part that nothing can hide: what must arrive before the phase starts, or leave after it ends.
        work: Computation that the rest runs beside.
        occupied: Share of the card's multiprocessors that a running collective takes from that computation.

    Source: NCCL runs one block of threads per channel, on a multiprocessor of its own, until the collective ends.
    """
    if communication <= 0:
        return 0.0
    alone = min(communication, first)
    beside = communication - alone
    return alone + max(beside - work, occupied * beside)


def occupied_share(ring: Ring, facts: ClockFacts) -> float:
    """Returns the share of a card's multiprocessors that a collective of a ring occupies; 0 when they are unknown."""
    if not facts.multiprocessors:
        return 0.0
    channels = facts.channels_in_node if ring.nodes == 1 else facts.channels_between_nodes
    return channels / facts.multiprocessors
