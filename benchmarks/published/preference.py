"""A linear head with a loss of preference pairs: what torch runs, and the buffers of Liger's compiled chunk.

Half of the rows are the chosen answers. A slice of half the columns weighs the same, and is what the programs take.
"""

from __future__ import annotations

_CHOSEN = "token_loss(log_softmax(slice(logits, {half})), shifted_labels())"
_MEAN = (
    "def alone(x):\n"
    "    logits = base_linear(head, x)\n"
    f"    chosen = {_CHOSEN}\n"
    "    return chosen + mean(log_softmax(logits))\n"
)
_SCORED = (
    "def alone(x):\n"
    "    logits = cast(base_linear(head, x), 4)\n"
    f"    chosen = {_CHOSEN}\n"
    "    return chosen + token_loss(log_softmax(logits), shifted_labels())\n"
)
_MEAN_LENGTH = 4096
_WITH_LIKELIHOOD = ("fused_linear_orpo_loss", "fused_linear_cpo_loss")


def whole_program(name: str, length: int, vocab: int) -> str:
    """Returns the program of torch's likelihood of the chosen answers and preference of a pair.

    The first script of ORPO, which ran sequences of 4096, takes the mean of all log-probabilities of 16-bit logits.
    Every later one turns the logits to fp32 and gathers the labels' log-probabilities; a gather makes what the loss of
    tokens makes, zeros of the size of what it read.
    Source: github.com/linkedin/Liger-Kernel@02a168d benchmark/scripts/benchmark_orpo_loss.py TorchLMHeadORPO; @6b2fd02
        test/chunked_loss/test_orpo_loss.py HF_ORPO_Loss; @ebd5303 test/utils.py HFAlignmentLoss.

    Args:
        name: The benchmark's name of the operation.
        length: Tokens of a sequence.
        vocab: Rows of the head.
    """
    first = name == "fused_linear_orpo_loss" and length == _MEAN_LENGTH
    return (_MEAN if first else _SCORED).format(half=vocab // 2)


def chunk_bytes(name: str, length: int, vocab: int, hidden: int) -> int:
    """Returns the largest sum of buffers of one compiled chunk, a chosen and a rejected sequence side by side.

    16-bit logits and the fp32 zeros that the gradient of the gather is scattered into lie there together, and zeros for
    the chosen half where the likelihood of the chosen answers is part of the loss: a scatter is not fused. The gradient
    is written over the logits. Then the zeros are gone, and the gradients of inputs and weight are made beside it.
    Source: src/liger_kernel/chunked_loss/fused_linear_preference.py accumulate_chunk; the wrapper that Inductor writes
        for it: buffers of the matmul and of scatters, and the matmul's buffer used again.

    Args:
        name: The benchmark's name of the operation.
        length: Tokens of a sequence.
        vocab: Rows of the head.
        hidden: Its columns.
    """
    rows = 2 * length
    inputs, logits, zeros = 2 * rows * hidden, 2 * rows * vocab, 4 * rows * vocab
    if name in _WITH_LIKELIHOOD:
        zeros += zeros // 2
    return inputs + logits + max(zeros, inputs + 2 * vocab * hidden)


def left_by_compiler(length: int, vocab: int, hidden: int) -> int:
    """Returns what the last compilation leaves alive in the process of the benchmark, whatever runs in it afterwards.

    TorchDynamo's translator holds the frame's variables in a cycle of references (`InstructionTranslator.f_locals`, a
    nested function's tracker, an inlining translator), which waits for Python's collector; after the last compilation
    nothing makes enough objects for it to run. The variables of the chunk are its input, the weight, the gradient
    of the weight, and the loss; the loss is what the autograd function returns, so that its graph, which no backward
    has freed in the benchmark's first mode, holds the batch and the gradient of the batch as well. The chunk is
    compiled for the first batch, of two samples, and at the next, of four, with a dynamic size for good: the last
    compilation is that of four samples, and its own objects make Python collect what the first one left.
    Source: compiler_cycle.py beside this, and the loops of the benchmark for each of the three losses, both run with
        the torch 2.5.1 of that month on a CPU (Python 3.11, aot_eager, small sizes): after every mode and size two
        tensors of the weight's bytes, two of four samples' and one of two are alive, and none after a collection.

    Args:
        length: Tokens of a sequence.
        vocab: Rows of the head.
        hidden: Its columns.
    """
    sample, weight = 2 * length * hidden, 2 * vocab * hidden
    return 2 * weight + 2 * _SAMPLES_OF_LAST_COMPILATION * sample + _SAMPLES_OF_CHUNK * sample


_SAMPLES_OF_LAST_COMPILATION = 4
_SAMPLES_OF_CHUNK = 2
