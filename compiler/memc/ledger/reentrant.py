"""What reentrant checkpointing leaves behind when FSDP 1 shards layers whose base weights do not train."""

from __future__ import annotations

from memc.config import TrainingConfig
from memc.facts.records import ModelFacts
from memc.ledger.activations import layer_groups
from memc.ledger.dtypes import dtypes
from memc.ledger.entries import Account, Entry, Moment
from memc.ledger.parts import gpu_entry

_FREE_AFTER = frozenset({Moment.BACKWARD_LAST_LAYER, Moment.BACKWARD_EMBEDDING})
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
    layers = sum(group.checkpointed for group in layer_groups(model, config.checkpoint_every))
    others, size = max(0, layers - 1), dtypes(config).stream
    tokens = config.micro_batch_tokens
    return [
        gpu_entry(
            "held-layer-inputs",
            Account.ACTIVATIONS,
            2 * size * model.hidden_size * tokens * others,
            _FREE_AFTER,
            f"(input + its gradient) x {size} B x hidden {model.hidden_size} x {tokens} tokens x {others} layers",
            _SOURCE,
        )
    ]
