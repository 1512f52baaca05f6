"""Operations of the output head and the loss: log-softmax and the tiles of a chunked head."""

from __future__ import annotations

from memc.ledger.machine import WORKSPACE, Gradients, Machine, Tensor
from memc.ledger.operations import cast, operation, wide
from memc.ledger.products import Weight

_TARGET_BYTES = 8
FP32 = 4
_KEPT_STATISTICS = 2
_STATISTICS = 7


@operation
def layer_output(machine: Machine) -> Tensor:
    """Returns what the last layer gave, and gives it up."""
    tensor: Tensor = machine.names.pop("output of the layers")
    return tensor


@operation
def shifted_labels(machine: Machine) -> Tensor:
    """Returns labels moved by one token: a padded copy that lives as long as the result, which the loss keeps.

    Source: transformers loss/loss_utils.py ForCausalLMLoss.
    """
    return machine.new("B*T", 1, _TARGET_BYTES, "shifted labels")


@operation
def log_softmax(machine: Machine, x: Tensor) -> Tensor:
    """Returns log-softmax, keeping the result. Source: derivatives.yaml _log_softmax; autocast's fp32 list."""

    return wide(machine, x, lambda given: log_softmax_in_type(machine, given))


@operation
def log_softmax_in_type(machine: Machine, x: Tensor) -> Tensor:
    """Returns log-softmax in the type of x, which the caller names, so that autocast leaves it alone.

    Source: aten/src/ATen/native/LossNLL.cpp cross_entropy_loss; autocast_mode.h, fp32_set_opt_dtype.
    """

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        return [machine.like(gradient, f"gradient of the {'fp32 ' if gradient.item == FP32 else ''}logits")]

    node = machine.track([x], [], backward)
    out = machine.like(x, "log-softmax")
    machine.save(node, out)
    machine.produce(node, out)
    return out


@operation
def token_loss(machine: Machine, x: Tensor, labels: Tensor) -> Tensor:
    """Returns the loss of log-probabilities, keeping them and the labels. Source: derivatives.yaml nll_loss_forward."""
    unit, width, item = x.unit, x.width, x.item

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        return [machine.new(unit, width, item, "gradient of log-softmax")]

    node = machine.track([x], [x, labels], backward)
    out = machine.new("1", 1, 4, "loss")
    machine.produce(node, out)
    return out


@operation
def gather_scored(machine: Machine, x: Tensor) -> Tensor:
    """Returns the hidden states of scored tokens, all but the last of each sample; keeps the mask.

    Source: trl/trainer/utils.py, the fused head's ``hidden[mask]``; derivatives.yaml index and slice.
    """
    unit, width, item = x.unit, x.width, x.item

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        zeros = machine.like(gradient, "zeros for scored rows")
        written = machine.like(gradient, "gradient of scored rows")
        machine.release(zeros)
        out = machine.new(unit, width, item, "gradient of sliced rows")
        machine.release(written)
        return [out]

    mask = machine.new("B*T-1", 1, 1, "mask of scored tokens")
    node = machine.track([x], [mask], backward)
    out = machine.new("B*T-1", width, item, "hidden states of scored tokens")
    machine.produce(node, out)
    machine.release(mask)
    return out


@operation
def tiled_loss(machine: Machine, weight: Weight, x: Tensor) -> Tensor:
    """Returns the loss of a head that computes its logits tile by tile; keeps hidden states, targets and statistics.

    Backward accumulates the gradients of hidden states and (when it trains) of the head in fp32.
    Source: trl/kernels/chunked_logprob.py, ChunkedLogProbFunction.
    """
    names = machine.names
    compute, tile, columns = names["compute"], names["tile_tokens"], names["tile_vocab"]
    unit, hidden, vocab, stream = x.unit, x.width, weight.rows, x.item
    node_of_weight = weight.node(machine)
    rows, two = ("tile", unit, tile), ("tiles", unit, tile)
    chunk = compute * hidden * min(columns, vocab) if weight.item != compute else 0
    last = compute * hidden * min(columns, max(0, vocab - columns)) if chunk else 0
    x_node = x.node

    def buffer(machine: Machine) -> Tensor:
        return machine.new(rows, columns, compute, "loss tile", account=WORKSPACE)

    def copies(machine: Machine) -> list[Tensor]:
        if stream == compute:
            return []
        return [machine.new(two, hidden, compute, "hidden states of a tile", account=WORKSPACE)]

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        of_x = machine.new(unit, hidden, 4, "hidden gradient in fp32") if x_node is not None else None
        of_head = machine.new("1", weight.elements, 4, "head gradient in fp32") if node_of_weight is not None else None
        held = [buffer(machine), *copies(machine)]
        if chunk:
            held.append(machine.new("1", chunk + last, 1, "head rows of a tile", account=WORKSPACE))
        results: list[Tensor | None] = []
        for made, item in ((of_x, stream), (of_head, weight.item)):
            results.append(None if made is None else cast(machine, made, item))
        machine.release(*held, of_x, of_head)
        return results

    targets = machine.new(unit, 1, _TARGET_BYTES, "targets")
    node = machine.track([x, node_of_weight], [x, targets], backward)
    statistics = machine.new(unit, _STATISTICS, 4, "running statistics")
    held = [buffer(machine), *copies(machine)]
    if chunk:
        machine.buffers(("1", chunk), name="head rows of a tile")
    kept = machine.new(unit, _KEPT_STATISTICS, 4, "log-sum-exp and entropy")
    machine.save(node, kept)
    machine.release(statistics, *held, kept, targets)
    out = machine.new("1", 1, 4, "loss")
    machine.produce(node, out)
    return out
