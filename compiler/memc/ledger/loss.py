"""The output head and the loss beside what runs with the layers: other stacks, and what the allocator cannot reuse."""

from __future__ import annotations

from memc.config import LossHead, Method, Task, TrainingConfig
from memc.facts.records import ModelFacts
from memc.ledger.bill import Bill
from memc.ledger.constants import MEMC_STACK, LedgerFacts
from memc.ledger.dtypes import dtypes
from memc.ledger.entries import ALLOCATOR, Account, Entry, Moment
from memc.ledger.logits import stack_loss_entries
from memc.ledger.parts import cached_entry

_FP32 = 4
_WHOLE_LOGITS = (Task.SFT, Task.PRETRAIN)
"""Tasks whose plain loss is that of a causal model over whole sequences."""


def loss_entries(model: ModelFacts, config: TrainingConfig, facts: LedgerFacts) -> list[Entry]:
    """Returns what head and loss hold where the stack decides it, and holes that the plain loss leaves.

    Head and loss of memc's own stack are run with the layers.
    """
    if config.loss is LossHead.CHUNKED:
        return []
    if facts.stack == MEMC_STACK:
        return _narrow_logits(model, config)
    return stack_loss_entries(model, config, facts.stack)


def book_layer_blocks(bill: Bill, model: ModelFacts, config: TrainingConfig, facts: LedgerFacts) -> None:
    """Adds what a layer's forward pass leaves free in blocks that are too small for what the loss asks for.

    That is logits or, of a chunked head that trains, the fp32 sum of its gradient. Where the pass before cut off more,
    layers run in that.

    Args:
        bill: That of the layers, which has the working set of their forward pass.
        model: The model.
        config: The configuration.
        facts: Which stack runs.
    """
    tiles = config.loss is LossHead.CHUNKED and config.lora is not None
    if tiles or config.task not in _WHOLE_LOGITS or facts.stack != MEMC_STACK:
        return
    kept = bill.bytes_of("highest-layer-activations", Moment.LOSS)
    left = max(0, bill.bytes_of("forward-working-set", Moment.FORWARD) - kept)
    cut = _cut_off_bytes(model, config, facts.cublas_workspace_bytes)
    what = "of a layer's forward pass" if left >= cut else "below the workspace of the backward's thread"
    bill.add(
        f"{ALLOCATOR}layer-blocks",
        Account.ACTIVATIONS,
        max(left, cut),
        Moment.LOSS,
        lambda: f"{max(left, cut)} B {what}, free, and too small for what the loss asks for",
        "torch CUDACachingAllocator.cpp get_free_block, CUDABlas.cpp getChosenWorkspaceSize",
    )


def _cut_off_bytes(model: ModelFacts, config: TrainingConfig, workspace_bytes: int) -> int:
    """Returns what the first pass of a step leaves below the cuBLAS workspace of the backward's thread.

    Where the head does not train, that thread's first product is the gradient of its input: the workspace comes after
    the 16-bit gradient of logits and that, which lie lowest, and stays. In the next pass of the step the last layer's
    output and the head's input lie there, and the logits have no room by as much. Without checkpointing the workspace
    has room among the blocks of layers, and so it has among dequantised weights; an fp32 gradient of logits lies
    highest; between steps what is free goes back. From some length on the workspace has room where the last layer's
    output was: the most that a shorter pass loses is counted, so that it is never less for more.

    Args:
        model: The model.
        config: The configuration.
        workspace_bytes: The workspace of one thread.
    """
    size, passes = dtypes(config).compute, config.gradient_accumulation_steps
    alone = config.method is Method.LORA and config.zero is None and config.fsdp is None
    if not alone or passes == 1 or config.checkpoint_every != 1 or size == _FP32:
        return 0
    stream = min(size * config.micro_batch_tokens * model.hidden_size, workspace_bytes)
    return stream + stream * model.vocab_size // model.hidden_size


def book_layer_pieces(bill: Bill, model: ModelFacts, config: TrainingConfig, facts: LedgerFacts) -> None:
    """Adds what a checkpointed layer of a 4-bit base leaves free in backward, in blocks too small for its largest one.

    The layer is computed again and then run backward, and both ask for dequantised weights, and for outputs of another
    size where those were: the place that the largest of them had is cut up before it is asked for again.

    Args:
        bill: That of the layers.
        model: The model.
        config: The configuration.
        facts: Which stack runs.
    """
    if config.method is not Method.QLORA or not config.checkpoint_every or facts.stack != MEMC_STACK:
        return
    linears = [linear for group in model.groups for linear in group.block.linears]
    weight = 2 * max(linear.weight_params for linear in linears)
    output = dtypes(config).compute * config.micro_batch_tokens * max(linear.out_features for linear in linears)
    piece = max(weight, output)
    for moment in (Moment.BACKWARD_FIRST_LAYER, Moment.BACKWARD_LAST_LAYER):
        bill.add(
            f"{ALLOCATOR}layer-pieces",
            Account.ACTIVATIONS,
            2 * piece,
            moment,
            lambda: f"2 x {piece} B of a layer's largest dequantised weight or output, recomputed and run backward",
            "bitsandbytes autograd MatMul4Bit; torch CUDACachingAllocator.cpp get_free_block",
        )


def _narrow_logits(model: ModelFacts, config: TrainingConfig) -> list[Entry]:
    """Returns the block that 16-bit logits leave when the loss is known, and that no tensor of its backward fits.

    All that is asked for until the largest instant of the loss is the size of fp32 logits: twice as large.
    """
    size = dtypes(config).compute
    if size == _FP32 or config.task not in _WHOLE_LOGITS:
        return []
    tokens = config.micro_batch_tokens
    return [
        cached_entry(
            "logits",
            Account.ACTIVATIONS,
            size * model.vocab_size * tokens,
            frozenset({Moment.LOSS}),
            f"{size} B x {model.vocab_size} vocabulary x {tokens} tokens: freed, and too small for their fp32 gradient",
            "transformers loss/loss_utils.py ForCausalLMLoss; torch CUDACachingAllocator.cpp get_free_block",
        )
    ]
