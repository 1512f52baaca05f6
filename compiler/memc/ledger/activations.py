"""Activations on one GPU at each moment of the step: every layer's run, stacked as the step stacks them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memc.config import Attention, LossHead, TrainingConfig
from memc.facts.records import Block, ModelFacts
from memc.ledger.bill import Bill
from memc.ledger.blockrun import LayerMode, LayerRun, Situation, layer_run, situation, tail_run
from memc.ledger.constants import MEMC_STACK, LedgerFacts
from memc.ledger.entries import Account, Entry, Moment
from memc.ledger.layer import layer_mode, saved_per_token, shapes_of
from memc.ledger.peaks import Peaks, Shapes, Sum
from memc.ledger.places import Place, places
from memc.units import ceil_div

_SOURCE = "transformers modelling code, torch autograd"
_CHECKPOINT = "transformers activation_checkpointing_enable(every_n_layers), torch.utils.checkpoint"
_CASTS = "torch autocast_mode.cpp cached_cast"
_EMBEDDING_SORTS_ABOVE_TOKENS = 3072
_BATCH_BYTES = 8
_ACCOUNTS = {
    "activations": Account.ACTIVATIONS,
    "gradients": Account.GRADIENTS,
    "casts": Account.PARAMETERS,
    "workspace": Account.WORKSPACE,
}
_SUFFIXES = {
    "activations": "",
    "gradients": "-weight-gradients",
    "casts": "-weight-copies",
    "workspace": "-kernel-buffers",
}

__all__ = ["LayerGroup", "activation_entries", "layer_groups", "saved_per_token"]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one shape under a checkpointing setting.

    Attributes:
        block: Their shape.
        kept: How many keep all their activations.
        checkpointed: How many keep their input only.
    """

    block: Block
    kept: int
    checkpointed: int


def layer_groups(model: ModelFacts, every: int) -> tuple[LayerGroup, ...]:
    """Returns the layers of a model, split by whether they are checkpointed.

    Source: transformers modeling_utils._set_gradient_checkpointing: layer i is checkpointed when i % every == 0,
        counted over the whole model (every 0: none).
    """
    groups, first = [], 0
    for group in model.groups:
        after = first + group.count
        marked = ceil_div(after, every) - ceil_div(first, every) if every else 0
        groups.append(LayerGroup(group.block, group.count - marked, marked))
        first = after
    return tuple(groups)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer with given shapes, in bytes.

    Attributes:
        checkpointed: Whether it keeps its input only.
        waits: What it leaves for backward, weight copies left out.
        keeps_input: Whether its input is in that.
        output_item: Bytes of one element of its output.
        cached_casts: Weight copies that live until the forward ends.
        kept_casts: Weight copies that live until its backward.
        gradients: Weight gradients that stay.
        forward, forward_sum: Its forward, and the largest sum of that.
        backward, backward_sum: Its backward, and the largest sum of that.
    """

    checkpointed: bool
    waits: int
    keeps_input: bool
    output_item: int
    cached_casts: int
    kept_casts: int
    gradients: int
    forward: Peaks
    forward_sum: Sum
    forward_bytes: int
    backward: Peaks
    backward_sum: Sum
    backward_bytes: int


def _layer(run: LayerRun, shapes: Shapes, checkpointed: bool, offloaded: bool, after_freed: bool) -> Layer:
    forward = run.forward_freed if checkpointed else run.forward_after_freed if after_freed else run.forward
    backward = run.recomputed if checkpointed else run.backward
    forward_sum, backward_sum = forward.largest(shapes), backward.largest(shapes)
    kept = sum(storage.size * shapes.of(storage.unit) for storage in run.kept)
    waits = (0 if offloaded else run.input.bytes(shapes)) if checkpointed else kept
    return Layer(
        checkpointed=checkpointed,
        waits=waits,
        keeps_input=checkpointed or run.keeps_input,
        output_item=run.output_item,
        cached_casts=run.cached_casts.bytes(shapes),
        kept_casts=0 if checkpointed else run.kept_casts.bytes(shapes),
        gradients=run.gradients.bytes(shapes),
        forward=forward,
        forward_sum=forward_sum,
        forward_bytes=forward_sum.bytes(shapes),
        backward=backward,
        backward_sum=backward_sum,
        backward_bytes=backward_sum.bytes(shapes),
    )


def _blocks(model: ModelFacts) -> tuple[Block, ...]:
    """Returns the block of every layer of all stacks; equal ones are the same object, so that each is run once."""
    return tuple(place.block for place in places(model) if place.index >= 0)


_GIVEN = ("source", "position_bias", "cross_bias")


def _is_given_more(block: Block) -> bool:
    """Returns whether a layer's program names something that other stacks or all layers share."""
    return any(name in block.forward for name in _GIVEN)


class Pile:
    """All layers of a model, bottom first, with the sums that the moments of a step need.

    Attributes:
        layers: The layers.
        shapes: Shape variables of a micro batch.
        before: Entries at the bottom that are no layers.
    """

    def __init__(self, model: ModelFacts, config: TrainingConfig, mode: LayerMode) -> None:
        self.shapes = shapes_of(mode, config.micro_batch_size)
        every = config.checkpoint_every
        known: dict[tuple[int, str, bool, bool, int, int, bool], Layer] = {}
        layers: list[Layer] = []
        item = mode.types.stream
        for place in places(model):
            checkpointed = bool(every) and place.index >= 0 and place.index % every == 0
            reached = not place.lowest or mode.trains or bool(every)
            item = mode.types.stream if place.first else item
            after_freed = bool(layers) and layers[-1].checkpointed
            key = (id(place.block), place.unit, checkpointed, reached, item, place.gives, after_freed)
            if key not in known:
                around = self._around(place, config, mode, reached=reached, item=item)
                run = layer_run(place.block, mode, around)
                layer = _layer(run, self.shapes, checkpointed, config.checkpoint_offload, after_freed)
                given = place.gives * layer.output_item * self.shapes.of(place.unit)
                known[key] = replace(layer, waits=layer.waits + given)
            layers.append(known[key])
            item = known[key].output_item
        self.layers = tuple(layers)
        self.before = 0 if places(model)[0].index == 0 else 1

    def _around(self, place: Place, config: TrainingConfig, mode: LayerMode, *, reached: bool, item: int) -> Situation:
        """Returns what surrounds the layer of a place."""
        batch = config.micro_batch_size
        around = situation(place.block, mode, batch=batch, input_needs_grad=reached, input_item=item)
        pairs = f"{place.rows}*{place.rows}"
        return (
            replace(
                around,
                unit=place.unit,
                mask_unit=f"B*{pairs}" if mode.mask else pairs,
                source_unit=place.source_unit or place.unit,
                source_width=place.source_width,
            )
            if _is_given_more(place.block)
            else replace(around, unit=place.unit, mask_unit=f"B*{pairs}" if mode.mask else pairs)
        )

    def below(self, index: int) -> tuple[int, int, int, int]:
        """Returns what the layers below one leave: activations, checkpoints, cached and kept weight copies."""
        kept = checkpoints = cached = casts = 0
        for layer in self.layers[:index]:
            if layer.checkpointed:
                checkpoints += layer.waits
            else:
                kept += layer.waits
            cached += layer.cached_casts
            casts += layer.kept_casts
        return kept, checkpoints, cached, casts

    def gradients_from(self, index: int) -> int:
        """Returns the weight gradients of a layer and all above it."""
        return sum(layer.gradients for layer in self.layers[index:])

    def highest_forward(self) -> int:
        """Returns the layer in whose forward most is alive."""
        best, at, base = -1, 0, 0
        for index, layer in enumerate(self.layers):
            if base + layer.forward_bytes > best:
                best, at = base + layer.forward_bytes, index
            base += layer.waits + layer.cached_casts
        return at

    def pattern(self) -> int:
        """Returns how many layers at each end stand for all: those of one pattern, or half where none repeats."""
        layers = [id(layer) for layer in self.layers[self.before + 1 :]]
        half = max(1, len(self.layers) // 2)
        for length in range(1, half):
            if layers[length:] == layers[:-length]:
                return length + self.before
        return half

    def lowest_backward(self) -> int:
        """Returns the layer at the lower end in whose backward most is alive."""
        totals = self.backward_totals()
        return max(range(self.pattern()), key=lambda index: (totals[index], -index))

    def backward_totals(self) -> list[int]:
        """Returns for each layer what is alive at the peak of its backward, gradients of layers above included."""
        base, above, totals = 0, self.gradients_from(0), []
        for layer in self.layers:
            above -= layer.gradients
            totals.append(base + layer.backward_bytes + above)
            base += layer.waits + layer.kept_casts
        return totals


def activation_entries(model: ModelFacts, config: TrainingConfig, facts: LedgerFacts) -> list[Entry]:
    """Returns everything that forward and backward hold beside weights, gradients and states.

    Assumes: layers run one after another; backward frees what a layer kept as its nodes are done with it.
    Source: the programs of the architecture files, run with the rules of torch's autograd, autocast and checkpointing.
    """
    mode = layer_mode(config)
    pile = Pile(model, config, mode)
    bill = Bill(f"B {config.micro_batch_size}, T {mode.length}" + (f", r {mode.rank}" if mode.rank else ""))
    _forward(bill, pile, model, config, mode)
    _loss(bill, pile, model, config, mode, facts)
    _backward(bill, pile)
    _embedding(bill, model, config, mode)
    _embedding_output(bill, pile, model, config, mode)
    _tables(bill, pile, model, config, mode)
    if config.eval_batch_size:
        _evaluation(bill, model, config, mode, facts)
    return bill.entries()


def _running(bill: Bill, name: str, peaks: Peaks, at: Sum, shapes: Shapes, moment: Moment, source: str) -> None:
    """Books what is alive at the peak of one run, an entry for each account."""
    for account, size in at.by_account(shapes).items():
        bill.add(
            name + _SUFFIXES[account],
            _ACCOUNTS[account],
            size,
            moment,
            lambda account=account: peaks.describe(at, account),  # type: ignore[misc]
            source,
        )


def _waiting(bill: Bill, pile: Pile, index: int, moment: Moment, *, forward: bool) -> None:
    """Books what the layers below one leave for backward."""
    kept, checkpoints, cached, casts = pile.below(index)
    layers = pile.layers[:index]
    bill.add("layer-activations", Account.ACTIVATIONS, kept, moment, lambda: _summed(layers, False), _SOURCE)
    bill.add("layer-checkpoints", Account.ACTIVATIONS, checkpoints, moment, lambda: _summed(layers, True), _CHECKPOINT)
    name, size = ("autocast-weight-cache", cached) if forward else ("autocast-saved-weights", casts)
    bill.add(
        name,
        Account.PARAMETERS,
        size,
        moment,
        lambda: f"16-bit copies of trained weights, {len(layers)} layers",
        _CASTS,
    )


def _summed(layers: tuple[Layer, ...], checkpointed: bool) -> str:
    """Returns the sum of size x count as text, equal sizes together."""
    counts: dict[int, int] = {}
    for layer in layers:
        if layer.checkpointed is checkpointed:
            counts[layer.waits] = counts.get(layer.waits, 0) + 1
    return " + ".join(f"{size} B x {count} layers" for size, count in counts.items())


def _forward(bill: Bill, pile: Pile, model: ModelFacts, config: TrainingConfig, mode: LayerMode) -> None:
    at = pile.highest_forward()
    layer = pile.layers[at]
    _waiting(bill, pile, at, Moment.FORWARD, forward=True)
    _running(bill, "forward-working-set", layer.forward, layer.forward_sum, pile.shapes, Moment.FORWARD, _SOURCE)


def _embedding_output(bill: Bill, pile: Pile, model: ModelFacts, config: TrainingConfig, mode: LayerMode) -> None:
    """Books what the embedding gives where no layer keeps it: the model's forward holds it as long as it runs.

    With adapters and checkpointing it is a leaf that needs a gradient, which its accumulation node holds until the
    step's backward reaches it; so it stays beside the checkpoints wherever the first layer reads something made of it.
    Source: transformers modeling_utils.py enable_input_require_grads; torch/csrc/autograd/functions/accumulate_grad.h.
    """
    lowest = pile.layers[0]
    leaf = not mode.trains and bool(config.checkpoint_every)
    replaced = not lowest.keeps_input or (model.embedding_dropout and lowest.checkpointed)
    size = mode.types.stream * model.hidden_size * config.micro_batch_tokens
    text = f"{mode.types.stream} B x hidden {model.hidden_size} x {config.micro_batch_tokens} tokens"
    moments = [Moment.FORWARD] if replaced and (leaf or pile.highest_forward()) else []
    if replaced and leaf:
        moments += [Moment.LOSS, Moment.BACKWARD_FIRST_LAYER, Moment.BACKWARD_LAST_LAYER, Moment.BACKWARD_EMBEDDING]
    for moment in moments:
        bill.add("embedding-output", Account.ACTIVATIONS, size, moment, lambda: text, _SOURCE)


def _loss(
    bill: Bill, pile: Pile, model: ModelFacts, config: TrainingConfig, mode: LayerMode, facts: LedgerFacts
) -> None:
    top = len(pile.layers) - 1
    highest = pile.layers[top]
    _waiting(bill, pile, top, Moment.LOSS, forward=False)
    bill.add(
        "highest-layer-activations",
        Account.ACTIVATIONS,
        highest.waits,
        Moment.LOSS,
        lambda: "what the layer next to the head keeps",
        _CHECKPOINT if highest.checkpointed else _SOURCE,
    )
    casts = sum(layer.kept_casts for layer in pile.layers)
    cached = sum(layer.cached_casts for layer in pile.layers)
    chunked = config.loss is LossHead.CHUNKED
    tail = tail_run(model, mode, chunked=chunked, tile=(facts.loss_tile_tokens, facts.loss_tile_vocab))
    forward, backward = tail.forward.largest(pile.shapes), tail.backward.largest(pile.shapes)
    in_forward = cached + forward.bytes(pile.shapes) > casts + backward.bytes(pile.shapes)
    more = (cached if in_forward else casts) - (casts - highest.kept_casts)
    text = "until the forward ends" if in_forward else "of the layer next to the head"
    bill.add(
        "autocast-loss-copies",
        Account.PARAMETERS,
        more,
        Moment.LOSS,
        lambda: f"16-bit copies of weights {text}",
        _CASTS,
    )
    if facts.stack != MEMC_STACK and not chunked:
        _final_norm(bill, model, config, mode)
        return
    peaks, at = (tail.forward, forward) if in_forward else (tail.backward, backward)
    _running(bill, "loss", peaks, at, pile.shapes, Moment.LOSS, "transformers loss_utils.py, trl chunked_logprob.py")


def _final_norm(bill: Bill, model: ModelFacts, config: TrainingConfig, mode: LayerMode) -> None:
    """Books what the norm before the head keeps, for losses that have entries of their own."""
    size = (4 + (mode.types.stream if mode.trains else 0)) * model.hidden_size * config.micro_batch_tokens
    text = f"fp32 input{' and normalised rows' if mode.trains else ''} of the norm before the head"
    bill.add("final-norm", Account.ACTIVATIONS, size, Moment.LOSS, lambda: text, _SOURCE)


def _backward(bill: Bill, pile: Pile) -> None:
    """Books the backward of the layer where most is alive, at the upper and at the lower end of the layers.

    What is alive changes by the same amount from one run of a pattern of layers to the next, so that one of the ends
    has the most. The static part of the bill holds no layer's weight gradients at the first of these moments, and all
    but those of the lowest layer at the second.
    """
    totals = pile.backward_totals()
    ends = pile.pattern()
    upper = max(range(len(totals) - ends + pile.before, len(totals)), key=lambda index: (totals[index], index))
    layer = pile.layers[upper]
    _waiting(bill, pile, upper, Moment.BACKWARD_FIRST_LAYER, forward=False)
    _running(
        bill,
        "backward-working-set-highest-layer",
        layer.backward,
        layer.backward_sum,
        pile.shapes,
        Moment.BACKWARD_FIRST_LAYER,
        _CHECKPOINT if layer.checkpointed else _SOURCE,
    )
    bill.add(
        "gradients-of-layers-above",
        Account.GRADIENTS,
        pile.gradients_from(upper + 1),
        Moment.BACKWARD_FIRST_LAYER,
        lambda: f"weight gradients of {len(totals) - 1 - upper} layers",
        _SOURCE,
    )
    lower = pile.lowest_backward()
    layer = pile.layers[lower]
    _running(
        bill,
        "backward-working-set-lowest-layer",
        layer.backward,
        layer.backward_sum,
        pile.shapes,
        Moment.BACKWARD_LAST_LAYER,
        _CHECKPOINT if layer.checkpointed else _SOURCE,
    )
    if lower:
        waits = sum(below.waits + below.kept_casts for below in pile.layers[:lower])
        counted = sum(between.gradients for between in pile.layers[pile.before + 1 : lower + 1])
        bill.add(
            "layers-below-less-their-gradients",
            Account.ACTIVATIONS,
            waits - counted,
            Moment.BACKWARD_LAST_LAYER,
            lambda: f"{waits} B that {lower} layers still keep - {counted} B of weight gradients not there yet",
            _SOURCE,
        )


def _embedding(bill: Bill, model: ModelFacts, config: TrainingConfig, mode: LayerMode) -> None:
    """Books the gradient of the stream when it reaches the embedding, and the kernel that sums it up by token."""
    if not mode.trains:
        return
    tokens, hidden, stream = config.micro_batch_tokens, model.hidden_size, mode.types.stream
    moment = Moment.BACKWARD_EMBEDDING
    bill.add(
        "residual-stream-gradient",
        Account.ACTIVATIONS,
        stream * hidden * tokens,
        moment,
        lambda: f"{stream} B x hidden {hidden} x {tokens} tokens",
        _SOURCE,
    )
    rows = tokens // 10 + min(tokens, model.vocab_size)
    kernel = 40 * tokens + 4 * hidden * rows if tokens > _EMBEDDING_SORTS_ABOVE_TOKENS else 0
    bill.add(
        "embedding-backward-kernel",
        Account.WORKSPACE,
        kernel,
        moment,
        lambda: f"40 B x {tokens} tokens + 4 B x hidden {hidden} x {rows} partial sums",
        "torch EmbeddingBackwardKernel.cu",
    )


def _tables(bill: Bill, pile: Pile, model: ModelFacts, config: TrainingConfig, mode: LayerMode) -> None:
    """Books what the model makes once for all layers: rotary tables, the attention mask, and the batch itself."""
    attention = model.groups[0].block.attention
    stream, length = mode.types.stream, mode.length
    whole_step = (
        Moment.FORWARD,
        Moment.LOSS,
        Moment.BACKWARD_FIRST_LAYER,
        Moment.BACKWARD_LAST_LAYER,
    )
    rotary = 2 * stream * attention.head_dim * length if attention.rotary else 0
    blocks = _blocks(model)
    every = config.checkpoint_every
    later = _mask(blocks[::every], config, mode) if every else (0, "")
    last = _mask(blocks[: pile.lowest_backward() + 1 : every], config, mode) if every else (0, "")
    masks = {Moment.FORWARD: _mask(blocks, config, mode), Moment.BACKWARD_LAST_LAYER: last}
    columns = 3 if config.padding_mask else 2
    biases = _shared_biases(model, mode, pile.shapes)
    for moment in whole_step:
        bill.add(
            "shared-attention-biases",
            Account.ACTIVATIONS,
            biases,
            moment,
            lambda: f"one number of {mode.types.compute} B per head and pair of positions, for each kind of attention",
            _SOURCE,
        )
        bill.add(
            "rotary-tables",
            Account.ACTIVATIONS,
            rotary,
            moment,
            lambda: f"cos and sin: 2 x {stream} B x {attention.head_dim} x {length} positions",
            _SOURCE,
        )
        mask, text = masks.get(moment, later)
        bill.add("attention-mask", Account.ACTIVATIONS, mask, moment, text.strip, _SOURCE)
    if model.embedding_dropout and (mode.trains or config.checkpoint_every):
        for moment in (*whole_step, Moment.BACKWARD_EMBEDDING):
            bill.add(
                "embedding-dropout-mask",
                Account.ACTIVATIONS,
                model.hidden_size * config.micro_batch_tokens,
                moment,
                lambda: f"1 B x hidden {model.hidden_size} x {config.micro_batch_tokens} tokens",
                _SOURCE,
            )
    for moment in (*whole_step, Moment.BACKWARD_EMBEDDING, Moment.STEP):
        bill.add(
            "batch",
            Account.ACTIVATIONS,
            columns * _BATCH_BYTES * config.micro_batch_tokens,
            moment,
            lambda: f"{columns} x {_BATCH_BYTES} B x {config.micro_batch_tokens} tokens: ids, labels, padding mask",
            "transformers data collator",
        )


def _shared_biases(model: ModelFacts, mode: LayerMode, shapes: Shapes) -> int:
    """Returns the attention biases that the first layer of a stack makes for all of them."""
    sizes = {}
    for place in places(model):
        heads, rows = place.block.attention.heads, shapes.of(place.rows)
        if "position_bias" in place.block.forward:
            sizes["own", place.unit, place.block.attention.causal] = heads * rows * rows
        if "cross_bias" in place.block.forward:
            columns = shapes.of(place.source_unit.removeprefix("B*"))
            sizes["cross", place.unit, True] = heads * rows * columns
    return mode.types.compute * sum(sizes.values())


def _mask(blocks: tuple[Block, ...], config: TrainingConfig, mode: LayerMode) -> tuple[int, str]:
    """Returns the masks that a model hands to layers: one for each kind of attention that needs one.

    They live until the layers have run; those of checkpointed layers wait for the recomputation.
    """
    windows = {block.attention.sliding_window for block in blocks}
    cut = {window for window in windows if window is not None and mode.length >= window}
    eager = config.attention is Attention.EAGER
    if config.attention is Attention.FLASH_ATTENTION_2:
        return 0, ""
    kinds = len(windows) if eager or mode.mask else len(cut)
    size = mode.types.stream if eager else 1
    samples = config.micro_batch_size if mode.mask else 1
    text = f"{kinds} x {size} B x {samples} samples x {mode.length} x {mode.length} pairs of tokens"
    return kinds * size * samples * mode.length * mode.length, text


def _evaluation(bill: Bill, model: ModelFacts, config: TrainingConfig, mode: LayerMode, facts: LedgerFacts) -> None:
    """Books a forward without gradients: the largest layer, or the head and the loss."""
    shapes = shapes_of(mode, config.eval_batch_size)
    moment, best, casts = Moment.EVALUATE, None, 0
    for block in dict.fromkeys(map(id, _blocks(model))):
        own = next(one for one in _blocks(model) if id(one) == block)
        run = layer_run(own, mode, situation(own, mode, batch=config.eval_batch_size))
        count = sum(1 for one in _blocks(model) if one is own)
        casts += run.cached_casts.bytes(shapes) * count
        at = run.evaluated.largest(shapes)
        if best is None or at.bytes(shapes) > best[1].bytes(shapes):
            best = (run.evaluated, at)
    chunked = config.loss is LossHead.CHUNKED
    tail = tail_run(model, mode, chunked=chunked, tile=(facts.loss_tile_tokens, facts.loss_tile_vocab))
    loss = tail.evaluated.largest(shapes)
    assert best is not None
    if loss.bytes(shapes) > best[1].bytes(shapes):
        best = (tail.evaluated, loss)
    bill.add(
        "evaluation-weight-copies",
        Account.PARAMETERS,
        casts,
        moment,
        lambda: "16-bit copies of trained weights",
        _CASTS,
    )
    _running(bill, "evaluation-working-set", best[0], best[1], shapes, moment, _SOURCE)
