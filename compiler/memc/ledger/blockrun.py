"""One layer under one mode: its program run on the abstract machine, forward, backward and recomputed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from memc.config import Attention, Method, TrainingConfig
from memc.facts.records import Block, Linear, NormKind
from memc.ledger.dtypes import Dtypes, dtypes
from memc.ledger.library import OPERATIONS
from memc.ledger.machine import CASTS, Gradients, Machine, Storage, Tensor
from memc.ledger.peaks import Peaks, Shapes, Sum, peaks_of
from memc.ledger.products import Weight, empty_cache
from memc.ledger.program import parse_program

_FLASH_WIDEST_HEAD = 256


@dataclass(frozen=True, slots=True)
class Saved:
    """One kind of tensor that autograd keeps between forward and backward of a layer.

    Attributes:
        name: What it is.
        bytes_per_token: Its size.
        formula: How that comes about, with the numbers.
    """

    name: str
    bytes_per_token: int
    formula: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMode:
    """The part of a configuration that decides what a layer keeps.

    Attributes:
        trains: Whether the base weights train.
        adapted: Names of the linears that carry an adapter.
        rank: LoRA rank; 0 without adapters.
        dropout: Whether adapter inputs pass through dropout.
        attention: Attention implementation.
        mask: Whether a mask reaches the attention kernel.
        length: Tokens of one sequence.
        types: Element sizes.
        quantized: Whether the base is kept in 4 bits.
        double_quantization: Whether its constants are quantised too.
        gradients_stay: Whether the gradient of a weight is kept where backward leaves it (no buffer takes it over).
    """

    trains: bool
    adapted: frozenset[str]
    rank: int
    dropout: bool
    attention: Attention
    mask: bool
    length: int
    types: Dtypes
    quantized: bool = False
    double_quantization: bool = True
    gradients_stay: bool = True


def layer_mode(config: TrainingConfig) -> LayerMode:
    """Returns the layer mode of a configuration."""
    lora = config.lora
    return LayerMode(
        trains=config.method is Method.FULL,
        adapted=frozenset(lora.target_modules) if lora is not None else frozenset(),
        rank=lora.rank if lora is not None else 0,
        dropout=lora is not None and lora.dropout > 0,
        attention=config.attention,
        mask=config.padding_mask,
        length=config.max_length,
        types=dtypes(config),
        quantized=config.method is Method.QLORA,
        double_quantization=config.double_quantization,
        gradients_stay=gradients_stay(config),
    )


def gradients_stay(config: TrainingConfig) -> bool:
    """Returns whether a layer's weight gradients stay as backward makes them.

    Not when they are added to those of the last micro batch, to a bucket of DistributedDataParallel, or taken over by
    DeepSpeed: each is then freed as soon as it has been added or copied, and the place it goes to is an entry of its
    own.
    """
    return config.engine.value == "single" and config.gradient_accumulation_steps == 1


@dataclass(frozen=True, slots=True)
class LayerRun:
    """What one layer does to memory, in bytes per unit of shape.

    Attributes:
        kept: Storages that wait for backward, the layer's input included when it is kept; weight copies are not in it.
        cached_casts: Bytes of weight copies that autocast holds until the forward ends.
        kept_casts: Bytes of those that wait for backward.
        gradients: Bytes of weight gradients that stay after its backward.
        forward: Its forward, input included, when it keeps what backward needs.
        forward_freed: Its forward when it keeps nothing but its input (checkpointed).
        evaluated: Its forward without gradients.
        backward: Its backward, with what it kept and the gradient of its output.
        recomputed: Recomputation and backward, with its input and the gradient of its output.
    """

    kept: tuple[Storage, ...]
    cached_casts: Sum
    kept_casts: Sum
    gradients: Sum
    forward: Peaks
    forward_freed: Peaks
    evaluated: Peaks
    backward: Peaks
    recomputed: Peaks


def _only(storages: list[Storage]) -> Sum:
    sizes: dict[tuple[str, Any], int] = {}
    for storage in storages:
        key = (storage.account, storage.unit)
        sizes[key] = sizes.get(key, 0) + storage.size
    return Sum(tuple(sizes.items()), 0)


@dataclass(frozen=True, slots=True)
class Situation:
    """What surrounds a layer.

    Attributes:
        input_needs_grad: Whether backward goes on below it.
        unit: Shape variables of its tokens.
        mask_unit: Shape variables of its attention mask.
        aligned: Whether the keys are a multiple of 16.
        windowed: Whether its window is shorter than the sequence.
    """

    input_needs_grad: bool = True
    unit: str = "B*T"
    mask_unit: str = "B*T*T"
    aligned: bool = True
    windowed: bool = False


_RUNS: dict[Any, tuple[Block, LayerRun]] = {}


def situation(block: Block, mode: LayerMode, *, input_needs_grad: bool = True) -> Situation:
    """Returns what surrounds a layer of a block under a mode."""
    window = block.attention.sliding_window
    return Situation(
        input_needs_grad=input_needs_grad,
        mask_unit="B*T*T" if mode.mask else "T*T",
        aligned=mode.length % 16 == 0,
        windowed=window is not None and mode.length >= window,
    )


def layer_run(block: Block, mode: LayerMode, around: Situation) -> LayerRun:
    """Returns what a layer does to memory; shapes and rank stay open, so that few runs serve many configurations."""
    key = (id(block), replace(mode, rank=0, length=0), around)
    found = _RUNS.get(key)
    if found is None or found[0] is not block:
        found = _RUNS[key] = (block, _run_all(block, mode, around))
    return found[1]


def _run_all(block: Block, mode: LayerMode, around: Situation) -> LayerRun:
    machine, root, gradient_of_x = _forward(block, mode, around, saving=True)
    cached = [copy.storage for copy in machine.cache.values()]
    forward = peaks_of(machine.tape, machine.storages)
    empty_cache(machine)
    start = len(machine.tape)
    alive = [storage for storage in machine.storages if storage.references]
    kept = [storage for storage in alive if storage.account != CASTS]
    casts = [storage for storage in alive if storage.account == CASTS]
    _backward(machine, root, block, mode, around)
    gradients = [storage for storage in machine.storages if storage.account == "gradients"]
    backward = peaks_of(machine.tape, machine.storages, start)
    return LayerRun(
        kept=tuple(kept),
        cached_casts=_only(cached),
        kept_casts=_only(casts),
        gradients=_only(gradients),
        forward=forward,
        forward_freed=_unsaved(block, mode, around, grad=True),
        evaluated=_unsaved(block, mode, around, grad=False),
        backward=backward,
        recomputed=_recomputed(block, mode, around),
    )


def _unsaved(block: Block, mode: LayerMode, around: Situation, *, grad: bool) -> Peaks:
    machine, _, _ = _forward(block, mode, around, saving=False, grad=grad)
    return peaks_of(machine.tape, machine.storages)


def _recomputed(block: Block, mode: LayerMode, around: Situation) -> Peaks:
    """Returns the peaks of recomputation and backward of a checkpointed layer.

    Recomputation stops when the last tensor has been kept: what only the output needs is never made again.
    Source: torch/utils/checkpoint.py, _recomputation_hook with early stop.
    """
    machine, root, x = _forward(block, mode, replace(around, input_needs_grad=True), saving=True, holds_input=True)
    empty_cache(machine)
    needed = {storage.index for storage in machine.storages if storage.references}
    tape = machine.tape[: machine.last_save]
    alive: dict[int, None] = {}
    for event in tape:
        if event >= 0:
            alive[event] = None
        else:
            alive.pop(~event)
    machine.tape = tape + [~index for index in alive if index not in needed]
    _backward(machine, root, block, mode, around)
    machine.release(x)
    gradient = machine.storages[-1]
    del gradient
    return peaks_of(machine.tape, machine.storages)


def _forward(
    block: Block, mode: LayerMode, around: Situation, *, saving: bool, grad: bool = True, holds_input: bool = False
) -> tuple[Machine, Any, Tensor]:
    """Runs a layer's forward; returns the machine, the node of its output, and its input."""
    names = _names(block, mode, around)
    machine = Machine(parse_program(block.forward), OPERATIONS, names, saving=saving, grad=grad)
    for name in ("cosine", "sine", "mask"):
        names[name] = _given(machine, name, block, mode, around)
    hidden = names["hidden"]
    if holds_input:
        names["gradient"] = machine.new(around.unit, hidden, mode.types.stream, "gradient of the layer's output")
    x = machine.new(around.unit, hidden, mode.types.stream, "layer input")
    if around.input_needs_grad and grad:
        machine.leaf(x, _take, sequence=0)
    y = machine.call("block", [x])
    root = y.node
    if root is not None:
        root.references += 1
    if not holds_input:
        machine.release(x)
    if saving or not grad:
        machine.release(y)
    return machine, root, x


def _take(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
    """Leaves the gradient of a layer's input alive, for the layer below."""
    for gradient in gradients:
        if gradient is not None:
            machine.keep(gradient)
    return []


def _backward(machine: Machine, root: Any, block: Block, mode: LayerMode, around: Situation) -> None:
    gradient = machine.names.get("gradient")
    if gradient is None:
        hidden = machine.names["hidden"]
        gradient = machine.new(around.unit, hidden, mode.types.stream, "gradient of the layer's output")
    machine.backward(root, gradient)


def _given(machine: Machine, name: str, block: Block, mode: LayerMode, around: Situation) -> Tensor:
    """Returns a tensor that the model made once for all layers."""
    types = mode.types
    if name == "mask":
        return machine.outside(around.mask_unit, 1, types.stream, "attention mask of the model")
    return machine.outside("T", block.attention.head_dim, types.stream, f"rotary {name}")


def _names(block: Block, mode: LayerMode, around: Situation) -> dict[str, Any]:
    """Returns what the names of a program stand for under a mode."""
    types = mode.types
    eager = mode.attention is Attention.EAGER
    masked = mode.mask or around.windowed
    names: dict[str, Any] = dict(block.sizes)
    names |= {
        "autocast": types.autocast,
        "compute": types.compute,
        "weight": types.weight,
        "stream": types.stream,
        "adapter": types.adapter,
        "dropped": mode.dropout,
        "trains": mode.trains,
        "double_quantization": mode.double_quantization,
        "gradients_stay": mode.gradients_stay,
        "eager": eager,
        "masked": masked,
        "efficient": mode.attention is Attention.SDPA
        and (masked or types.compute == 4 or block.attention.head_dim > _FLASH_WIDEST_HEAD),
        "softcapped": block.attention.logit_softcap is not None,
        "mask_unit": around.mask_unit,
        "aligned": around.aligned,
    }
    for linear in block.linears:
        names[linear.id.replace(".", "_")] = _linear(linear, mode)
    for norm in block.norms:
        weight = Weight(norm.name, 1, norm.params, types.weight, trained=mode.trains)
        names[norm.name.replace(".", "_")] = weight
    for tensor in block.tensors:
        weight = Weight(tensor.name, 1, tensor.params, types.weight, trained=mode.trains and tensor.trains)
        names[tensor.name.replace(".", "_")] = weight
    return names


def _linear(linear: Linear, mode: LayerMode) -> Weight:
    types = mode.types
    weight = Weight(linear.name, linear.out_features, linear.in_features, types.weight, trained=mode.trains)
    weight.quantized = mode.quantized and linear.quantized
    if linear.bias:
        weight.bias = Weight(f"{linear.name} bias", linear.out_features, 1, types.weight, trained=mode.trains)
    if linear.name in mode.adapted and linear.adaptable:
        weight.down = Weight(f"{linear.name} lora_A", 1, linear.in_features, types.adapter, trained=True, unit="r")
        weight.up = Weight(f"{linear.name} lora_B", linear.out_features, 1, types.adapter, trained=True, unit="r")
    return weight


def saved_tensors(block: Block, mode: LayerMode) -> tuple[Saved, ...]:
    """Returns what one layer keeps per token when it is not checkpointed, in the order in which it is made.

    Source: autograd formulas of torch (derivatives.yaml) applied to the transformers modelling code.
    """
    shapes = shapes_of(mode, 1)
    run = layer_run(block, mode, situation(block, mode))
    saved = []
    for storage in run.kept:
        size = storage.size * shapes.of(storage.unit)
        saved.append(Saved(storage.name, size // mode.length, f"{storage.size} B x {storage.unit}"))
    return tuple(item for item in saved if item.bytes_per_token)


def shapes_of(mode: LayerMode, batch: int) -> Shapes:
    """Returns the shape variables of a mode with a batch."""
    return Shapes({"B": batch, "T": mode.length, "T+1": mode.length + 1, "r": mode.rank})


def saved_per_token(block: Block, mode: LayerMode) -> int:
    """Returns bytes per token that one layer keeps without checkpointing."""
    return sum(item.bytes_per_token for item in saved_tensors(block, mode))


__all__ = ["LayerMode", "LayerRun", "NormKind", "Saved", "layer_mode", "layer_run", "saved_per_token", "saved_tensors"]
