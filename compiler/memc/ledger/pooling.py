"""Operations that make one row of a sample's tokens, for models that sort texts into classes, and their loss."""

from __future__ import annotations

from memc.ledger.machine import Gradients, Machine, Tensor
from memc.ledger.operations import operation

_ROWS = "B"


def _selected(machine: Machine, x: Tensor, name: str, *, copies: bool) -> Tensor:
    """Returns one row of each sample, as a view or a copy; backward writes it into zeros of the full shape."""
    unit, width, item = x.unit, x.width, x.item

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        return [machine.new(unit, width, item, f"gradient of the {name}")]

    node = machine.track([x], [], backward)
    out = machine.new(_ROWS, width, item, name) if copies else machine.view(x)
    out.unit = _ROWS
    machine.produce(node, out)
    return out


@operation
def first_token(machine: Machine, x: Tensor) -> Tensor:
    """Returns the first token's row of each sample, a view that holds all rows. Source: derivatives.yaml select."""
    return _selected(machine, x, "first token", copies=False)


@operation
def last_token(machine: Machine, x: Tensor) -> Tensor:
    """Returns the last row of each sample that is no padding, a copy. Source: derivatives.yaml index.Tensor."""
    return _selected(machine, x, "last token", copies=True)


@operation
def mean_of_tokens(machine: Machine, x: Tensor) -> Tensor:
    """Returns the mean of each sample's rows: all of them times the mask first.

    Source: transformers modeling_modernbert.py ModernBertForSequenceClassification; derivatives.yaml mul, sum.dim.
    """
    unit, width, item = x.unit, x.width, x.item

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        return [machine.new(unit, width, item, "gradient of the rows")]

    node = machine.track([x], [], backward)
    product = machine.like(x, "rows times the mask")
    out = machine.new(_ROWS, width, item, "mean of the rows")
    machine.release(product)
    machine.produce(node, out)
    return out


@operation
def label_loss(machine: Machine, x: Tensor) -> Tensor:
    """Returns the loss of one row of classes per sample, keeping log-probabilities.

    Source: transformers loss/loss_utils.py ForSequenceClassificationLoss; derivatives.yaml _log_softmax, nll_loss.
    """

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        return [machine.new(x_unit, width, item, "gradient of the classes")]

    x_unit, width, item = x.unit, x.width, x.item
    node = machine.track([x], [], backward)
    kept = machine.new(x_unit, width, 4, "log-probabilities of the classes")
    machine.save(node, kept)
    out = machine.new("1", 1, 4, "loss")
    machine.produce(node, out)
    machine.release(kept)
    return out
