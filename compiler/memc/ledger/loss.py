"""The output head and the loss: logits, their fp32 copies, or the tiles of a chunked head."""

from __future__ import annotations

from memc.config import LossHead, TrainingConfig
from memc.facts.records import ModelFacts
from memc.ledger.constants import MEMC_STACK, LedgerFacts
from memc.ledger.dtypes import dtypes
from memc.ledger.entries import Account, Entry, Moment
from memc.ledger.logits import stack_loss_entries
from memc.ledger.parts import gpu_entry

_LOSS = frozenset({Moment.LOSS})
_EVALUATE = frozenset({Moment.EVALUATE})


def loss_entries(model: ModelFacts, config: TrainingConfig, facts: LedgerFacts) -> list[Entry]:
    """Returns what head and loss hold, in training and in evaluation."""
    if config.loss is LossHead.CHUNKED:
        return _chunked(model, config, facts)
    if facts.stack != MEMC_STACK:
        return stack_loss_entries(model, config, facts.stack)
    return _plain(model, config)


def _plain(model: ModelFacts, config: TrainingConfig) -> list[Entry]:
    """Returns the materialised logits.

    Source: transformers loss_utils.ForCausalLMLoss: logits upcast to fp32, log-softmax kept for backward; at the peak,
        in backward, log-softmax, its gradient and the gradient of the fp32 logits are alive.
    """
    types, tokens, vocab = dtypes(config), config.micro_batch_tokens, model.vocab_size
    per_logit = 12
    text = "4 B log-softmax + 4 B its gradient + 4 B gradient of the fp32 logits"
    if model.logit_softcap is not None:
        per_logit += types.compute
        text += f" + {types.compute} B tanh of the capped logits"
    entries = [
        gpu_entry(
            "logits",
            Account.ACTIVATIONS,
            per_logit * tokens * vocab,
            _LOSS,
            f"({text}) x {tokens} tokens x {vocab} vocabulary",
            "transformers loss_utils.py ForCausalLMLoss, torch log_softmax backward",
        )
    ]
    if config.lora is None:
        size = types.compute * model.hidden_size * tokens
        entries.append(
            gpu_entry(
                "head-input",
                Account.ACTIVATIONS,
                size,
                _LOSS,
                f"{types.compute} B x hidden {model.hidden_size} x {tokens} tokens, for the head's weight gradient",
                "torch linear backward",
            )
        )
    if config.eval_batch_size:
        size = (types.compute + 8) * config.eval_batch_size * config.max_length * vocab
        entries.append(
            gpu_entry(
                "evaluation-logits",
                Account.ACTIVATIONS,
                size,
                _EVALUATE,
                f"({types.compute} + 4 + 4) B x {config.eval_batch_size} x {config.max_length} tokens x {vocab}",
                "transformers loss_utils.py ForCausalLMLoss",
            )
        )
    return entries


def _chunked(model: ModelFacts, config: TrainingConfig, facts: LedgerFacts) -> list[Entry]:
    """Returns the tiles and fp32 accumulators of a chunked head.

    Source: trl kernels/chunked_logprob.py: one tile buffer, the hidden states of scored tokens, fp32 accumulators for
        the gradients of hidden states and (when the head trains) of the head.
    """
    types, tokens, hidden = dtypes(config), config.micro_batch_tokens, model.hidden_size
    trains = config.lora is None
    head = model.head_params or model.vocab_size * hidden
    rows, columns = min(tokens, facts.loss_tile_tokens), facts.loss_tile_vocab
    tile = types.compute * rows * columns
    chunks = 2 if model.vocab_size > columns else 1
    casts = types.weight != types.compute
    cast = types.compute * hidden * (chunks * min(columns, model.vocab_size) + rows) if casts else 0
    source = "trl kernels/chunked_logprob.py"
    entries = [
        gpu_entry(
            "loss-tile",
            Account.WORKSPACE,
            tile + cast,
            _LOSS | (_EVALUATE if config.eval_batch_size else frozenset()),
            f"{types.compute} B x {rows} tokens x {columns} vocabulary"
            + (f" + {cast} B of weight and input chunks in the compute type" if cast else ""),
            source,
        ),
        gpu_entry(
            "loss-hidden-states",
            Account.ACTIVATIONS,
            types.stream * hidden * tokens,
            _LOSS,
            f"{types.stream} B x hidden {hidden} x {tokens} tokens, a copy of the scored rows",
            source,
        ),
        gpu_entry(
            "loss-hidden-gradient",
            Account.WORKSPACE,
            (4 + types.stream % 4) * hidden * tokens,
            _LOSS,
            f"4 B fp32 accumulator{' + 2 B result' if types.stream == 2 else ''} x hidden {hidden} x {tokens} tokens",
            source,
        ),
    ]
    if trains:
        size = 4 + (types.weight if types.weight == 2 else 0)
        entries.append(
            gpu_entry(
                "loss-head-gradient",
                Account.WORKSPACE,
                size * head,
                _LOSS,
                f"{size} B x {head} elements: fp32 accumulator{' and its 16-bit result' if size == 6 else ''}",
                source,
            )
        )
    return entries
