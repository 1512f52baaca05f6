"""One layer, or what comes after all of them, under one mode: its program run forward, backward and recomputed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from memc.config import Attention
from memc.facts.records import AttentionFacts, Block, Linear, ModelFacts, Norm
from memc.ledger.biases import in_use, shared_tensor
from memc.ledger.dtypes import Dtypes
from memc.ledger.library import OPERATIONS
from memc.ledger.machine import CASTS, GRADIENTS, Gradients, Machine, Node, Storage, Tensor
from memc.ledger.peaks import Peaks, Sum, peaks_of
from memc.ledger.places import places, unit_of
from memc.ledger.products import AUTOCAST_LEFT, Weight, empty_cache
from memc.ledger.program import parse_program
from memc.units import ceil_div

_FLASH_WIDEST_HEAD = 256
_MASK_ALIGNMENT = 16
_PIECE, _MOST_PIECES = "piece_size", 4
_ACTIVATIONS = ("silu", "swish", "relu", "relu2", "quick_gelu", "gelu_new", "gelu_fast", "gelu", "gelu_pytorch_tanh")


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
        gradients_stay: Whether the gradient of a weight stays where backward makes it. Not when it is added to that of
            the last micro batch, to a bucket of DistributedDataParallel, or taken over by DeepSpeed: it is then freed
            as soon as it has been added or copied, and the place it goes to is an entry of its own.
        embedding_trains: Whether rows of the input embedding train beside adapters.
        head_item: Bytes of one element of a head that trains beside adapters; 0 where it does not.
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
    embedding_trains: bool = False
    head_item: int = 0


@dataclass(frozen=True, slots=True)
class Situation:
    """What surrounds a layer.

    Attributes:
        input_needs_grad: Whether backward goes on below it.
        input_item: Bytes of one element of its input; 0 for the type of the stream.
        unit: Shape variables of its tokens.
        mask_unit: Shape variables of its attention mask.
        aligned: Whether the keys are a multiple of 16.
        single: Whether there is one sample: its heads need no copy to be a batch of matrices.
        windowed: Whether its window is shorter than the sequence.
        source_unit: Shape variables of the positions of another stack that it attends to; empty without one.
        source_width: Elements of each of those.
        topmost: Whether it is the highest layer of those that share something: its gradients for that are the first.
        checkpointing: Whether any layer of the model is checkpointed.
        source_needs_grad: Whether backward goes on in a stack of images whose features it puts into the stream.
        source_item: Bytes of one element of those features.
        given_item: Bytes of one element of another stack's output that it attends to; 0 for the type of the stream.
        pieces: Pieces that it mixes its sequence in, one after another; 4 stands for more. 0 where it does not.
    """

    input_needs_grad: bool = True
    input_item: int = 0
    unit: str = "B*T"
    mask_unit: str = "B*T*T"
    aligned: bool = True
    single: bool = False
    windowed: bool = False
    source_unit: str = ""
    source_width: int = 0
    topmost: bool = False
    checkpointing: bool = False
    source_needs_grad: bool = False
    source_item: int = 0
    given_item: int = 0
    pieces: int = 0


@dataclass(frozen=True)
class LayerRun:
    """What one layer does to memory, in bytes per unit of shape.

    What few configurations ask for is run when it is asked for, once.

    Attributes:
        kept: Storages that wait for backward, the layer's input included when it is kept; weight copies are not in it.
        keeps_input: Whether the input is among them.
        holds: Names of what it shares with other layers that backward needs.
        reaches: Whether its output needs a gradient.
        output: Shape variables of its output's positions, and elements of each.
        output_item: Bytes of one element of its output.
        input: Bytes of its input.
        cached_casts: Bytes of weight copies that autocast holds until the forward ends.
        kept_casts: Bytes of those that wait for backward.
        gradients: Bytes of weight gradients that stay after its backward.
        forward: Its forward, input included, when it keeps what backward needs.
        backward: Its backward, with what it kept and the gradient of its output.
        runs: The other runs, by name.
        known: Peaks of those that have been run.
    """

    kept: tuple[Storage, ...]
    keeps_input: bool
    holds: frozenset[str]
    reaches: bool
    output: tuple[str, int]
    output_item: int
    input: Sum
    cached_casts: Sum
    kept_casts: Sum
    gradients: Sum
    forward: Peaks
    backward: Peaks
    runs: dict[str, Callable[[], Peaks]]
    known: dict[str, Peaks]

    @property
    def forward_freed(self) -> Peaks:
        """Its forward when it keeps nothing but its input (checkpointed)."""
        return self._run("forward_freed")

    @property
    def forward_after_freed(self) -> Peaks:
        """Its forward when it keeps what backward needs and the layer below keeps nothing (that is checkpointed)."""
        return self._run("forward_after_freed")

    @property
    def evaluated(self) -> Peaks:
        """Its forward without gradients."""
        return self._run("evaluated")

    @property
    def recomputed(self) -> Peaks:
        """Recomputation and backward, with its input and the gradient of its output."""
        return self._run("recomputed")

    def _run(self, name: str) -> Peaks:
        if name not in self.known:
            self.known[name] = self.runs[name]()
        return self.known[name]


@dataclass(frozen=True, slots=True)
class TailRun:
    """What the final norm, the head and the loss do to memory, in bytes per unit of shape.

    Attributes:
        cached_casts: Bytes of weight copies that autocast holds until the forward ends.
        kept: What waits for backward, weight copies left out.
        forward: Its forward, with the output of the last layer.
        returned: What happens to what the model returns when autocast has ended, where the program tells them apart.
        evaluated: Its forward without gradients.
        backward: Its backward.
    """

    cached_casts: Sum
    kept: Sum
    forward: Peaks
    returned: Peaks
    evaluated: Peaks
    backward: Peaks


_LAYERS: dict[Any, tuple[Block, LayerRun]] = {}
_TAILS: dict[Any, tuple[ModelFacts, TailRun]] = {}


def situation(
    block: Block, mode: LayerMode, *, batch: int = 0, input_needs_grad: bool = True, input_item: int = 0
) -> Situation:
    """Returns what surrounds a layer of a block under a mode."""
    window = block.attention.sliding_window
    return Situation(
        input_needs_grad=input_needs_grad,
        input_item=0 if input_item == mode.types.stream else input_item,
        mask_unit="B*T*T" if mode.mask else "T*T",
        aligned=mode.length % _MASK_ALIGNMENT == 0,
        single=batch == 1 and (mode.attention is Attention.EAGER or block.attention.mixed_heads),
        windowed=window is not None and mode.length >= window,
        pieces=_pieces(block, mode.length),
    )


def _pieces(block: Block, length: int) -> int:
    """Returns how many pieces a layer mixes a sequence in, or that there are more than it matters."""
    size = dict(block.sizes).get(_PIECE)
    return 0 if size is None else min(ceil_div(length, size), _MOST_PIECES)


def layer_run(block: Block, mode: LayerMode, around: Situation) -> LayerRun:
    """Returns what a layer does to memory; shapes and rank stay open, so that few runs serve many configurations."""
    key = (id(block), replace(mode, rank=0, length=0), around)
    found = _LAYERS.get(key)
    if found is None or found[0] is not block:
        found = _LAYERS[key] = (block, _run_layer(block, mode, around))
    return found[1]


def _run_layer(block: Block, mode: LayerMode, around: Situation) -> LayerRun:
    machine, root, _ = _forward(block, mode, around)
    cached = [copy.storage for copy in machine.cache.values()]
    forward = peaks_of(machine.tape, machine.storages)
    empty_cache(machine)
    start = len(machine.tape)
    alive = [storage for storage in machine.storages if storage.references]
    held = frozenset(name for name in _BIASES if name in machine.names and in_use(machine.names[name]))
    if root is not None:
        machine.backward(root, _gradient(machine))
    return LayerRun(
        kept=tuple(storage for storage in alive if storage.account != CASTS),
        keeps_input=any(storage.name == _INPUT for storage in alive),
        holds=held,
        reaches=root is not None,
        output=machine.names[_OUTPUT][:2],
        output_item=machine.names[_OUTPUT][2],
        input=sum_of([storage for storage in machine.storages if storage.name == _INPUT]),
        cached_casts=sum_of(cached),
        kept_casts=sum_of([storage for storage in alive if storage.account == CASTS]),
        gradients=sum_of([storage for storage in machine.storages if storage.account == GRADIENTS]),
        forward=forward,
        backward=peaks_of(machine.tape, machine.storages, start),
        runs={
            "forward_freed": lambda: _freed(block, mode, around, grad=True),
            "forward_after_freed": lambda: (
                _beside_returned(_forward(block, mode, around)[0]) if machine.names[_BESIDES] else forward
            ),
            "evaluated": lambda: _freed(block, mode, around, grad=False),
            "recomputed": lambda: _recomputed(block, mode, around),
        },
        known={},
    )


def sum_of(storages: list[Storage]) -> Sum:
    """Returns the sizes of storages together."""
    sizes: dict[tuple[str, Any], int] = {}
    for storage in storages:
        key = (storage.account, storage.unit)
        sizes[key] = sizes.get(key, 0) + storage.size
    return Sum(tuple(sizes.items()), 0)


def _freed(block: Block, mode: LayerMode, around: Situation, *, grad: bool) -> Peaks:
    """Returns the peaks of a forward that keeps nothing but what the layer below returned beside its output.

    The model's loop over its layers holds what one layer returned until the next one has.
    """
    machine, _, _ = _forward(block, mode, around, saving=False, grad=grad)
    return _beside_returned(machine)


def _beside_returned(machine: Machine) -> Peaks:
    """Returns the peaks of a forward, with what the layer below returned beside its output from the start."""
    tape, name = tuple(machine.tape), "returned by the layer below"
    given = [machine.new(unit, width, item, name).storage.index for unit, width, item in machine.names[_BESIDES]]
    return peaks_of([*given, *tape], machine.storages)


def _recomputed(block: Block, mode: LayerMode, around: Situation) -> Peaks:
    """Returns the peaks of recomputation and backward of a checkpointed layer.

    Recomputation begins when backward first asks for something kept, and stops when the last tensor has been kept: what
    only the output needs is never made again.
    Source: torch/utils/checkpoint.py, _recomputation_hook with early stop.
    """
    around = replace(around, input_needs_grad=True)
    machine, root, x = _forward(block, mode, around, holds_input=True)
    if root is None:
        return peaks_of(machine.tape, machine.storages)
    empty_cache(machine)
    needed = {storage.index for storage in machine.storages if storage.references}
    again = machine.tape[1 : machine.last_save]
    again += [~index for index in _alive(again) if index not in needed]
    given = machine.tape[:1]
    machine.tape = []
    gradient = _gradient(machine)
    machine.frees_early = True
    machine.backward(root, gradient)
    at = machine.first_use if machine.first_use is not None else len(machine.tape)
    machine.release(x)
    return peaks_of([*given, *machine.tape[:at], *again, *machine.tape[at:]], machine.storages)


def _alive(tape: list[int]) -> list[int]:
    alive: dict[int, None] = {}
    for event in tape:
        if event >= 0:
            alive[event] = None
        else:
            alive.pop(~event)
    return list(alive)


_BIASES = ("position_bias", "cross_bias", "position_table")
_INPUT = "layer input"
_OUTPUT = "shape of the output"
_BESIDES = "shapes of what is returned beside the output"


def _forward(
    block: Block,
    mode: LayerMode,
    around: Situation,
    *,
    saving: bool = True,
    grad: bool = True,
    holds_input: bool = False,
) -> tuple[Machine, Node | None, Tensor]:
    """Runs a layer's forward; returns the machine, the node of its output, and its input."""
    names = {**_mode_names(mode, around), **_block_names(block, mode, around), **dict(block.sizes)}
    machine = Machine(parse_program(block.forward), OPERATIONS, names, saving=saving, grad=grad)
    types = mode.types
    for name in ("cosine", "sine"):
        width = names.get("rotary_dim", block.attention.head_dim)
        unit = around.unit if around.unit.startswith("I*") else "T"
        item = names.get("rotary_item", made_item(block.attention, mode))
        names[name] = machine.outside(unit, width, item, f"rotary {name}")
    mask_item = made_item(block.attention, mode)
    names["mask"] = machine.outside(around.mask_unit, 1, mask_item, "attention mask of the model")
    names |= {"checkpointed": holds_input, "unit": around.unit, "reached": around.input_needs_grad and grad}
    if around.source_item:
        names["image_features"] = _features(machine, around, grad=grad)
    elif around.source_unit:
        names |= _given_by_others(machine, block, mode, around, grad=grad)
    width = names.get("input_width", names["hidden"])
    x = machine.new(around.unit, width, around.input_item or types.stream, _INPUT)
    if around.input_needs_grad and grad and width:
        machine.leaf(x, _take, sequence=0)
    returned = machine.call("block", [x])
    y, *besides = returned if isinstance(returned, tuple) else (returned,)
    names[_BESIDES] = [(one.unit, one.width, one.item) for one in besides if isinstance(one, Tensor)]
    machine.release(*besides)
    names[_OUTPUT] = (y.unit, y.width, y.item)
    root: Node | None = y.node
    if root is not None:
        root.references += 1
    if not holds_input:
        machine.release(x)
    machine.release(y)
    return machine, root, x


def made_item(attention: AttentionFacts, mode: LayerMode) -> int:
    """Returns bytes of one element of the masks and rotary tables that a model makes for its layers."""
    return 4 if attention.made_after_norm and mode.types.autocast else mode.types.stream


def _given_by_others(
    machine: Machine, block: Block, mode: LayerMode, around: Situation, *, grad: bool
) -> dict[str, Any]:
    """Returns what a layer is given beside its input: another stack's output, and biases that layers share.

    Their gradients are added to those of other layers, in place.
    """
    types, heads = mode.types, block.attention.heads
    learns = grad and (mode.trains or bool(mode.adapted))
    attends = learns and block.cross_attention is not None
    rows, columns = around.unit.partition("*")[2], around.source_unit.partition("*")[2]
    item = around.given_item or types.stream
    source = shared_tensor(
        machine, "encoder output", around.source_unit, around.source_width, item, attends, around.topmost
    )
    own, cross = (
        shared_tensor(machine, name, unit, heads, item, grad and learns, around.topmost)
        for name, unit, item, learns in (
            ("position bias", f"{rows}*{rows}", types.weight, mode.trains),
            ("cross-attention bias", f"{rows}*{columns}", types.compute, around.checkpointing),
        )
    )
    own.transposed = cross.transposed = cross.head_major = True
    table_width = block.attention.position_table * dict(block.sizes)["hidden"]
    table_item = 4 if types.autocast else types.weight
    learns = grad and mode.trains
    table = shared_tensor(machine, "table of positions", "1", table_width, table_item, learns, around.topmost)
    return dict(zip(("source", *_BIASES), (source, own, cross, table), strict=True))


def _features(machine: Machine, around: Situation, *, grad: bool) -> Tensor:
    """Returns the features of images that a stack has made of them."""
    node = machine.leaf(None, _take, sequence=0) if grad and around.source_needs_grad else None
    return machine.outside(around.source_unit, around.source_width, around.source_item, "image features", node=node)


def _take(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
    """Leaves the gradient of a layer's input alive, for what is below."""
    for gradient in gradients:
        if gradient is not None:
            machine.keep(gradient)
    return []


def _gradient(machine: Machine) -> Tensor:
    """Returns the gradient of a layer's output."""
    unit, width, item = machine.names[_OUTPUT]
    return machine.new(unit, width, item, "gradient of the layer's output")


def _mode_names(mode: LayerMode, around: Situation) -> dict[str, Any]:
    """Returns what the names of any program stand for under a mode."""
    types = mode.types
    return {
        "autocast": types.autocast,
        "compute": types.compute,
        "weight": types.weight,
        "stream": types.stream,
        "adapter": types.adapter,
        "dropped": mode.dropout,
        "trains": mode.trains,
        "double_quantization": mode.double_quantization,
        "gradients_stay": mode.gradients_stay,
        "eager": mode.attention is Attention.EAGER,
        "mask_unit": around.mask_unit,
        "aligned": around.aligned,
        "single": around.single,
        "pieces": around.pieces,
    }


def _block_names(block: Block, mode: LayerMode, around: Situation) -> dict[str, Any]:
    """Returns what the names of a block's program stand for."""
    types, masked = (
        mode.types,
        (mode.mask and block.attention.padded) or around.windowed or block.attention.always_masked,
    )
    wide = types.compute == 4 or block.attention.head_dim > _FLASH_WIDEST_HEAD
    names: dict[str, Any] = {
        "masked": masked,
        "source_masked": mode.mask and block.cross_attention is not None and block.cross_attention.padded,
        "efficient": mode.attention is Attention.SDPA and (masked or wide),
        "softcapped": block.attention.logit_softcap is not None,
        "rotary": block.attention.rotary,
        "attention_dropout": False,
        **{f"act_{name}": name == block.mlp.activation for name in _ACTIVATIONS},
    }
    for linear in block.linears:
        names[_named(linear.id)] = linear_weight(linear, mode)
    for norm in block.norms:
        names[_named(norm.name)] = norm_weight(norm, mode)
    for tensor in block.tensors:
        item, trained = 4 if tensor.fp32 else types.weight, mode.trains and tensor.trains
        names[_named(tensor.name)] = Weight(tensor.name, 1, tensor.params, item, trained=trained)
    return names


def _named(path: str) -> str:
    return path.replace(".", "_")


def norm_weight(norm: Norm, mode: LayerMode) -> Weight:
    """Returns the weight (and bias) of a norm."""
    return Weight(norm.name, 1, norm.params, mode.types.weight, trained=mode.trains)


def linear_weight(linear: Linear, mode: LayerMode) -> Weight:
    """Returns a linear's weight with its bias and adapter under a mode."""
    types = mode.types
    weight = Weight(linear.name, linear.out_features, linear.in_features, types.weight, trained=mode.trains)
    weight.quantized = mode.quantized and linear.quantized
    if linear.bias:
        weight.bias = Weight(f"{linear.name} bias", linear.out_features, 1, types.weight, trained=mode.trains)
    if linear.name in mode.adapted and linear.adaptable:
        weight.down = Weight(f"{linear.name} lora_A", 1, linear.in_features, types.adapter, trained=True, unit="r")
        weight.up = Weight(f"{linear.name} lora_B", linear.out_features, 1, types.adapter, trained=True, unit="r")
    return weight


def tail_run(
    model: ModelFacts, mode: LayerMode, *, chunked: bool, tile: tuple[int, int], items: tuple[int, int]
) -> TailRun:
    """Returns what the final norm, the head and the loss do to memory.

    Args:
        model: The model.
        mode: The mode.
        chunked: Whether the loss is computed tile by tile.
        tile: Tokens and vocabulary entries of one tile.
        items: Bytes of one element of what the last layer gives, and of what another stack has given it.
    """
    key = (id(model), replace(mode, rank=0, length=0, adapted=frozenset()), chunked, items)
    found = _TAILS.get(key)
    if found is None or found[0] is not model:
        found = _TAILS[key] = (model, _run_tail(model, mode, chunked, tile, items))
    return found[1]


def _run_tail(
    model: ModelFacts, mode: LayerMode, chunked: bool, tile: tuple[int, int], items: tuple[int, int]
) -> TailRun:
    machine, root = _tail_forward(model, mode, chunked, tile, items, grad=True)
    cached = [copy.storage for copy in machine.cache.values()]
    left = machine.names.get(AUTOCAST_LEFT, len(machine.tape))
    forward = peaks_of(machine.tape[:left], machine.storages)
    returned = peaks_of(machine.tape, machine.storages, left)
    empty_cache(machine)
    kept = sum_of([storage for storage in machine.storages if storage.references and storage.account != CASTS])
    start = len(machine.tape)
    if root is not None:
        machine.backward(root, machine.new("1", 1, 4, "gradient of the loss"))
    evaluated, _ = _tail_forward(model, mode, chunked, tile, items, grad=False)
    return TailRun(
        cached_casts=sum_of(cached),
        kept=kept,
        forward=forward,
        returned=returned,
        evaluated=peaks_of(evaluated.tape, evaluated.storages),
        backward=peaks_of(machine.tape, machine.storages, start),
    )


def _tail_forward(
    model: ModelFacts, mode: LayerMode, chunked: bool, tile: tuple[int, int], items: tuple[int, int], *, grad: bool
) -> tuple[Machine, Node | None]:
    types = mode.types
    sizes = dict(model.tail_sizes)
    read = sizes.get("embedding_width", model.hidden_size)
    trained = mode.trains or bool(mode.head_item)
    head = Weight("head", model.vocab_size, read, mode.head_item or types.weight, trained=trained)
    if model.head_bias:
        head.bias = Weight("head bias", model.vocab_size, 1, types.weight, trained=mode.trains)
    names = {
        **_mode_names(mode, Situation()),
        **sizes,
        "hidden": model.hidden_size,
        "chunked": chunked,
        "tile_tokens": tile[0],
        "tile_vocab": tile[1],
        "capped": model.logit_softcap is not None,
        "head": head,
        "final_norm": norm_weight(model.final_norm, mode),
        **{_named(linear.id): linear_weight(linear, mode) for linear in model.outer_linears},
        **{_named(norm.name): norm_weight(norm, mode) for norm in model.outer_norms},
        **{f"act_{name}": name == model.groups[0].block.mlp.activation for name in _ACTIVATIONS},
        **{f"norm_{kind.value}": model.final_norm.kind is kind for kind in type(model.final_norm.kind)},
    }
    machine = Machine(parse_program(model.tail), OPERATIONS, names, grad=grad)
    unit = unit_of(model.stacks[-1])
    x = machine.new(unit, model.hidden_size, items[0], "output of the last layer")
    if grad:
        machine.leaf(x, _take, sequence=0)
    names["output of the layers"] = x
    given = next((place for place in reversed(places(model)) if place.gives), None)
    if given is not None:
        names["source"] = machine.outside(given.unit, given.gives, items[1], "encoder output")
    loss = machine.call("tail", [])
    root: Node | None = loss.node
    if root is not None:
        root.references += 1
    machine.release(loss)
    return machine, root
