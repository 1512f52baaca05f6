"""Programs of blocks: the language, and what the abstract machine makes of small ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from memc.config import Attention
from memc.facts import load_model, model_keys
from memc.facts.records import Block
from memc.ledger.blockrun import LayerMode, layer_run, situation
from memc.ledger.dtypes import Dtypes
from memc.ledger.library import OPERATIONS
from memc.ledger.machine import Gradients, Machine, Tensor
from memc.ledger.peaks import Shapes, peaks_of
from memc.ledger.program import ProgramError, parse_program

SIXTEEN_BIT = Dtypes(
    weight=2, compute=2, stream=2, adapter=2, gradient=2, autocast=False, masters=False, state=2, stored=2
)
MODE = LayerMode(
    trains=True,
    adapted=frozenset(),
    rank=0,
    dropout=False,
    attention=Attention.SDPA,
    mask=False,
    length=1024,
    types=SIXTEEN_BIT,
)
SHAPES = Shapes({"B": 1, "T": 100, "r": 1})


def machine(text: str, **names: Any) -> Machine:
    """Returns a machine for a program, without autocast."""
    return Machine(parse_program(text), OPERATIONS, {"autocast": False, **names})


def left_alive(made: Machine, gradients: Gradients) -> list[Tensor | None]:
    for gradient in gradients:
        if gradient is not None:
            made.keep(gradient)
    return []


def run(text: str, **names: Any) -> tuple[Machine, Tensor]:
    """Runs ``def block(x)`` on 10 elements of 2 bytes per token that need a gradient; returns the output."""
    made = machine(text, **names)
    x = made.new("B*T", 10, 2, "x")
    made.leaf(x, left_alive, sequence=0)
    y = made.call("block", [x])
    made.release(x)
    return made, y


def peak(made: Machine) -> int:
    return peaks_of(made.tape, made.storages).largest(SHAPES).bytes(SHAPES)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("block(x)", "line 1"),
        ("def block(x):\n    y = x @ x", "not part of the language"),
        ("def block(x):\n    return silu(x", "not closed"),
        ("def block(x):\n    return", "expected a value"),
        ("def block(x):\n    return x\n        return x", "unexpected indent"),
        ("def block(x):\n    return silu x", "unexpected 'x'"),
    ],
)
def test_a_program_that_cannot_be_read_says_where(text: str, reason: str) -> None:
    with pytest.raises(ProgramError, match=reason):
        parse_program(text)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return sill(x)", "no function or operation is called 'sill'"),
        ("return y", "nothing is called 'y'"),
        ("a, b = silu(x)", "are given"),
        ("return half(x, x)", "takes 1 arguments"),
    ],
)
def test_a_program_that_cannot_be_run_says_why(body: str, reason: str) -> None:
    with pytest.raises(ProgramError, match=reason):
        run(f"def block(x):\n    {body}\n\ndef half(x):\n    return x")


def test_a_local_lives_until_it_is_given_another_value() -> None:
    kept, _ = run("def block(x):\n    y = negate(x)\n    z = negate(y)\n    return negate(z)")
    moved, _ = run("def block(x):\n    x = negate(x)\n    x = negate(x)\n    return negate(x)")
    assert peak(kept) == 4 * 2000
    assert peak(moved) == 3 * 2000  # the caller holds the input


def test_arguments_of_a_call_live_until_it_returns() -> None:
    held, _ = run("def block(x):\n    return half(negate(x))\n\ndef half(y):\n    y = negate(y)\n    return negate(y)")
    assert peak(held) == 4 * 2000


def test_what_backward_needs_is_kept_once_and_freed_when_used() -> None:
    made, y = run("def block(x):\n    return silu(x) * x")
    root = y.node
    assert root is not None
    root.references += 1
    made.release(y)
    kept = [storage for storage in made.storages if storage.references]
    assert sorted(storage.name for storage in kept) == ["silu", "x"]
    made.backward(root, made.new("B*T", 10, 2, "gradient"))
    alive = [storage for storage in made.storages if storage.references]
    assert [storage.size for storage in alive] == [20]  # the gradient of x


def test_gradients_are_added_in_place_unless_somebody_else_holds_the_first() -> None:
    in_place, y = run("def block(x):\n    return negate(x) + negate(x)")
    shared, z = run("def block(x):\n    return x + negate(x)")
    for made, out in ((in_place, y), (shared, z)):
        assert out.node is not None
        out.node.references += 1
        made.backward(out.node, made.new("B*T", 10, 2, "gradient"))
    assert not any(storage.name == "sum of gradients" for storage in in_place.storages)
    assert not any(storage.name == "sum of gradients" for storage in shared.storages)


def test_a_condition_chooses_and_arithmetic_is_on_whole_numbers() -> None:
    branches = (
        "    if wide and not small:\n        return concat(x, x)\n    elif size > 3:\n        return x\n    else:\n"
    )
    text = f"def block(x):\n{branches}        return negate(x)"
    assert run(text, wide=1, small=0, size=5)[1].width == 20
    assert run(text, wide=0, small=0, size=5)[1].width == 10
    made = machine("def block():\n    return (7 - 1) / 4 * 2 + 1")
    assert made.call("block", []) == 3


def test_units_have_values() -> None:
    shapes = Shapes({"B": 3, "T": 100, "r": 8})
    assert shapes.of("B*T*r") == 2400
    assert shapes.of("B*T~128") == 384
    assert shapes.of("B*T-1") == 297
    assert shapes.of(("tile", "B*T", 128)) == 128
    assert shapes.of(("tiles", "B*T", 200)) == 300


def blocks() -> dict[str, Block]:
    """Returns one block of every described family, by name."""
    found: dict[str, Block] = {}
    for key in model_keys():
        model = load_model(key, base_dir=Path())
        for group in model.groups:
            if group.block.forward and not group.block.cross_attention:
                found.setdefault(f"{model.model_type}-{len(group.block.forward)}", group.block)
    return found


BLOCKS = blocks()


@pytest.mark.parametrize("name", [name for name in BLOCKS if name.split("-")[0] in ("llama", "gemma2", "gpt2", "phi3")])
@pytest.mark.parametrize("attention", [Attention.SDPA, Attention.EAGER])
def test_a_layer_ends_with_nothing_but_its_gradients(name: str, attention: Attention) -> None:
    """After backward only weight gradients and the gradient of the input are left, whether recomputed or not."""
    block = BLOCKS[name]
    mode = replace(MODE, attention=attention)
    result = layer_run(block, mode, situation(block, mode))
    hidden = dict(block.sizes)["hidden"]
    elements = block.params
    for peaks in (result.backward, result.recomputed):
        left: dict[int, None] = {}
        for event in peaks.tape:
            if event >= 0:
                left[event] = None
            else:
                left.pop(~event)
        sizes = [peaks.storages[index] for index in left]
        assert sum(storage.size for storage in sizes if storage.unit == "1") == 2 * elements
        assert [storage.size for storage in sizes if storage.unit != "1"] == [2 * hidden]
    assert dict(result.gradients.parts) == {("gradients", "1"): 2 * elements}


def test_a_layer_without_weights_to_train_keeps_no_weight_gradient() -> None:
    block = next(block for name, block in BLOCKS.items() if name.startswith("llama"))
    mode = replace(MODE, trains=False)
    assert layer_run(block, mode, situation(block, mode)).gradients.parts == ()


def test_keeping_more_than_one_gradient_of_an_input_is_not_lost() -> None:
    taken: list[int] = []

    def take(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        taken.append(sum(1 for one in gradients if one is not None))
        return []

    made = machine("def block(x):\n    return x * x")
    x = made.new("B*T", 10, 2, "x")
    made.leaf(x, take, sequence=0)
    y = made.call("block", [x])
    assert y.node is not None
    y.node.references += 1
    made.backward(y.node, made.new("B*T", 10, 2, "gradient"))
    assert taken == [1]
