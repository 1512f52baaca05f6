"""The estimator: prices configurations of one model on one card from closed forms, reusing parts between them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from memc.config import TrainingConfig
from memc.facts.records import ModelFacts
from memc.ledger.activations import activation_entries
from memc.ledger.constants import LedgerFacts
from memc.ledger.entries import Entry, Ledger, Resource, resource_ledger
from memc.ledger.host import host_entries
from memc.ledger.loss import loss_entries
from memc.ledger.parts import Part
from memc.ledger.states import ParamCounts, count_params, parameter_entries, state_entries
from memc.ledger.workspace import workspace_entries


@dataclass(frozen=True, slots=True)
class Price:
    """The totals of one configuration, without its entries.

    Attributes:
        gpu_required_bytes: What one card must have: reserved plus context.
        gpu_allocated_bytes: Allocated peak.
        host_required_bytes: What one node's memory must hold.
        parts: What it is made of; `ledger` turns them into entries.
    """

    gpu_required_bytes: int
    gpu_allocated_bytes: int
    host_required_bytes: int
    parts: tuple[Part, ...]

    def ledger(self) -> Ledger:
        """Returns the full bill."""
        entries = [entry for part in self.parts for entry in part.entries]
        return Ledger(
            gpu=resource_ledger(Resource.GPU, entries),
            host=resource_ledger(Resource.HOST, entries),
            nvme=resource_ledger(Resource.NVME, entries),
        )


class Estimator:
    """Prices configurations of one model on one card.

    Parts are cached by the settings they depend on: a ladder of thousands of configurations builds each once.
    """

    def __init__(self, model: ModelFacts, facts: LedgerFacts) -> None:
        self.model = model
        self.facts = facts
        self._parts: dict[Hashable, Part] = {}
        self._counts: dict[Hashable, ParamCounts] = {}

    def counts(self, config: TrainingConfig) -> ParamCounts:
        """Returns element counts of the model under the configuration's method."""
        key = (config.method, config.lora)
        if key not in self._counts:
            self._counts[key] = count_params(self.model, config, self.facts)
        return self._counts[key]

    def price(self, config: TrainingConfig) -> Price:
        """Returns the totals of one configuration."""
        model, facts, counts = self.model, self.facts, self.counts(config)
        kind = (config.method, config.lora, config.precision, config.engine)
        world = (config.gpus_per_node, config.nodes)
        shape = (config.micro_batch_size, config.max_length, config.loss, config.eval_batch_size)
        saved = (config.checkpoint_every, config.attention, config.padding_mask)
        accumulates = config.gradient_accumulation_steps > 1
        parts = (
            self._part(
                ("parameters", kind, world, config.zero, config.double_quantization),
                lambda: parameter_entries(config, counts, facts),
            ),
            self._part(
                (
                    "states",
                    kind,
                    world,
                    config.zero,
                    config.optimizer,
                    accumulates,
                    config.loss,
                    config.gradient_as_bucket_view,
                ),
                lambda: state_entries(config, counts, facts),
            ),
            self._part(("activations", kind, shape, saved), lambda: activation_entries(model, config)),
            self._part(("loss", kind, shape), lambda: loss_entries(model, config, facts)),
            self._part(
                ("workspace", config.method, world, config.expandable_segments or shape),
                lambda: workspace_entries(model, config, facts),
            ),
            self._part(
                ("host", kind, world, config.zero, config.optimizer), lambda: host_entries(model, config, counts, facts)
            ),
        )
        allocated = max(map(sum, zip(*(part.gpu for part in parts), strict=True)))
        host = max(map(sum, zip(*(part.host for part in parts), strict=True)))
        return Price(allocated + sum(part.gpu_outside for part in parts), allocated, host, parts)

    def ledger(self, config: TrainingConfig) -> Ledger:
        """Returns the full bill of one configuration."""
        return self.price(config).ledger()

    def _part(self, key: Hashable, build: Callable[[], list[Entry]]) -> Part:
        part = self._parts.get(key)
        if part is None:
            part = self._parts[key] = Part(build())
        return part
