"""The plain head and its loss on other stacks than memc's own: older transformers, fused and chunked losses."""

from __future__ import annotations

from memc.config import Method, TrainingConfig
from memc.facts.records import ModelFacts
from memc.ledger.constants import CrossEntropy, Stack
from memc.ledger.dtypes import Dtypes, dtypes
from memc.ledger.entries import Account, Entry, Moment
from memc.ledger.parts import gpu_entry
from memc.units import ceil_div, next_power_of_two

_LOSS = frozenset({Moment.LOSS})
_LITGPT_CHUNK_TOKENS = 128


def stack_loss_entries(model: ModelFacts, config: TrainingConfig, stack: Stack) -> list[Entry]:
    """Returns what head and loss hold on one GPU under a stack."""
    if stack.cross_entropy is CrossEntropy.LINEAR:
        return _linear(model, config)
    if stack.cross_entropy is CrossEntropy.CHUNKS:
        return _chunks(model, config)
    if stack.cross_entropy is CrossEntropy.CLASSES:
        return []
    return _whole(model, config, stack)


def _whole(model: ModelFacts, config: TrainingConfig, stack: Stack) -> list[Entry]:
    """Returns logits that exist for all tokens at once, in the forward or the backward of the loss, whichever is more.

    What layers hand out for a cache lives until the model returns: beside the forward of the loss alone.

    Source: transformers loss_utils.ForCausalLMLoss and its predecessors in modelling files; torch log_softmax and
        nll_loss backward; a fused kernel writes the gradient over its input; torch 2.13 _inductor: what the compiled
        cross entropy of a 16-bit tensor's fp32 copy saves (the tensor) and allocates in backward (one of its size).
    """
    types, tokens, vocab = dtypes(config), config.micro_batch_tokens, model.vocab_size
    forward, backward = _forward_logit_bytes(types, stack), _backward_logit_bytes(types, stack)
    hidden = types.stream * model.hidden_size * tokens
    keys = _handed_out_bytes(model, config, stack)
    while_forward = forward * tokens * vocab + hidden + keys
    while_backward = backward * tokens * vocab + (hidden if config.lora is None else 0)
    in_forward = while_forward >= while_backward
    text = _forward_text(types, stack) if in_forward else _backward_text(types, stack)
    softcap = types.compute if model.logit_softcap is not None else 0
    kept = hidden if in_forward or config.lora is None else 0
    return [
        gpu_entry(
            "logits",
            Account.ACTIVATIONS,
            ((forward if in_forward else backward) + softcap) * tokens * vocab,
            _LOSS,
            f"({text}{f' + {softcap} B tanh of the capped logits' if softcap else ''}) x {tokens} tokens x {vocab}",
            "transformers ForCausalLMLoss, torch log_softmax" + ("" if in_forward else " backward"),
        ),
        gpu_entry(
            "head-input",
            Account.ACTIVATIONS,
            kept,
            _LOSS,
            f"{types.stream} B x hidden {model.hidden_size} x {tokens} tokens that the head reads",
            "torch linear",
        ),
        gpu_entry(
            "handed-out-keys",
            Account.ACTIVATIONS,
            keys if in_forward else 0,
            _LOSS,
            f"{keys // tokens} B x {tokens} tokens: products of all layers of which keys and values are views",
            "transformers 4.48.1 modeling_gpt_bigcode.py: present = key_value, a view of c_attn's output",
        ),
    ]


def _handed_out_bytes(model: ModelFacts, config: TrainingConfig, stack: Stack) -> int:
    """Returns the joint products of query, key and value of all layers where a model hands out views of them.

    A 4-bit linear gives its input's type, and torch's layer norm gives fp32 under autocast.
    Source: bitsandbytes nn/modules.py Linear4bit.forward, out.to(inp_dtype); autocast's fp32 list, layer_norm.
    """
    if not stack.keeps_keys:
        return 0
    types, total = dtypes(config), 0
    for group in model.groups:
        block = group.block
        normed = bool(block.norms) and block.norms[0].kind == "layer"
        wide = types.autocast and normed and config.method is Method.QLORA
        width = block.attention.query_width + 2 * block.attention.key_width
        total += group.count * (4 if wide else types.compute) * width
    return total * config.micro_batch_tokens


def _forward_logit_bytes(types: Dtypes, stack: Stack) -> int:
    if stack.cross_entropy is CrossEntropy.COMPILED:
        return types.compute
    wide = 4 if stack.logits_upcast else types.compute
    first = types.compute if types.compute != wide and stack.logits_kept else 0
    copies = 1 + (stack.cross_entropy is CrossEntropy.TORCH)
    shift = (types.compute if stack.narrow_shift else wide) if stack.shifted_copy else 0
    return first + shift + copies * wide


def _forward_text(types: Dtypes, stack: Stack) -> str:
    if stack.cross_entropy is CrossEntropy.COMPILED:
        return f"{types.compute} B logits"
    wide = 4 if stack.logits_upcast else types.compute
    parts = [f"{types.compute} B logits"] if types.compute != wide and stack.logits_kept else []
    parts.append(f"{wide} B " + ("fp32 copy" if types.compute != wide else "logits"))
    shift = types.compute if stack.narrow_shift else wide
    parts += [f"{shift} B shifted copy"] if stack.shifted_copy else []
    parts += [f"{wide} B log-softmax"] if stack.cross_entropy is CrossEntropy.TORCH else []
    return " + ".join(parts)


def _backward_logit_bytes(types: Dtypes, stack: Stack) -> int:
    return _staying_bytes(types, stack) + _gradient_bytes(types, stack)


def _gradient_bytes(types: Dtypes, stack: Stack) -> int:
    """Returns what backward itself holds of the logits and their gradients."""
    if stack.cross_entropy is CrossEntropy.COMPILED:
        return 2 * types.compute
    wide = 4 if stack.logits_upcast else types.compute
    if stack.cross_entropy is CrossEntropy.TORCH:
        return 3 * wide
    if stack.shifted_copy and not stack.narrow_shift:
        return 2 * wide
    return wide + (types.compute if types.compute != wide else 0)


def _staying_bytes(types: Dtypes, stack: Stack) -> int:
    """Returns what stays of the model's output: 16-bit logits, or fp32 ones where the model made them so.

    A compiled loss keeps the output itself, whoever else holds it.
    """
    if not stack.logits_stay or stack.cross_entropy is CrossEntropy.COMPILED:
        return 0
    return types.compute if stack.logits_kept or not stack.logits_upcast else 4


def _backward_text(types: Dtypes, stack: Stack) -> str:
    wide = 4 if stack.logits_upcast else types.compute
    staying = _staying_bytes(types, stack)
    if stack.cross_entropy is CrossEntropy.COMPILED:
        return f"{types.compute} B logits + {types.compute} B their gradient"
    first = f"{staying} B logits of the output + " if staying else ""
    if stack.cross_entropy is CrossEntropy.TORCH:
        return f"{first}{wide} B log-softmax + {wide} B its gradient + {wide} B gradient of the logits"
    if stack.shifted_copy and not stack.narrow_shift:
        return f"{first}{wide} B gradient in place of the shifted copy + {wide} B gradient of the logits"
    cast = f" + {types.compute} B cast" if types.compute != wide else ""
    return f"{first}{wide} B gradient in place of the logits{cast}"


def _linear(model: ModelFacts, config: TrainingConfig) -> list[Entry]:
    """Returns a fused linear cross entropy: gradients are computed in forward, one chunk of tokens at a time.

    Source: Liger-Kernel ops/fused_linear_cross_entropy.py: chunks of next_power_of_2(tokens / ceil(vocabulary /
        hidden)); a chunk's logits, their fp32 copy and the gradient's cast; gradients of input and weight.
    """
    types, tokens, vocab, hidden = dtypes(config), config.micro_batch_tokens, model.vocab_size, model.hidden_size
    chunk = min(tokens, next_power_of_two(ceil_div(tokens, ceil_div(vocab, hidden))))
    head = model.head_params or model.vocab_size * hidden
    per_logit = types.compute + (4 if types.compute != 4 else 0)
    source = "Liger-Kernel ops/fused_linear_cross_entropy.py"
    trains = config.lora is None
    return [
        gpu_entry(
            "loss-chunk",
            Account.WORKSPACE,
            per_logit * chunk * vocab,
            _LOSS,
            f"({types.compute} B + 4 B) x {chunk} tokens x {vocab} vocabulary",
            source,
        ),
        gpu_entry(
            "loss-hidden-gradient",
            Account.ACTIVATIONS,
            2 * types.stream * hidden * tokens,
            _LOSS,
            f"2 x {types.stream} B x hidden {hidden} x {tokens} tokens: the head's input and its gradient",
            source,
        ),
        gpu_entry(
            "loss-head-gradient",
            Account.GRADIENTS,
            types.weight * head if trains else 0,
            _LOSS | {Moment.BACKWARD_FIRST_LAYER},
            f"{types.weight} B x {head} elements of the head's gradient, made in forward",
            source,
        ),
    ]


def _chunks(model: ModelFacts, config: TrainingConfig) -> list[Entry]:
    """Returns a head computed in chunks whose logits all stay, turned to fp32 when they leave the model.

    Source: LitGPT utils.chunked_cross_entropy: log-softmax of every chunk is kept beside its logits; backward adds the
        gradients of one chunk. Lightning Fabric's half precision plugin converts what forward returns to fp32.
    """
    tokens, vocab, stream = config.micro_batch_tokens, model.vocab_size, dtypes(config).stream
    chunk = min(tokens, _LITGPT_CHUNK_TOKENS * config.micro_batch_sequences)
    source = "LitGPT utils.py chunked_cross_entropy, lightning fabric plugins/precision/half.py convert_output"
    return [
        gpu_entry(
            "logits",
            Account.ACTIVATIONS,
            8 * tokens * vocab,
            _LOSS,
            f"(4 B logits + 4 B log-softmax) x {tokens} tokens x {vocab} vocabulary",
            source,
        ),
        gpu_entry(
            "loss-chunk",
            Account.WORKSPACE,
            8 * chunk * vocab,
            _LOSS,
            f"2 gradients x 4 B x {chunk} tokens x {vocab} vocabulary",
            source,
        ),
        gpu_entry(
            "head-input",
            Account.ACTIVATIONS,
            stream * model.hidden_size * tokens,
            _LOSS,
            f"{stream} B x hidden {model.hidden_size} x {tokens} tokens that the head reads",
            source,
        ),
    ]
