"""What reentrant checkpointing leaves behind when FSDP 1 shards layers whose base weights do not train."""

from __future__ import annotations

from memc.config import TrainingConfig
from memc.facts.records import ModelFacts
from memc.ledger.activations import Pile
from memc.ledger.dtypes import dtypes
from memc.ledger.entries import Account, Entry, Moment
from memc.ledger.layer import layer_mode
from memc.ledger.parts import gpu_entry

_SOURCE = (
    "torch distributed/fsdp/_runtime_utils.py _register_post_backward_reshard_only_hook (register_multi_grad_hook on "
    "the inputs), utils/checkpoint.py CheckpointFunction.backward"
)


def held_input_entries(model: ModelFacts, config: TrainingConfig) -> list[Entry]:
    """Returns inputs of checkpointed layers, and their gradients, that live until the backward ends.

    A frozen unit waits for the gradients of its inputs through a hook that keeps those inputs. Under reentrant
    checkpointing an input is a leaf of the inner backward, so it keeps its gradient as well. Hooks are dropped when the
    whole backward has ended: at its last layer all inputs and all gradients but its own are alive.
    """
    if config.fsdp is None or config.fsdp.version != 1 or config.lora is None or not config.reentrant_checkpointing:
        return []
    pile = Pile(model, config, layer_mode(config))
    others = sum(layer.checkpointed for layer in pile.layers[1:])
    size = dtypes(config).stream * model.hidden_size * config.micro_batch_tokens
    counted = _counted_below(pile)
    text = f"(input + its gradient) x {size} B x {others} layers"
    return [
        gpu_entry(
            "held-layer-inputs",
            Account.ACTIVATIONS,
            max(0, 2 * size * others - counted),
            frozenset({Moment.BACKWARD_LAST_LAYER}),
            text + (f" - {counted} B of them that another entry counts" if counted else ""),
            _SOURCE,
        ),
        gpu_entry(
            "held-layer-inputs-until-the-end",
            Account.ACTIVATIONS,
            2 * size * (others + 1),
            frozenset({Moment.BACKWARD_EMBEDDING}),
            f"(input + its gradient) x {size} B x {others + 1} layers",
            _SOURCE,
        ),
    ]


def _counted_below(pile: Pile) -> int:
    """Returns what the bill counts of the layers below the one whose backward it takes for the lowest moment.

    That layer is the one where most is alive without what is held; with it, the lowest is.
    """
    totals = pile.backward_totals()
    lower = max(range(pile.pattern()), key=lambda index: (totals[index], -index))
    return sum(below.waits + below.kept_casts for below in pile.layers[:lower]) - sum(
        between.gradients for between in pile.layers[1 : lower + 1]
    )
