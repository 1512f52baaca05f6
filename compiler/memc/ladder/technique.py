"""The shape of a technique: a value that says what it changes, when it may be used and what it becomes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from memc.config import FsdpConfig, LoraConfig, Method, TrainingConfig, ZeroConfig
from memc.facts.records import GpuFacts, ModelFacts
from memc.ledger.entries import Account


class Dimension(StrEnum):
    """What a technique decides. Techniques of one dimension exclude each other; the order is that of application."""

    METHOD = "method"
    STATES = "states"
    SHARDING = "sharding"
    OFFLOAD_OPTIMIZER = "offload_optimizer"
    OFFLOAD_PARAM = "offload_param"
    ENGINE_STATES = "engine_states"
    ADAPTERS = "adapters"
    REFERENCE = "reference"
    PRODUCTS = "products"
    CONTEXT = "context"
    LOSS = "loss"
    CHECKPOINTING = "checkpointing"
    CHECKPOINT_OFFLOAD = "checkpoint_offload"
    MICRO_BATCH = "micro_batch"


class Fidelity(StrEnum):
    """Whether a technique changes the numbers that training computes, or only where bytes lie."""

    MEMORY = "only memory"
    NUMERICS = "changes numerics"


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What techniques may look at beside a configuration.

    Attributes:
        model: Facts of the model.
        gpu: Facts of the card.
        host_bytes: Memory of one node; None when the spec does not say.
        methods: Methods that the user allows, preferred first.
        lora: Adapter settings to use when a technique switches adapters on.
        zero: ZeRO settings to use when a technique switches DeepSpeed on; the stage is replaced.
        fsdp: FSDP settings to use when a technique switches FSDP on.
        nvme_bytes: NVMe space of one node; 0 when the spec gives none.
    """

    model: ModelFacts
    gpu: GpuFacts
    host_bytes: int | None
    methods: tuple[Method, ...]
    lora: LoraConfig
    zero: ZeroConfig
    fsdp: FsdpConfig
    nvme_bytes: int


@dataclass(frozen=True, kw_only=True)
class Technique:
    """One rung's content.

    Attributes:
        name: Kebab-case; what `ladder.forbid` and `ladder.require` name.
        rung: Place on the ladder of one card, from free to dear.
        dimension: What it decides.
        accounts: Accounts it touches, the one it is meant to cut first. Beside these only workspace may change, and
            what a change of engine brings with it: DeepSpeed keeps masters and 16-bit weights, whatever the stage.
        fidelity: Whether it changes numerics.
        needs: What it needs, as a phrase.
        boundary: Where it stops paying, as a sentence.
        why_not: Returns why it cannot be applied to a configuration, or None when it can.
        apply: Returns the configuration with it.
    """

    name: str
    rung: int
    dimension: Dimension
    accounts: tuple[Account, ...]
    fidelity: Fidelity
    needs: str
    boundary: str
    why_not: Callable[[TrainingConfig, Situation], str | None]
    apply: Callable[[TrainingConfig, Situation], TrainingConfig]
