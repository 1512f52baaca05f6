"""The estimator: prices configurations of one model on one card from closed forms, reusing parts between them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from memc.config import Engine, TrainingConfig
from memc.facts.records import ModelFacts
from memc.ledger.activations import activation_bill, waiting_bytes
from memc.ledger.adapted import adapted_model
from memc.ledger.bill import Bill
from memc.ledger.constants import LedgerFacts
from memc.ledger.context import context_entries
from memc.ledger.dtypes import dtypes
from memc.ledger.entries import Entry, Ledger, Resource, resource_ledger
from memc.ledger.fsdp import fsdp_head_entries, fsdp_parameter_entries, fsdp_state_entries
from memc.ledger.fsdp_host import fsdp_host_entries
from memc.ledger.host import host_entries
from memc.ledger.image_shapes import idle_params
from memc.ledger.loss import book_layer_blocks, book_layer_pieces, loss_entries
from memc.ledger.nvme import checkpoint_host_entries, nvme_entries
from memc.ledger.parts import Part, held_bytes
from memc.ledger.reentrant import held_input_entries
from memc.ledger.reference import reference_entries, reference_load_entries
from memc.ledger.states import ParamCounts, count_params, parameter_entries, state_entries
from memc.ledger.tokens import token_entries
from memc.ledger.workspace import workspace_entries
from memc.ledger.zero import zero_entries


@dataclass(frozen=True, slots=True)
class Price:
    """The totals of one configuration, without its entries.

    Attributes:
        gpu_required_bytes: What one card must have: reserved plus context.
        gpu_reserved_bytes: What torch's allocator holds at its peak.
        host_required_bytes: What one node's memory must hold.
        nvme_required_bytes: What one node's drive must hold.
        parts: What it is made of; `ledger` turns them into entries.
    """

    gpu_required_bytes: int
    gpu_reserved_bytes: int
    host_required_bytes: int
    nvme_required_bytes: int
    parts: tuple[Part, ...]

    def ledger(self) -> Ledger:
        """Returns the full bill."""
        entries = [entry for part in self.parts for entry in part.entries]
        return Ledger(
            gpu=resource_ledger(Resource.GPU, entries),
            host=resource_ledger(Resource.HOST, entries),
            nvme=resource_ledger(Resource.NVME, entries),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartKind:
    """One part of every bill, and which settings it depends on.

    Settings are of two sorts. The shape of a pass is what the same weights and states can be combined with: micro-batch
    and accumulation, checkpointing, the loss head, evaluation. All others are the frame. Configurations that agree in
    both keys share the part.

    Attributes:
        name: What it holds.
        frame: Returns the settings outside the shape that it depends on.
        shape: Returns the settings of the shape that it depends on; None when it depends on none.
        tokens: Whether it holds something for every token of a pass: the parts that take longest to build.
        least: Returns a lower bound of its bytes on the card at the loss, much sooner than it is built; None without.
        build: Returns its entries, or the bill that they are made from when they are asked for.
    """

    name: str
    frame: Callable[[TrainingConfig], Hashable]
    shape: Callable[[TrainingConfig], Hashable] | None
    tokens: bool = False
    least: Callable[[ModelFacts, TrainingConfig], int] | None = None
    build: Callable[[ModelFacts, TrainingConfig, ParamCounts, LedgerFacts], list[Entry] | Bill]


def _kind(config: TrainingConfig) -> Hashable:
    """Returns what decides data types and which weights train."""
    base = (config.base_precision, config.quantization, config.upcast_unquantized)
    task = config.task, config.reference, config.images_per_sample, config.image_pixels
    return config.method, config.lora, config.precision, config.engine, base, task


def _spread(config: TrainingConfig) -> Hashable:
    """Returns what decides how weights and states are spread over ranks, host and drives."""
    return config.gpus_per_node, config.nodes, config.zero, config.fsdp, config.context_parallel


def _pass(config: TrainingConfig) -> Hashable:
    """Returns what decides how many tokens a pass holds, and what the loss does with them."""
    return config.micro_batch_size, config.loss, config.eval_batch_size


def _seen(config: TrainingConfig) -> Hashable:
    """Returns what decides whether a step runs the stack of images: of one that does not run, nothing trains."""
    return config.local_length, config.images_per_sample, config.image_pixels


def _parameters(model: ModelFacts, config: TrainingConfig, counts: ParamCounts, facts: LedgerFacts) -> list[Entry]:
    tokens = token_entries(model, config)
    if config.fsdp is not None:
        return [*fsdp_parameter_entries(model, config, counts, facts), *tokens]
    return [*parameter_entries(config, counts, facts), *reference_entries(config, counts), *tokens]


def _states(model: ModelFacts, config: TrainingConfig, counts: ParamCounts, facts: LedgerFacts) -> list[Entry]:
    if config.fsdp is not None:
        return fsdp_state_entries(model, config, counts)
    entries = state_entries(config, counts, facts)
    if config.engine is Engine.DEEPSPEED:
        entries += zero_entries(model, config, counts, dtypes(config), facts)
    return entries


def _activations(model: ModelFacts, config: TrainingConfig, _counts: ParamCounts, facts: LedgerFacts) -> Bill:
    bill = activation_bill(model, config, facts)
    book_layer_blocks(bill, model, config, facts)
    book_layer_pieces(bill, model, config, facts)
    return bill


def _host(model: ModelFacts, config: TrainingConfig, counts: ParamCounts, facts: LedgerFacts) -> list[Entry]:
    if config.fsdp is not None:
        return fsdp_host_entries(model, config, counts, facts)
    host = [*host_entries(model, config, counts, facts), *reference_load_entries(config, counts)]
    return [*host, *nvme_entries(config, counts)]


PARTS: tuple[PartKind, ...] = (
    PartKind(
        name="parameters",
        frame=lambda c: (_kind(c), _spread(c), c.double_quantization),
        shape=None,
        build=_parameters,
    ),
    PartKind(
        name="states",
        frame=lambda c: (_kind(c), _spread(c), c.optimizer, c.gradient_as_bucket_view, _seen(c)),
        shape=lambda c: (c.gradient_accumulation_steps > 1, c.loss),
        build=_states,
    ),
    PartKind(
        name="activations",
        frame=lambda c: (_kind(c), c.attention, c.max_length, c.context_parallel, c.double_quantization),
        shape=lambda c: (
            _pass(c),
            c.checkpoint_every,
            c.checkpoint_offload,
            c.padding_mask,
            c.gradient_accumulation_steps > 1,
        ),
        tokens=True,
        least=waiting_bytes,
        build=_activations,
    ),
    PartKind(
        name="loss",
        frame=lambda c: (_kind(c), c.max_length, c.context_parallel),
        shape=_pass,
        tokens=True,
        build=lambda model, config, _counts, facts: loss_entries(model, config, facts),
    ),
    PartKind(
        name="the head as FSDP gathers it",
        frame=lambda c: (_kind(c), _spread(c), c.max_length) if c.fsdp is not None else (),
        shape=lambda c: _pass(c) if c.fsdp is not None else (),
        tokens=True,
        build=lambda model, config, _counts, facts: fsdp_head_entries(model, config, facts),
    ),
    PartKind(
        name="workspace",
        frame=lambda c: (c.method, _spread(c), c.expandable_segments, c.max_length),
        shape=lambda c: () if c.expandable_segments else _pass(c),
        build=lambda model, config, _counts, facts: workspace_entries(model, config, facts),
    ),
    PartKind(
        name="host",
        frame=lambda c: (_kind(c), _spread(c), c.optimizer, _seen(c)),
        shape=None,
        build=_host,
    ),
    PartKind(
        name="checkpoints on the host, inputs held beyond their use, shared sequences",
        frame=lambda c: (
            _kind(c),
            c.gpus_per_node,
            c.max_length,
            c.context_parallel,
            c.reentrant_checkpointing and c.fsdp,
        ),
        shape=lambda c: (c.checkpoint_offload, c.micro_batch_size, c.checkpoint_every),
        tokens=True,
        build=lambda model, config, _counts, _facts: [
            *checkpoint_host_entries(model, config, dtypes(config).stream),
            *held_input_entries(model, config),
            *context_entries(model, config),
        ],
    ),
)


class Estimator:
    """Prices configurations of one model on one card.

    Parts are kept by the settings they depend on: a ladder of thousands of configurations builds each once.
    """

    def __init__(self, model: ModelFacts, facts: LedgerFacts) -> None:
        self.model = model
        self.facts = facts
        self._tables: dict[Hashable, dict[Hashable, Part]] = {}
        self._least: dict[Hashable, dict[Hashable, int]] = {}
        self._counts: dict[Hashable, ParamCounts] = {}

    def counts(self, config: TrainingConfig) -> ParamCounts:
        """Returns element counts of the model under the configuration's method."""
        key = (config.method, config.lora, config.quantization, idle_params(self.model, config))
        if key not in self._counts:
            self._counts[key] = count_params(adapted_model(self.model, config), config, self.facts)
        return self._counts[key]

    def table(self, kind: PartKind, frame_key: Hashable) -> dict[Hashable, Part]:
        """Returns the parts of one kind that are known for a frame, by the settings of the shape; more may be added.

        Args:
            kind: Which.
            frame_key: What `kind.frame` returns of a configuration.
        """
        key = kind.name, frame_key
        if key not in self._tables:
            self._tables[key] = {}
        return self._tables[key]

    def least_table(self, kind: PartKind, frame_key: Hashable) -> dict[Hashable, int]:
        """Returns the lower bounds of one kind that are known for a frame; arguments are those of `table`."""
        key = kind.name, frame_key
        if key not in self._least:
            self._least[key] = {}
        return self._least[key]

    def build(self, kind: PartKind, config: TrainingConfig) -> Part:
        """Returns one part of a configuration's bill, made anew."""
        built = kind.build(adapted_model(self.model, config), config, self.counts(config), self.facts)
        return Part.of_sums(built.sums(), built.entries) if isinstance(built, Bill) else Part(built)

    def part(self, kind: PartKind, config: TrainingConfig) -> Part:
        """Returns one part of a configuration's bill."""
        table = self.table(kind, kind.frame(config))
        key = kind.shape(config) if kind.shape is not None else ()
        part = table.get(key)
        if part is None:
            part = table[key] = self.build(kind, config)
        return part

    def price(self, config: TrainingConfig) -> Price:
        """Returns the totals of one configuration."""
        return total(tuple(self.part(kind, config) for kind in PARTS))

    def ledger(self, config: TrainingConfig) -> Ledger:
        """Returns the full bill of one configuration."""
        return self.price(config).ledger()


def total(parts: tuple[Part, ...]) -> Price:
    """Returns the totals of a bill that is made of `parts`."""
    reserved = held_bytes(parts)
    return Price(
        gpu_required_bytes=reserved + sum(part.gpu_outside for part in parts),
        gpu_reserved_bytes=reserved,
        host_required_bytes=max(map(sum, zip(*(part.host for part in parts), strict=True))),
        nvme_required_bytes=max(map(sum, zip(*(part.nvme for part in parts), strict=True))),
        parts=parts,
    )
