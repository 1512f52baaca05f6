"""The card, the nodes and the network of a record."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from memc.errors import MemcError
from memc.facts import GpuFacts, load_fact, load_gpu

from timed.reading import UnreadableError, text, whole

# Ways of naming a card, most particular first. A name without a form is the board that training clusters use.
_CARDS = (
    (r"gh200", "gh200-96gb"),
    (r"gb200", "gb200-186gb"),
    (r"gb300", "gb300-279gb"),
    (r"h100.*pcie", "h100-pcie-80gb"),
    (r"h100.*nvl\b", "h100-nvl-94gb"),
    (r"h100", "h100-sxm5-80gb"),
    (r"h200", "h200-sxm-141gb"),
    (r"b200", "b200-180gb"),
    (r"b300", "b300-288gb"),
    (r"a100.*pcie.*80", "a100-pcie-80gb"),
    (r"a100.*pcie", "a100-pcie-40gb"),
    (r"a100.*40", "a100-sxm4-40gb"),
    (r"a100", "a100-sxm4-80gb"),
    (r"a6000 ada|6000 ada", "rtx-6000-ada"),
    (r"a6000", "rtx-a6000"),
    (r"a5000", "rtx-a5000"),
    (r"a4000", "rtx-a4000"),
    (r"a10g", "a10g"),
    (r"a10\b", "a10"),
    (r"a30\b", "a30"),
    (r"a40\b", "a40"),
    (r"l40s", "l40s"),
    (r"l40\b", "l40"),
    (r"\bl4\b", "l4"),
    (r"\bt4\b", "t4"),
    (r"v100s", "v100s-pcie-32gb"),
    (r"v100.*pcie", "v100-pcie-32gb"),
    (r"v100.*16", "v100-sxm2-16gb"),
    (r"v100", "v100-sxm2-32gb"),
    (r"mi300x", "mi300x"),
    (r"mi325x", "mi325x"),
    (r"mi250", "mi250x-gcd"),
    (r"gaudi ?2", "gaudi2"),
    (r"gaudi ?3", "gaudi3"),
)
_GBIT = 1e9 / 8


@dataclass(frozen=True, kw_only=True)
class MachineOf:
    """What a record says of its machine.

    Attributes:
        gpu: The card.
        gpus_per_node, nodes: How many.
        network_bytes_per_second: What one GPU's share of a node's adapters sends; None when the record does not say.
        power_limit_watts: Where the record states one.
        notes: What was assumed.
    """

    gpu: GpuFacts
    gpus_per_node: int
    nodes: int
    network_bytes_per_second: float | None
    power_limit_watts: float | None
    notes: tuple[str, ...]


def machine_of(record: dict[str, Any]) -> MachineOf:
    """Returns the machine of a record.

    Raises:
        UnreadableError: When the card is not named or not in the catalogue, or the number of GPUs is unknown.
    """
    gpu = _card(text(record.get("gpu")))
    count = whole(record.get("n_gpus"))
    if count is None:
        raise UnreadableError("number of GPUs not stated")
    notes = []
    nodes = whole(record.get("n_nodes"))
    words = f"{text(record.get('interconnect'))} {text(record.get('gpu'))}"
    if nodes is None or count % nodes:
        per_node = _gpus_per_node(words)
        nodes = math.ceil(count / per_node)
        if nodes > 1:
            notes.append(f"nodes of {per_node} GPUs assumed")
    return MachineOf(
        gpu=gpu,
        gpus_per_node=max(1, count // nodes),
        nodes=nodes,
        network_bytes_per_second=_network(words, max(1, count // nodes)),
        power_limit_watts=_power_limit(words),
        notes=tuple(notes),
    )


def _card(name: str) -> GpuFacts:
    if not name:
        raise UnreadableError("card not named")
    if "class" in name.casefold():
        raise UnreadableError(f"card only named by its class: {name}")
    for pattern, key in _CARDS:
        if re.search(pattern, name, re.IGNORECASE):
            return load_gpu(key)
    bare = re.sub(r"\(.*?\)|\b\d+ ?GB\b", " ", name).strip()
    for candidate in (name, bare):
        try:
            return load_gpu(candidate)
        except MemcError:
            continue
    raise UnreadableError(f"{name} is not in the catalogue")


def _gpus_per_node(words: str) -> int:
    """Returns the GPUs of a node: as stated, as in the cluster that is named, else eight."""
    stated = re.search(r"(\d+) ?GPUs?(?:/| per )node", words, re.IGNORECASE)
    if stated is not None:
        return max(1, int(stated.group(1)))
    return next((cluster.gpus for cluster in _CLUSTERS if re.search(cluster.name, words, re.IGNORECASE)), 8)


@dataclass(frozen=True)
class _Cluster:
    """A node of a cluster that measurements name.

    Sources: heise.de/-7154702 (MareNostrum 5: four H100 per node); leonardo-supercomputer.cineca.eu/hpc-system
    (Leonardo: four A100 per node, 400 Gb/s together).
    """

    name: str
    gpus: int
    node_gigabits: float | None


_CLUSTERS = (_Cluster("marenostrum 5", 4, None), _Cluster("leonardo", 4, 400.0))


def _power_limit(words: str) -> float | None:
    said = re.search(r"(\d+) ?W cap|limited to (\d+) ?W", words, re.IGNORECASE)
    return None if said is None else float(said.group(1) or said.group(2))


def _network(words: str, gpus_per_node: int) -> float | None:
    """Returns what one GPU's share of a node sends, from words such as ``400 Gb/s per GPU`` or ``8 x HDR``."""
    share = float(load_fact("network.achieved_share").value)
    effective = re.search(r"([\d.,]+) ?Gbp?/?s effective", words, re.IGNORECASE)
    if effective:
        return float(effective.group(1).replace(",", "")) * _GBIT / gpus_per_node
    per_gpu = re.search(r"([\d.,]+) ?Gb/?p?s per GPU", words, re.IGNORECASE)
    if per_gpu:
        return share * float(per_gpu.group(1).replace(",", "")) * _GBIT
    adapters = re.search(r"(\d+) ?x (HDR|NDR|EDR)", words, re.IGNORECASE)
    if adapters:
        rate = {"HDR": 200, "NDR": 400, "EDR": 100}[adapters.group(2).upper()]
        return share * int(adapters.group(1)) * rate * _GBIT / gpus_per_node
    per_node = re.search(r"([\d.,]+) ?Gb(?:it)?(?:/s|ps)\b", words, re.IGNORECASE)
    if per_node:
        return share * float(per_node.group(1).replace(",", "")) * _GBIT / gpus_per_node
    for cluster in _CLUSTERS:
        if cluster.node_gigabits is not None and re.search(cluster.name, words, re.IGNORECASE):
            return share * cluster.node_gigabits * _GBIT / gpus_per_node
    return None
