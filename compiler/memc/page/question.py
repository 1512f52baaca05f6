"""What the sliders of a page start from: the decided configuration and the facts it was priced with."""

from __future__ import annotations

from typing import Any

from memc.clock.rates import rates_of
from memc.config import TrainingConfig
from memc.ledger.constants import ledger_facts
from memc.plan import Infeasible, Plan
from memc.spec import Spec
from memc.transfer import pack


def decided(answer: Plan | Infeasible) -> TrainingConfig:
    """Returns the configuration that a page is about: the plan's, or the nearest one of a refusal."""
    return answer.config if isinstance(answer, Plan) else answer.closest_config


def question(answer: Plan | Infeasible, spec: Spec) -> dict[str, Any]:
    """Returns what `memc.whatif.what_if` takes, JSON-ready."""
    config, pin = decided(answer), spec.pin
    evaluation = pin.eval_batch_size if spec.data.eval is not None else 0
    parts = {
        "model": answer.model,
        "facts": ledger_facts(answer.gpu),
        "rates": tuple(
            rates_of(
                answer.gpu,
                config.precision,
                cards,
                nodes=config.nodes,
                network_bytes_per_second=spec.hardware.network_bytes_per_second,
            )
            for cards in (1, 2)
        ),
        "config": config,
        "masks": pin.padding_mask if pin.padding_mask is not None else not config.packing,
        "evaluation": evaluation,
    }
    return {name: pack(value) for name, value in parts.items()}


def knobs(answer: Plan | Infeasible) -> dict[str, int]:
    """Returns where the sliders stand in the plan; `lora_rank` is 0 when every parameter trains."""
    config = decided(answer)
    return {
        "cards": config.world_size,
        "micro_batch_size": config.micro_batch_size,
        "max_length": config.max_length,
        "lora_rank": config.lora.rank if config.lora is not None else 0,
    }
