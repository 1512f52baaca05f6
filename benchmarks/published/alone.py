"""Single operations of published benchmarks, run on the ledger's abstract machine with what stays around them.

A benchmark repeats forward and backward: inputs, the gradient of the output and the gradients that the run before left
are alive beside what the operation makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from memc.facts import load_fact
from memc.facts.programs import program_text
from memc.ledger.machine import Gradients, Machine, Node, Tensor
from memc.ledger.operations import OPERATIONS
from memc.ledger.peaks import Shapes, peaks_of
from memc.ledger.products import Weight
from memc.ledger.program import parse_program
from memc.units import ceil_div, next_power_of_two

from published import kernels as kernels  # registers the operations of fused kernels
from published.preference import chunk_bytes, left_by_compiler, whole_program
from published.records import Record, Skip

_ROWS = "B*T"
_CROSS_ENTROPY = "def alone(x):\n    return token_loss(log_softmax(x), shifted_labels())\n"
_HEAD = "def alone(x):\n    return token_loss(log_softmax(base_linear(head, x)), shifted_labels())\n"
_NORM = "def alone(x):\n    return rms_norm(head, x)\n"
_SWIGLU = (
    "def alone(x):\n    return base_linear(down_proj, silu(base_linear(gate_proj, x)) * base_linear(up_proj, x))\n"
)
_FUSED_SWIGLU = (
    "def alone(x):\n"
    "    return base_linear(down_proj, fused_swiglu(base_linear(gate_proj, x), base_linear(up_proj, x)))\n"
)


class RetainingMachine(Machine):
    """A machine whose backward keeps the graph: what nodes saved stays until the run ends."""

    def _forget(self, node: Node) -> None:
        if not self.names.get("backward runs"):
            super()._forget(node)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation as a benchmark runs it.

    Attributes:
        program: Its program, a function called ``alone``.
        rows: Rows of its input.
        width: Elements of a row.
        item: Bytes of an element.
        weights: Names with rows, columns and bytes of an element.
        retains: Whether backward keeps the graph.
        given_gradient: Whether the gradient of the output lives outside the operation.
    """

    program: str
    rows: int
    width: int
    item: int
    weights: Mapping[str, tuple[int, int, int]]
    retains: bool
    given_gradient: bool


def is_operation(record: Record) -> bool:
    """Returns whether a record measures a single operation."""
    return record.text("method").startswith("op-level")


def operation_bytes(record: Record) -> int:
    """Returns the allocated peak of the operation that a record measures.

    Source: github.com/linkedin/Liger-Kernel@v0.3.0 and v0.4.2 benchmark/scripts/benchmark_*.py, and of preference
        losses @02a168d and @6b2fd02: what a benchmark allocates, and that its backward keeps the graph for norms and
        SwiGLU.

    Raises:
        Skip: For an operation that is not described.
    """
    dims = record.mapping("model_dims")
    extra = dims.get("extra") if isinstance(dims.get("extra"), Mapping) else {}
    size, name, provider = dims.get("x_value"), str(dims.get("op")), str(dims.get("provider"))
    if not isinstance(size, int | float) or not isinstance(extra, Mapping):
        raise Skip("a single operation without sizes")
    run = _RUNS.get((name, provider))
    if run is None or (name, provider) in _UNKNOWN:
        raise Skip(_UNKNOWN.get((name, provider), f"a single operation that is not described: {name}, {provider}"))
    try:
        return run(name, int(size), extra)
    except (KeyError, TypeError, ValueError) as error:
        raise Skip("a single operation without sizes") from error


def _rows(extra: Mapping[str, Any]) -> int:
    return int(extra["B"]) * int(extra["T"])


def _cross_entropy(vocab: int, extra: Mapping[str, Any]) -> Operation:
    """Returns torch's cross entropy of fp32 logits."""
    return Operation(
        program=_CROSS_ENTROPY, rows=_rows(extra), width=vocab, item=4, weights={}, retains=False, given_gradient=False
    )


def _norm(width: int, extra: Mapping[str, Any]) -> Operation:
    """Returns Llama's norm of 16-bit rows with an fp32 weight."""
    return Operation(
        program=_NORM,
        rows=int(extra["M"]),
        width=width,
        item=2,
        weights={"head": (1, width, 4)},
        retains=True,
        given_gradient=True,
    )


def _swiglu(length: int, extra: Mapping[str, Any], program: str) -> int:
    """Returns a gated MLP without biases in 16 bits."""
    hidden, inner = int(extra["hidden_size"]), int(extra["intermediate_size"])
    weights = {"gate_proj": (inner, hidden, 2), "up_proj": (inner, hidden, 2), "down_proj": (hidden, inner, 2)}
    one = Operation(
        program=program,
        rows=int(extra["B"]) * length,
        width=hidden,
        item=2,
        weights=weights,
        retains=True,
        given_gradient=True,
    )
    return peak_bytes(one) + _workspaces()


def _whole_head(rows: int, extra: Mapping[str, Any]) -> int:
    """Returns a head with torch's loss on its 16-bit logits; the module of the other implementation lies beside it."""
    vocab, hidden = int(extra["V"]), int(extra["H"])
    one = Operation(
        program=_HEAD,
        rows=rows,
        width=hidden,
        item=2,
        weights={"head": (vocab, hidden, 2)},
        retains=False,
        given_gradient=False,
    )
    return peak_bytes(one) + 2 * vocab * hidden + _workspaces()


def _chunked_head(rows: int, extra: Mapping[str, Any]) -> int:
    """Returns Liger's fused head and loss: gradients made in forward beside those of the run before.

    Source: github.com/linkedin/Liger-Kernel@v0.4.2 src/liger_kernel/ops/fused_linear_cross_entropy.py: logits_chunk,
        its fp32 copy and grad_logits_chunk.
    """
    vocab, hidden = int(extra["V"]), int(extra["H"])
    chunk = min(rows, next_power_of_two(ceil_div(rows, ceil_div(vocab, hidden))))
    weights = 4 * 2 * vocab * hidden  # two modules, the new gradient and that of the run before
    inputs = 3 * 2 * rows * hidden  # the input, its new gradient and that of the run before
    before = 2 if rows > chunk else 0  # the name in the loop still holds the gradient of the chunk before
    return weights + inputs + (before + 2 + 4) * chunk * vocab + _workspaces()


def _whole_preference(name: str, samples: int, extra: Mapping[str, Any]) -> int:
    """Returns a head with the loss of preference pairs in torch; the other implementation's module lies beside it."""
    length, vocab, hidden = int(extra["T"]), int(extra["V"]), int(extra["H"])
    one = Operation(
        program=whole_program(name, length, vocab),
        rows=samples * length,
        width=hidden,
        item=2,
        weights={"head": (vocab, hidden, 2)},
        retains=False,
        given_gradient=False,
    )
    return peak_bytes(one) + 2 * vocab * hidden + left_by_compiler(length, vocab, hidden) + _workspaces()


def _chunked_preference(name: str, samples: int, extra: Mapping[str, Any]) -> int:
    """Returns Liger's head and loss of preference pairs, one pair at a time."""
    length, vocab, hidden = int(extra["T"]), int(extra["V"]), int(extra["H"])
    weights = 4 * 2 * vocab * hidden  # two modules, the new gradient and that of the run before
    inputs = 2 * length * hidden * (3 * samples - 2)  # the input, the gradient of the run before, that of chunks done
    chunk = chunk_bytes(name, length, vocab, hidden) + left_by_compiler(length, vocab, hidden)
    return weights + inputs + chunk + _workspaces()


def _workspaces() -> int:
    """Returns the workspaces of cuBLAS, one for each of the two threads that multiply. Ampere's size, as measured."""
    return 2 * int(load_fact("cublas.workspace_bytes").value)


def peak_bytes(one: Operation) -> int:
    """Returns the largest sum of what is alive in one forward and backward of an operation, all of it included."""
    names: dict[str, Any] = {
        "autocast": False,
        "compute": one.item,
        "gradients_stay": False,
        "dropped": False,
        "hidden": one.width,
        "single": one.rows == 1,
    }
    for name, (rows, columns, item) in one.weights.items():
        names[name] = Weight(name, rows, columns, item, trained=True)
    kind = RetainingMachine if one.retains else Machine
    machine = kind(parse_program(program_text(one.program)), OPERATIONS, names)
    x = machine.new(_ROWS, one.width, one.item, "input")
    machine.new(_ROWS, one.width, one.item, "gradient of the run before")
    machine.leaf(x, _accumulated, sequence=0)
    y = machine.call("alone", [x])
    gradient = _output_gradient(machine, y, one)
    names["backward runs"] = True
    assert y.node is not None
    machine.backward(y.node, gradient)
    shapes = Shapes({"B": 1, "T": one.rows, "r": 0})
    peaks = peaks_of(machine.tape, machine.storages)
    weights = sum(2 * rows * columns * item for rows, columns, item in one.weights.values())
    return peaks.largest(shapes).bytes(shapes) + weights


def _output_gradient(machine: Machine, y: Tensor, one: Operation) -> Tensor:
    """Returns the gradient that backward starts from. One that is given has the input's type and lives on.

    Where the output has another type, a cast of it stays until backward ends, for it takes its place in the list that
    the caller holds.
    Source: torch/csrc/autograd/engine.cpp Engine::execute: validate_outputs writes to the inputs it was given.
    """
    if not one.given_gradient:
        return machine.like(y, "gradient of the output")
    given = machine.like(y, "given gradient of the output", item=one.item)
    return machine.keep(given if one.item == y.item else machine.like(y, "given gradient, cast"))


def _accumulated(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
    """Adds a gradient to the one of the run before, in place."""
    return []


_RUNS: Mapping[tuple[str, str], Callable[[str, int, Mapping[str, Any]], int]] = {
    ("cross_entropy", "huggingface"): lambda name, size, extra: peak_bytes(_cross_entropy(size, extra)),
    ("cross_entropy", "liger"): lambda name, size, extra: _rows(extra) * (4 * size + 12),
    ("fused_linear_cross_entropy", "huggingface"): lambda name, size, extra: _whole_head(size, extra),
    ("fused_linear_cross_entropy", "liger"): lambda name, size, extra: _chunked_head(size, extra),
    ("fused_linear_orpo_loss", "huggingface"): lambda name, size, extra: _whole_preference(name, size, extra),
    ("fused_linear_orpo_loss", "liger"): lambda name, size, extra: _chunked_preference(name, size, extra),
    ("fused_linear_cpo_loss", "huggingface"): lambda name, size, extra: _whole_preference(name, size, extra),
    ("fused_linear_cpo_loss", "liger"): lambda name, size, extra: _chunked_preference(name, size, extra),
    ("fused_linear_simpo_loss", "huggingface"): lambda name, size, extra: _whole_preference(name, size, extra),
    ("fused_linear_simpo_loss", "liger"): lambda name, size, extra: _chunked_preference(name, size, extra),
    ("rms_norm", "huggingface"): lambda name, size, extra: peak_bytes(_norm(size, extra)),
    ("swiglu", "huggingface"): lambda name, size, extra: _swiglu(size, extra, _SWIGLU),
    ("swiglu", "liger"): lambda name, size, extra: _swiglu(size, extra, _FUSED_SWIGLU),
}
"""How an operation of a provider is run: its name, the benchmark's size and the rest of its settings to bytes."""
_UNKNOWN = {
    ("rms_norm", "liger"): "earlier runs of the benchmark leave tensors that Python collects at no known time",
}
"""Operations that are described but whose surroundings are not known: 10 bytes an element (input, output, the gradient
that both inputs share, fp32 products of every row) stand beside tensors of other sizes of the same benchmark."""
