"""Steps of a pinned configuration, replayed on a simulation of the caching allocator.

The ledger's figure is what tensors hold. Counters of reserved memory also count what fixed segments cannot reuse:
blocks of one phase are cut up by states that stay, and the next phase's larger blocks need new segments. Order and
sizes of allocations come from the tapes of the block programs, the loss, FSDP's gathered layers and the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from memc.config import Engine, Method, Optimizer, TrainingConfig
from memc.facts import ModelFacts
from memc.facts.records import Block as Layer
from memc.ledger.blockrun import LayerMode, layer_run, situation
from memc.ledger.constants import CrossEntropy, LedgerFacts, Stack
from memc.ledger.dtypes import Dtypes, dtypes
from memc.ledger.fsdp_units import stored_bytes
from memc.ledger.machine import GRADIENTS
from memc.ledger.peaks import Peaks, Shapes
from memc.ledger.states import count_params, quantized_bytes
from memc.units import ceil_div, next_power_of_two

from published.caching import Block, CachingAllocator

_COMPUTE, _GATHER, _REDUCE = 0, 1, 2


@dataclass
class Kept:
    """What one layer holds between its forward and its backward."""

    input: Block
    saved: dict[int, Block] = field(default_factory=dict)


class Replay:
    """Steps of a configuration on the simulated allocator."""

    def __init__(
        self, model: ModelFacts, config: TrainingConfig, facts: LedgerFacts, capacity_bytes: int | None
    ) -> None:
        self.model, self.config, self.facts = model, config, facts
        self.allocator = CachingAllocator(capacity_bytes)
        self.types = dtypes(config)
        self.counts = count_params(model, config, facts)
        self.ranks = config.shard_ranks if config.engine in (Engine.FSDP, Engine.DEEPSPEED) else 1
        self.shards_weights = config.engine is Engine.FSDP or config.zero_stage == 3
        self.layers = [group.block for group in model.groups for _ in range(group.count)]
        self.mode = self._layer_mode()
        self.shapes = Shapes(
            {"B": config.micro_batch_size, "T": config.max_length, "r": config.lora.rank if config.lora else 0}
        )
        self.runs = {id(block): layer_run(block, self.mode, situation(block, self.mode)) for block in self.layers}
        self.states: list[Block] = []
        self.gradients: list[Block] = []
        self.held: list[Block] = []
        self._start()

    def _start(self) -> None:
        """Prepares what stays."""
        self._load()

    def _layer_mode(self) -> LayerMode:
        """Returns the mode that layers run in."""
        return _mode(self.config, self.types)

    @property
    def _holds_inputs(self) -> bool:
        """Whether inputs and gradients of recomputed layers live until backward ends, see memc.ledger.reentrant."""
        config = self.config
        sharded = config.fsdp is not None and config.fsdp.version == 1
        return sharded and config.lora is not None and config.reentrant_checkpointing

    @property
    def _stream_bytes(self) -> int:
        """Bytes of the residual stream of one micro-batch."""
        return self.types.stream * self.model.hidden_size * self.config.micro_batch_tokens

    # -- what stays ----------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Allocates weights (or shards) tensor by tensor, and both cuBLAS workspaces."""
        for _ in range(2):
            self._take(self.facts.cublas_workspace_bytes)
        divisor = self.ranks if self.shards_weights else 1
        stored = stored_bytes(self.config) if self.config.engine is Engine.FSDP else self.types.weight
        size = stored if self.config.lora is None else self.types.weight
        outside = [self.model.embedding_params, self.model.head_params, self.model.final_norm.params]
        moved = self.config.offload_param.value != "none"
        if self.config.fsdp is not None and self.config.fsdp.version == 1:
            self._wrap(size, outside, moved)
            return
        for elements in [] if moved else outside:
            self._take(ceil_div(size * elements, divisor))
        for block in [] if moved else self.layers:
            for nbytes in self._layer_tensors(block, size):
                self._take(ceil_div(nbytes, divisor))
            for elements in self._adapters(block):
                self._take(ceil_div(self.types.adapter * elements, divisor))

    def _wrap(self, size: int, outside: Sequence[int], moved: bool) -> None:
        """Makes units of FSDP 1: a unit's tensors, its flat parameter beside them, this rank's shard beside that.

        Layers come first, what is outside them last. Adapters are units of their own, unless the flat parameters mix.
        Source: torch distributed/fsdp/_flat_param.py flatten_tensors_into_flat_param (a new tensor), shard (a copy of
            the chunk, and the whole is freed); _wrap_utils.py _auto_wrap, from the leaves up.
        """
        mixed = self.config.fsdp is not None and self.config.fsdp.mixed_units
        units: list[list[int]] = []
        for block in self.layers:
            adapters = [self.types.adapter * elements for elements in self._adapters(block)]
            tensors = self._layer_tensors(block, size)
            units += [[*tensors, *adapters]] if mixed else [*([one] for one in adapters), tensors]
        units.append([size * elements for elements in outside])
        for tensors in units:
            made = [self._take(nbytes) for nbytes in tensors]
            flat = self._take(sum(tensors))
            self._drop(made)
            shard = self._take(ceil_div(sum(tensors), self.ranks))
            self._free(flat)
            if moved:
                self._free(shard)

    def _layer_tensors(self, block: Layer, size: int) -> list[int]:
        """Returns the bytes of each weight of a layer as it is stored."""
        packed = self.config.method is Method.QLORA
        per_param = quantized_bytes(self.config, self.counts, self.facts)[0] / max(1, self.counts.quantized)
        sizes = [
            int(per_param * linear.weight_params) if packed and linear.quantized else size * linear.weight_params
            for linear in block.linears
        ]
        sizes += [size * linear.out_features for linear in block.linears if linear.bias]
        sizes += [size * norm.params for norm in block.norms]
        return sizes + [size * tensor.params for tensor in block.tensors]

    def _adapters(self, block: Layer) -> list[int]:
        lora = self.config.lora
        if lora is None:
            return []
        wanted = [linear for linear in block.linears if linear.name in lora.target_modules]
        return [lora.rank * side for linear in wanted for side in (linear.in_features, linear.out_features)]

    def _trained(self) -> Iterable[int]:
        """Yields the elements of every trained tensor of this rank."""
        if self.config.lora is not None:
            sizes = [elements for block in self.layers for elements in self._adapters(block)]
        else:
            sizes = [size for block in self.layers for size in self._layer_tensors(block, 1)]
            sizes += [self.model.embedding_params, self.model.head_params]
        for size in sizes:
            if size:
                yield ceil_div(size, self.ranks)

    # -- one step ------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Replays forward, loss, backward and the optimizer once."""
        root = self._gathered_root()
        stream = self._take(self._stream_bytes)
        kept: list[Kept] = []
        waiting: list[Block] = []
        for index, block in enumerate(self.layers):
            gathered = self._gather(block)
            self._drop(waiting)
            layer, stream = self._forward(index, block, stream)
            kept.append(layer)
            waiting = gathered
        gradient = self._loss(stream)
        self._drop(waiting)
        reduced: list[Block] = []
        ahead = self._gather(self.layers[-1])
        for index in reversed(range(len(self.layers))):
            running, ahead = ahead, self._gather(self.layers[index - 1]) if index else []
            gradient = self._backward(self.layers[index], kept[index], gradient)
            self._drop(running)
            reduced = self._reduce(self.layers[index], reduced)
        self._free(gradient)
        self._drop(self.held)
        self.held = []
        self._drop(reduced)
        self._outer_gradients()
        self._drop(root)
        self._optimize()

    def _forward(self, index: int, block: Layer, stream: Block) -> tuple[Kept, Block]:
        """Replays a layer's forward; returns what it keeps and its output."""
        run, every = self.runs[id(block)], self.config.checkpoint_every
        checkpointed = every > 0 and index % every == 0
        peaks = run.forward_freed if checkpointed else run.forward
        first = peaks.tape[0]
        if checkpointed:
            events = [event for event in peaks.tape[:-1] if event != ~first]
            alive = self._play(peaks, events, {first: stream})
            alive.pop(first)
            output = alive.pop(max(alive)) if alive else self._take(self._stream_bytes)
            self._drop(alive.values())
            return Kept(stream), output
        alive = self._play(peaks, peaks.tape, {first: stream})
        return Kept(stream, alive), self._take(self._stream_bytes)

    def _backward(self, block: Layer, layer: Kept, gradient: Block) -> Block:
        """Replays a layer's backward; returns the gradient of its input."""
        run = self.runs[id(block)]
        if layer.saved:
            events = run.backward.tape[len(run.forward.tape) :]
            alive = self._play(run.backward, events, dict(layer.saved), first_new=gradient)
        else:
            peaks = run.recomputed
            held = self._holds_inputs
            kept = [event for event in peaks.tape if not (held and event == ~peaks.tape[0])]
            alive = self._play(peaks, kept, {peaks.tape[0]: layer.input}, first_new=gradient)
            if held:  # the input and its gradient
                self.held += [alive.pop(peaks.tape[0]), self._take(self._stream_bytes)]
        names = (run.backward if layer.saved else run.recomputed).storages
        result: Block | None = None
        for index, left in list(alive.items()):
            if names[index].account == GRADIENTS and self.mode.gradients_stay:
                self._weight_gradient(left)
            elif result is None:
                result = left
            else:
                self._free(left)
        return result or self._take(self._stream_bytes)

    def _weight_gradient(self, made: Block) -> None:
        """Takes in a gradient that a layer's backward leaves."""
        self.gradients.append(made)

    def _play(
        self, peaks: Peaks, events: Sequence[int], alive: dict[int, Block], *, first_new: Block | None = None
    ) -> dict[int, Block]:
        """Replays events of a tape; storages in `alive` exist already. Returns what is alive afterwards.

        Args:
            peaks: The tape's storages.
            events: Indices of storages, complements for releases.
            alive: Blocks by storage; changed and returned.
            first_new: A block that stands for the first storage that is not in `alive`.
        """
        sizes = {}
        for event in events:
            if event >= 0:
                if event in alive:
                    continue
                if first_new is not None:
                    alive[event], first_new = first_new, None
                    continue
                storage = peaks.storages[event]
                sizes[event] = storage.size * self.shapes.of(storage.unit)
                if sizes[event]:
                    alive[event] = self._take(sizes[event])
            elif ~event in alive:
                self._free(alive.pop(~event))
        return alive

    def _loss(self, stream: Block) -> Block:
        """Replays head and loss; returns the gradient of the last layer's output."""
        tokens, stack, types = self.config.micro_batch_tokens, self.facts.stack, self.types
        hidden = self.model.hidden_size * tokens
        wide_norm, output = self._take(4 * hidden), self._take(types.stream * hidden)
        if stack.cross_entropy is CrossEntropy.LINEAR:
            gradient = self._linear_loss(hidden)
        elif stack.cross_entropy is CrossEntropy.COMPILED:
            gradient = self._compiled_loss(hidden)
        else:
            gradient = self._whole_loss(stack, hidden)
        self._drop([wide_norm, output, stream])
        return gradient

    def _whole_loss(self, stack: Stack, hidden: int) -> Block:
        """Replays a loss of logits that exist for all tokens at once."""
        logits = self.config.micro_batch_tokens * self.model.vocab_size
        compute = self.types.compute
        wide = 4 if stack.logits_upcast else compute
        output: Block | None = self._take(compute * logits)
        assert output is not None
        self._logits_made()
        copies = [self._take(wide * logits) for _ in range((wide != compute) + stack.shifted_copy)]
        if wide != compute and not stack.logits_kept:
            self._free(output)
            output = None
        torch_loss = stack.cross_entropy is CrossEntropy.TORCH
        saved = self._take(wide * logits) if torch_loss else None
        if torch_loss and not stack.logits_stay:
            self._drop(copies)
            copies = []
        if output is not None and not stack.logits_stay:
            self._free(output)
            output = None
        made = self._take(wide * logits)
        if saved is not None:
            of_logits = self._take(wide * logits)
            self._drop([made, saved])
            made = of_logits
        if wide != compute:
            narrow = self._take(compute * logits)
            self._free(made)
            made = narrow
        self._logits_gradient_made()
        self._head_gradient_made()
        gradient = self._take(self.types.stream * hidden)
        self._drop([made, *copies, *([] if output is None else [output])])
        return gradient

    def _compiled_loss(self, hidden: int) -> Block:
        """Replays a compiled loss: the logits, and their gradient beside them."""
        logits = self.types.compute * self.config.micro_batch_tokens * self.model.vocab_size
        output = self._take(logits)
        self._logits_made()
        made = self._take(logits)
        self._free(output)
        self._logits_gradient_made()
        self._head_gradient_made()
        gradient = self._take(self.types.stream * hidden)
        self._free(made)
        return gradient

    def _logits_made(self) -> None:
        """Nothing else happens when the logits exist."""

    def _logits_gradient_made(self) -> None:
        """Nothing else happens when backward leaves the loss."""

    def _head_gradient_made(self) -> None:
        """Allocates the gradient of a head that trains and is not sharded."""
        if self.config.lora is None and not self.shards_weights and self.model.head_params:
            self.gradients.append(self._take(self.types.gradient * self.model.head_params))

    def _linear_loss(self, hidden: int) -> Block:
        tokens, vocab = self.config.micro_batch_tokens, self.model.vocab_size
        chunk = min(tokens, next_power_of_two(ceil_div(tokens, ceil_div(vocab, self.model.hidden_size))))
        if self.config.lora is None:
            weight = self._take(self.types.weight * (self.model.head_params or vocab * self.model.hidden_size))
            self.gradients.append(weight)
        gradient = self._take(self.types.stream * hidden)
        for _ in range(ceil_div(tokens, chunk)):
            first = self._take(self.types.compute * chunk * vocab)
            second = self._take(4 * chunk * vocab)
            self._free(first)
            third = self._take(self.types.compute * chunk * vocab)
            self._drop([second, third])
        return gradient

    # -- sharded weights -----------------------------------------------------------------------------------------------

    def _gather(self, block: Layer) -> list[Block]:
        """Allocates a layer's whole weights on the stream that gathers them; nothing when they are not sharded."""
        if not self.shards_weights:
            return []
        sizes = self._layer_tensors(block, self.types.compute)
        found = [self._take(sum(sizes), _GATHER)]
        if self.config.fsdp is not None and self.config.fsdp.version == 2:
            found += [self._take(size) for size in sizes]
        return found

    def _gathered_root(self) -> list[Block]:
        if not self.shards_weights:
            return []
        outside = self.model.embedding_params + self.model.head_params + self.model.final_norm.params
        return [self._take(self.types.compute * outside, _GATHER)]

    def _reduce(self, block: Layer, before: list[Block]) -> list[Block]:
        """Allocates the reduction's input and the shard it leaves; frees the input of the layer before."""
        if not self.shards_weights or self.config.lora is not None:
            return []
        elements = sum(self._layer_tensors(block, 1))
        wide = 4 if self.config.fsdp is not None and self.config.fsdp.reduce_fp32 else self.types.compute
        work = self._take(wide * elements, _REDUCE)
        self._drop(before)
        if self.config.offload_optimizer.value == "none":
            self.gradients.append(self._take(ceil_div(self.types.stored * elements, self.ranks), _REDUCE))
        return [work]

    def _outer_gradients(self) -> None:
        """Allocates the gradients of embedding (and head) where they train."""
        if self.config.lora is not None:
            return
        elements = self.model.embedding_params + (self.model.head_params if self.shards_weights else 0)
        whole = self._take(self.types.gradient * elements)
        if not self.shards_weights:
            self.gradients.append(whole)
            return
        wide = 4 if self.config.fsdp is not None and self.config.fsdp.reduce_fp32 else self.types.compute
        work = self._take(wide * elements, _REDUCE)
        if self.config.offload_optimizer.value == "none":
            self.gradients.append(self._take(ceil_div(self.types.stored * elements, self.ranks), _REDUCE))
        self._drop([whole, work])

    # -- the optimizer -------------------------------------------------------------------------------------------------

    def _optimize(self) -> None:
        """Allocates states in the first step, the optimizer's temporaries in each, and drops gradients."""
        config = self.config
        if config.lora is not None and not self.gradients:
            self.gradients = [self._take(self.types.gradient * size) for size in self._trained()]
        on_gpu = config.offload_optimizer.value == "none" and "paged" not in config.optimizer
        if on_gpu and not self.states:
            size = self.types.stored if config.engine is Engine.FSDP else self.types.state
            self.states = [self._take(size * elements) for elements in self._trained() for _ in range(2)]
        if on_gpu and config.optimizer is Optimizer.ADAMW_FOREACH:
            self._drop([self._take(self.types.stored * elements) for elements in self._trained()])
        self._drop(self.gradients)
        self.gradients = []

    def _take(self, size_bytes: int, stream: int = _COMPUTE) -> Block:
        return self.allocator.allocate(int(size_bytes), stream)

    def _free(self, block: Block) -> None:
        self.allocator.free(block)

    def _drop(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self._free(block)


def _mode(config: TrainingConfig, types: Dtypes) -> LayerMode:
    """Returns the layer mode of a configuration."""
    lora = config.lora
    return LayerMode(
        trains=lora is None,
        adapted=frozenset(lora.target_modules) if lora is not None else frozenset(),
        rank=lora.rank if lora is not None else 0,
        dropout=lora is not None and lora.dropout > 0,
        attention=config.attention,
        mask=config.padding_mask,
        length=config.max_length,
        types=types,
        quantized=config.method is Method.QLORA,
        double_quantization=config.double_quantization,
        gradients_stay=config.engine is Engine.SINGLE and config.gradient_accumulation_steps == 1,
    )
