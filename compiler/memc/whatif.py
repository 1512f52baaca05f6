"""What if: the plan's own configuration with another micro-batch, length, rank or number of cards, priced again.

The HTML report carries the source of this module and of the ledger, and runs both: what a slider shows is computed by
the code that made the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from memc.clock.constants import ClockFacts
from memc.clock.estimate import Clock
from memc.config import Engine, Offload, TrainingConfig
from memc.document import clock_document, ledger_document, settings_document
from memc.facts.records import ModelFacts
from memc.ladder.techniques import with_micro_batch
from memc.ledger.constants import LedgerFacts
from memc.ledger.estimate import Estimator
from memc.transfer import unpack

_CARDS = (1, 2, 4, 8, 16, 32, 64)
_RANKS = (4, 8, 16, 32, 64, 128, 256)
_LENGTH_STEP = 128
_LONGEST = 32768


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """What the sliders set.

    Attributes:
        cards: GPUs in the node.
        micro_batch_size: Samples of one forward pass on one GPU.
        max_length: Tokens of the longest sequence.
        lora_rank: Inner dimension of the adapters; 0 when every parameter trains.
    """

    cards: int
    micro_batch_size: int
    max_length: int
    lora_rank: int


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """A decided configuration and what pricing it takes.

    Attributes:
        model: Facts of the model.
        facts: Facts of libraries and driver.
        rates: Rates of the clock by whether more than one GPU runs.
        config: The configuration of the plan.
        masks: Whether a micro-batch of more than one sample needs a padding mask.
        evaluation: Samples per GPU in evaluation at most; 0 without evaluation, None where it follows the micro-batch.
    """

    model: ModelFacts
    facts: LedgerFacts
    rates: tuple[ClockFacts, ClockFacts]
    config: TrainingConfig
    masks: bool
    evaluation: int | None

    def knobs(self) -> Knobs:
        """Returns where the sliders stand in the plan itself."""
        config = self.config
        return Knobs(
            cards=config.world_size,
            micro_batch_size=config.micro_batch_size,
            max_length=config.max_length,
            lora_rank=config.lora.rank if config.lora is not None else 0,
        )

    def choices(self, cards: int) -> dict[str, list[int]]:
        """Returns the values that each slider offers when `cards` run, ascending.

        The samples of one optimizer step stay the same, so cards and micro-batch divide them. Only counts of cards
        that keep the plan's structure are offered: sharding over one card alone is none.
        """
        config = self.config
        longest = self.model.max_position_embeddings or _LONGEST
        top = min(longest, max(_LONGEST, 4 * config.max_length))
        per_rank = self._samples_of_a_rank(cards)
        return {
            "cards": self._card_counts(),
            "micro_batch_size": [size for size in range(1, per_rank + 1) if per_rank % size == 0],
            "max_length": sorted({*range(_LENGTH_STEP, top + 1, _LENGTH_STEP), config.max_length}),
            "lora_rank": [] if config.lora is None else sorted({*_RANKS, config.lora.rank}),
        }

    def _card_counts(self) -> list[int]:
        config = self.config
        if config.nodes > 1:
            return [config.world_size]
        counts = sorted({*_CARDS, config.world_size})
        zero, group = config.zero, config.context_parallel
        shards = config.fsdp is not None or (zero is not None and zero.stage > 0)
        offloads = zero is not None and zero.offload_optimizer is not Offload.NONE
        if shards and offloads:  # over one card this offloads and divides nothing; the structure differs either way
            alone = config.world_size == 1
            counts = [count for count in counts if (count == 1) is alone]
        elif shards:
            counts = [count for count in counts if count > 1]
        counts = [count for count in counts if count % group == 0]
        return [count for count in counts if config.global_batch_size % (count // group) == 0]

    def _samples_of_a_rank(self, cards: int) -> int:
        """Returns the samples of one optimizer step on one GPU, or on the GPUs that share each sequence."""
        return self.config.global_batch_size // (cards // self.config.context_parallel)

    def varied(self, knobs: Knobs) -> TrainingConfig:
        """Returns the plan's configuration with other knobs; the samples of one optimizer step stay the same.

        A micro-batch that does not divide the samples of a rank gives way to the next smaller one that does.
        """
        config = self.config
        per_rank = self._samples_of_a_rank(knobs.cards)
        sizes = [size for size in range(1, per_rank + 1) if per_rank % size == 0 and size <= knobs.micro_batch_size]
        engine = config.engine
        if engine in (Engine.SINGLE, Engine.DDP) and knobs.cards != config.world_size:
            engine = Engine.SINGLE if knobs.cards == 1 else Engine.DDP
        lora = config.lora
        if lora is not None and lora.rank != knobs.lora_rank:
            lora = replace(lora, rank=knobs.lora_rank)
        whole = replace(
            config,
            engine=engine,
            gpus_per_node=knobs.cards // config.nodes,
            micro_batch_size=per_rank,
            gradient_accumulation_steps=1,
            max_length=knobs.max_length,
            lora=lora,
            padding_mask=self.masks,
            eval_batch_size=per_rank if self.evaluation is None else self.evaluation,
        )
        return with_micro_batch(whole, max(sizes))

    def price(self, knobs: Knobs) -> dict[str, Any]:
        """Returns settings, ledger and clock of the varied configuration, as `memc explain --json` writes them."""
        config = self.varied(knobs)
        estimator = Estimator(self.model, self.facts)
        clock = Clock(self.model, self.rates[config.world_size > 1])
        return {
            "settings": settings_document(config),
            "ledger": ledger_document(estimator.ledger(config)),
            "clock": clock_document(clock.step_time(config, estimator.counts(config))),
        }


def what_if(document: Any) -> WhatIf:
    """Returns the question that a page carries, from its JSON."""
    return WhatIf(**{key: unpack(value) for key, value in document.items()})


def answered(question: WhatIf, knobs: dict[str, int]) -> dict[str, Any]:
    """Returns `WhatIf.price` together with the values that the sliders offer then: all that a page asks for."""
    return {**question.price(Knobs(**knobs)), "choices": question.choices(knobs["cards"])}
