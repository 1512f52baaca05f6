"""Activations on one GPU at each moment of the step: every layer's run, stacked as the step stacks them."""

from __future__ import annotations

from dataclasses import dataclass

from memc.config import LossHead, TrainingConfig
from memc.facts.records import Block, ModelFacts, Sees
from memc.ledger.bill import Bill
from memc.ledger.blockrun import LayerMode, made_item, tail_run
from memc.ledger.constants import MEMC_STACK, LedgerFacts
from memc.ledger.course import Stretch, course_of
from memc.ledger.entries import Account, Entry, Moment
from memc.ledger.image_held import returned_entry, tower_bytes
from memc.ledger.image_shapes import image_entries, image_shapes, running
from memc.ledger.layer import layer_mode, saved_per_token, shapes_of
from memc.ledger.masks import SOURCE as MASKS_SOURCE
from memc.ledger.masks import attention_masks
from memc.ledger.peaks import Peaks, Shapes, Sum
from memc.ledger.places import places, unit_of
from memc.ledger.reference import SOURCE as REFERENCE_SOURCE
from memc.ledger.reference import frozen_forward, reference_mode, runs_reference
from memc.ledger.shared import SOURCE as SHARED_SOURCE
from memc.ledger.shared import outputs_that_stay, shared_tensors
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

__all__ = ["LayerGroup", "activation_bill", "activation_entries", "layer_groups", "saved_per_token", "waiting_bytes"]


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
        input_not_kept: Bytes of its input where it is not.
        cached_casts: Weight copies that live until the forward ends.
        kept_casts: Weight copies that live until its backward.
        gradients: Weight gradients that stay.
        forward, forward_sum: Its forward, and the largest sum of that.
        backward, backward_sum: Its backward, and the largest sum of that.
    """

    checkpointed: bool
    waits: int
    keeps_input: bool
    input_not_kept: int
    cached_casts: int
    kept_casts: int
    gradients: int
    forward: Peaks
    forward_sum: Sum
    forward_bytes: int
    backward: Peaks
    backward_sum: Sum
    backward_bytes: int


def _layer(stretch: Stretch, shapes: Shapes, offloaded: bool) -> Layer:
    run, checkpointed = stretch.run, stretch.checkpointed
    forward = run.forward_freed if checkpointed else run.forward_after_freed if stretch.after_freed else run.forward
    backward = run.recomputed if checkpointed else run.backward
    forward_sum, backward_sum = forward.largest(shapes), backward.largest(shapes)
    return Layer(
        checkpointed=checkpointed,
        waits=stretch.waits(shapes, offloaded=offloaded),
        keeps_input=checkpointed or run.keeps_input,
        input_not_kept=0 if checkpointed or run.keeps_input else run.input.bytes(shapes),
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


class Pile:
    """All layers of a model, bottom first, with the sums that the moments of a step need.

    Attributes:
        layers: The layers.
        shapes: Shape variables of a micro batch.
        shared: Biases and outputs that layers of a stack share.
        masks: Masks that they share.
        staying: Outputs of layers that the model holds until all have run.
        returned: What the model returns of images beside the loss, which lives until that has been computed.
        before: Entries at the bottom that are no layers.
        output_items: Bytes of one element of what the last layer gives, and of what another stack has given it.
    """

    def __init__(self, model: ModelFacts, config: TrainingConfig, mode: LayerMode) -> None:
        self.shapes = shapes_of(mode, config.micro_batch_sequences, image_shapes(model, config))
        course, every = course_of(model, config, mode, self.shapes), config.checkpoint_every
        self._distinct = [_layer(stretch, self.shapes, config.checkpoint_offload) for stretch in course.stretches]
        self._order = course.order
        given = [stretch.run.output_item for stretch in course.stretches if stretch.gives]
        self.output_items = (course.stretches[course.order[-1]].run.output_item, (given or [mode.types.stream])[-1])
        self.layers = tuple([self._distinct[number] for number in course.order])
        self.returned = tower_bytes(model, config, mode, self.shapes, *course.tower)
        self.shared = shared_tensors(
            model, mode, course.held, self.shapes, checkpointing=bool(every), given_item=self.output_items[1]
        )
        self.masks = attention_masks(model, mode, self.shapes, every)
        self.staying = outputs_that_stay(model, [layer.input_not_kept for layer in self.layers])
        self._beside = (*self.shared, *self.masks, *self.staying)
        self._backward_totals: list[int] = []
        self._highest_forward = self._pattern = -1
        self.before = 0 if places(model)[0].index == 0 else 1

    def _counted(self, order: tuple[int, ...]) -> list[tuple[int, Layer]]:
        """Returns how many layers of each stretch are among some."""
        return [(order.count(number), layer) for number, layer in enumerate(self._distinct)]

    def below(self, index: int) -> tuple[int, int, int, int]:
        """Returns what the layers below one leave: activations, checkpoints, cached and kept weight copies."""
        kept = checkpoints = cached = casts = 0
        for count, layer in self._counted(self._order[:index]):
            if layer.checkpointed:
                checkpoints += count * layer.waits
            else:
                kept += count * layer.waits
            cached += count * layer.cached_casts
            casts += count * layer.kept_casts
        return kept, checkpoints, cached, casts

    def gradients_from(self, index: int) -> int:
        """Returns the weight gradients of a layer and all above it."""
        return sum([count * layer.gradients for count, layer in self._counted(self._order[index:])])

    def casts(self) -> tuple[int, int]:
        """Returns the weight copies of all layers that live until the forward ends, and until their backward."""
        counted = self._counted(self._order)
        cached = sum([count * layer.cached_casts for count, layer in counted])
        return cached, sum([count * layer.kept_casts for count, layer in counted])

    def highest_forward(self) -> int:
        """Returns the layer in whose forward most is alive."""
        if self._highest_forward < 0:
            steps = [(layer.forward_bytes, layer.waits + layer.cached_casts) for layer in self._distinct]
            base, sizes = 0, []
            for number in self._order:
                size, left = steps[number]
                sizes.append(base + size)
                base += left
            if self._beside:
                sizes = [
                    size + sum([one.in_forward(index) for one in self._beside]) for index, size in enumerate(sizes)
                ]
            self._highest_forward = sizes.index(max(sizes))
        return self._highest_forward

    def shared_in_backward(self, at: int) -> int:
        """Returns what layers share, and its gradients, while a layer runs backward."""
        return sum([one.in_backward(at) + one.gradient_at(at) for one in self._beside]) if self._beside else 0

    def pattern(self) -> int:
        """Returns how many layers at the lower end stand for all: those of one pattern, or half where none repeats."""
        if self._pattern < 0:
            layers, half = self._order[self.before + 1 :], max(1, len(self.layers) // 2)
            repeats = (length for length in range(1, half) if layers[length:] == layers[:-length])
            length = next(repeats, None)
            self._pattern = half if length is None else length + self.before
        return self._pattern

    def lowest_backward(self) -> int:
        """Returns the layer at the lower end in whose backward most is alive."""
        totals = self.backward_totals()
        return max(range(self.pattern()), key=lambda index: (totals[index], -index))

    def upper_backward(self) -> int:
        """Returns the layer at the upper end in whose backward most is alive."""
        totals = self.backward_totals()
        ends = self.pattern()
        first = ends if ends == max(1, len(totals) // 2) else len(totals) - ends + self.before
        return max(range(first, len(totals)), key=lambda index: (totals[index], index), default=len(totals) - 1)

    def backward_totals(self) -> list[int]:
        """Returns for each layer what is alive at the peak of its backward, gradients of layers above included."""
        if not self._backward_totals:
            # of each stretch: what it adds to layers above it, and its own peak without its gradients
            steps = [(one.waits + one.kept_casts - one.gradients, one.backward_bytes) for one in self._distinct]
            own = [backward - layer.gradients for (_, backward), layer in zip(steps, self._distinct, strict=True)]
            base, totals = self.gradients_from(0), []
            for number in self._order:
                totals.append(base + own[number])
                base += steps[number][0]
            if self._beside:
                totals = [total + self.shared_in_backward(at) for at, total in enumerate(totals)]
            self._backward_totals = totals
        return self._backward_totals


def activation_entries(model: ModelFacts, config: TrainingConfig, facts: LedgerFacts) -> list[Entry]:
    """Returns the entries of `activation_bill`."""
    return activation_bill(model, config, facts).entries()


def waiting_bytes(model: ModelFacts, config: TrainingConfig) -> int:
    """Returns what all layers leave for backward: a lower bound of the activations at the loss, in bytes.

    Source: that of `activation_bill`, which books it at that moment beside what head and loss need.
    """
    mode, model = layer_mode(config), running(model, config)
    shapes = shapes_of(mode, config.micro_batch_sequences, image_shapes(model, config))
    course = course_of(model, config, mode, shapes)
    waits = [stretch.waits(shapes, offloaded=config.checkpoint_offload) for stretch in course.stretches]
    return sum([course.order.count(number) * size for number, size in enumerate(waits)])


def activation_bill(model: ModelFacts, config: TrainingConfig, facts: LedgerFacts) -> Bill:
    """Returns everything that forward and backward hold beside weights, gradients and states.

    Assumes: layers run one after another; backward frees what a layer kept as its nodes are done with it.
    Source: the programs of the architecture files, run with the rules of torch's autograd, autocast and checkpointing.
    """
    mode, model = layer_mode(config), running(model, config)
    pile = Pile(model, config, mode)
    bill = Bill(f"B {config.micro_batch_sequences}, T {mode.length}" + (f", r {mode.rank}" if mode.rank else ""))
    _forward(bill, pile, model, config, mode)
    _loss(bill, pile, model, config, mode, facts)
    _backward(bill, pile)
    _embedding(bill, model, config, mode)
    _embedding_output(bill, pile, model, config, mode)
    _tables(bill, pile, model, config, mode)
    image_entries(bill, model, config, mode.types.weight)
    if config.eval_batch_size:
        _evaluation(bill, model, config, mode, facts)
    return bill


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
    """Books what the embedding gives where no layer keeps it.

    The model's forward holds what its first layer is given as long as it runs. With adapters and checkpointing what the
    embedding gives is a leaf that needs a gradient, which its accumulation node holds until the step's backward reaches
    it; so it stays beside the checkpoints wherever the first layer reads something made of it.
    Source: transformers modeling_utils.py enable_input_require_grads; torch/csrc/autograd/functions/accumulate_grad.h.
    """
    lowest, first = pile.layers[0], pile.layers[pile.before]
    dropped = model.embedding_dropout and lowest.checkpointed
    leaf = not mode.trains and bool(config.checkpoint_every) and (dropped or not lowest.keeps_input)
    if not leaf:
        size = first.input_not_kept
        text = f"{size} B that the first layer is given"
        if dropped:
            size, text = _embedded(pile, model, mode, 1)
        if pile.highest_forward() > pile.before:
            bill.add("embedding-output", Account.ACTIVATIONS, size, Moment.FORWARD, lambda: text, _SOURCE)
        return
    texts = sum(stack.sees in (Sees.TEXT, Sees.SOURCE) for stack in model.stacks)
    size, text = _embedded(pile, model, mode, 1 if model.sees is Sees.IMAGE else texts)
    for moment in (
        Moment.FORWARD,
        Moment.LOSS,
        Moment.BACKWARD_FIRST_LAYER,
        Moment.BACKWARD_LAST_LAYER,
        Moment.BACKWARD_EMBEDDING,
    ):
        bill.add("embedding-output", Account.ACTIVATIONS, size, moment, lambda: text, _SOURCE)


def _embedded(pile: Pile, model: ModelFacts, mode: LayerMode, stacks: int) -> tuple[int, str]:
    """Returns the bytes that the embeddings of some stacks give, and how they come about."""
    positions, item = pile.shapes.of(unit_of(model.stacks[-1])), mode.types.stream
    text = f"{stacks} x {item} B x hidden {model.hidden_size} x {positions} positions"
    return stacks * item * model.hidden_size * positions, text


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
    cached, casts = pile.casts()
    chunked = config.loss is LossHead.CHUNKED
    tile = (facts.loss_tile_tokens, facts.loss_tile_vocab)
    tail = tail_run(model, mode, chunked=chunked, tile=tile, items=pile.output_items)
    runs = ((tail.backward, casts), (tail.returned, casts), (tail.forward, cached))
    highest_of = [(peaks, peaks.largest(pile.shapes), copies) for peaks, copies in runs]
    totals = [
        at.bytes(pile.shapes) + copies + (0 if peaks is tail.backward else pile.returned)
        for peaks, at, copies in highest_of
    ]
    peaks, at, copies = highest_of[totals.index(max(totals))]
    in_forward = peaks is not tail.backward
    if runs_reference(config):
        most = max(at.bytes(pile.shapes) + copies for _, at, copies in highest_of)
        if _reference(bill, pile, model, config, mode, facts, tail.kept.bytes(pile.shapes), most):
            return
    more = copies - (casts - highest.kept_casts)
    text = "until the forward ends" if peaks is tail.forward else "of the layer next to the head"
    bill.add(
        "autocast-loss-copies",
        Account.PARAMETERS,
        more,
        Moment.LOSS,
        lambda: f"16-bit copies of weights {text}",
        _CASTS,
    )
    returned_entry(bill, pile.returned, Moment.LOSS if in_forward else Moment.FORWARD)
    if facts.stack != MEMC_STACK and not chunked:
        _final_norm(bill, model, config, mode)
        return
    _running(bill, "loss", peaks, at, pile.shapes, Moment.LOSS, "transformers loss_utils.py, trl chunked_logprob.py")


def _reference(
    bill: Bill,
    pile: Pile,
    model: ModelFacts,
    config: TrainingConfig,
    mode: LayerMode,
    facts: LedgerFacts,
    kept: int,
    most: int,
) -> bool:
    """Books the reference's forward beside all that the model keeps, where that is more than the loss itself takes.

    Args:
        kept: Bytes that head and loss keep for backward.
        most: Bytes at the peak of head and loss, all weight copies included.
    """
    stream, tokens = mode.types.stream, config.micro_batch_tokens
    rotary = rotary_tables(model, mode)[0]
    mask = sum(one.size for one in pile.masks)
    inputs = rotary + mask + stream * model.hidden_size * tokens
    frozen = reference_mode(mode)
    run = frozen_forward(model, config, frozen, facts, config.micro_batch_sequences, inputs)
    casts = sum(layer.kept_casts for layer in pile.layers)
    if casts + kept + run.at.bytes(pile.shapes) + run.inputs <= most:
        return False
    moment, copies = Moment.LOSS, pile.layers[-1].kept_casts
    said = "16-bit copies of weights of the layer next to the head"
    bill.add("autocast-loss-copies", Account.PARAMETERS, copies, moment, lambda: said, _CASTS)
    text = "what head and loss keep while the reference runs"
    bill.add("loss-kept", Account.ACTIVATIONS, kept, moment, lambda: text, REFERENCE_SOURCE)
    bill.add(
        "reference-inputs",
        Account.ACTIVATIONS,
        run.inputs,
        moment,
        lambda: f"{rotary} B rotary tables + {mask} B mask + {stream} B x hidden {model.hidden_size} x {tokens} tokens",
        REFERENCE_SOURCE,
    )
    _running(bill, "reference-working-set", run.peaks, run.at, pile.shapes, moment, REFERENCE_SOURCE)
    return True


def _final_norm(bill: Bill, model: ModelFacts, config: TrainingConfig, mode: LayerMode) -> None:
    """Books what the norm before the head keeps, for losses that have entries of their own."""
    stream, tokens = mode.types.stream, config.micro_batch_tokens
    size = (4 + (stream if mode.trains else 0)) * model.hidden_size * tokens
    text = f"fp32 input{' and normalised rows' if mode.trains else ''} of the norm before the head"
    if model.final_norm.kind == "layer" and not mode.types.autocast:
        size, text = stream * model.hidden_size * tokens, f"{stream} B input of the layer norm before the head"
    bill.add("final-norm", Account.ACTIVATIONS, size, Moment.LOSS, lambda: text, _SOURCE)


def _backward(bill: Bill, pile: Pile) -> None:
    """Books the backward of the layer where most is alive, at the upper and at the lower end of the layers.

    What is alive changes by the same amount from one run of a pattern of layers to the next, so that one of the ends
    has the most. The static part of the bill holds no layer's weight gradients at the first of these moments, and all
    but those of the lowest layer at the second.
    """
    totals = pile.backward_totals()
    upper = pile.upper_backward()
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


def _tokens(model: ModelFacts, config: TrainingConfig) -> int:
    """Returns the tokens of a micro batch; 0 for a model that sees nothing but images."""
    return 0 if model.sees is Sees.IMAGE else config.micro_batch_tokens


def _embedding(bill: Bill, model: ModelFacts, config: TrainingConfig, mode: LayerMode) -> None:
    """Books the gradient of the stream when it reaches the embedding, and the kernel that sums it up by token."""
    if not (mode.trains or mode.embedding_trains):
        return
    tokens, hidden, stream = _tokens(model, config), model.hidden_size, mode.types.stream
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


def rotary_tables(model: ModelFacts, mode: LayerMode) -> tuple[int, str]:
    """Returns the bytes of the rotary tables of the main stack, and how they come about."""
    block, length = model.groups[0].block, mode.length
    attention = block.attention
    if not attention.rotary:
        return 0, ""
    item, width = made_item(attention, mode), dict(block.sizes).get("rotary_dim", attention.head_dim)
    kinds = f"{attention.rotary_kinds} x " if attention.rotary_kinds > 1 else ""
    size = 2 * attention.rotary_kinds * item * width * length
    return size, f"{kinds}cos and sin: 2 x {item} B x {width} x {length} positions"


def _tables(bill: Bill, pile: Pile, model: ModelFacts, config: TrainingConfig, mode: LayerMode) -> None:
    """Books what the model makes once for all layers: rotary tables, the attention mask, and the batch itself."""
    rotary, rotary_text = rotary_tables(model, mode)
    whole_step = (
        Moment.FORWARD,
        Moment.LOSS,
        Moment.BACKWARD_FIRST_LAYER,
        Moment.BACKWARD_LAST_LAYER,
    )
    columns, tokens = 3 if config.padding_mask else 2, _tokens(model, config)
    _shared(bill, pile)
    for moment in whole_step:
        bill.add(
            "rotary-tables",
            Account.ACTIVATIONS,
            rotary,
            moment,
            lambda: rotary_text,
            _SOURCE,
        )
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
            columns * _BATCH_BYTES * tokens,
            moment,
            lambda: f"{columns} x {_BATCH_BYTES} B x {tokens} tokens: ids, labels, padding mask",
            "transformers data collator",
        )


def _shared(bill: Bill, pile: Pile) -> None:
    """Books what the layers of a stack share, and its gradients."""
    for moment, at in (
        (Moment.FORWARD, pile.highest_forward()),
        (Moment.LOSS, len(pile.layers)),
        (Moment.BACKWARD_FIRST_LAYER, pile.upper_backward()),
        (Moment.BACKWARD_LAST_LAYER, pile.lowest_backward()),
        (Moment.BACKWARD_EMBEDDING, -1),
    ):
        forward = moment in (Moment.FORWARD, Moment.LOSS)
        for name, among, source in (
            ("attention-mask", pile.masks, MASKS_SOURCE),
            ("shared-attention-biases", pile.shared, SHARED_SOURCE),
            ("outputs-of-layers-below", pile.staying, SHARED_SOURCE),
        ):
            sizes = [(one.in_forward(at) if forward else one.in_backward(at), one.name) for one in among]
            bill.add(name, Account.ACTIVATIONS, sum(size for size, _ in sizes), moment, _parts(sizes).strip, source)
        sizes = [(0 if forward else one.gradient_at(at), f"gradient of {one.name}") for one in pile.shared]
        size = sum(size for size, _ in sizes)
        bill.add("shared-gradients", Account.ACTIVATIONS, size, moment, _parts(sizes).strip, SHARED_SOURCE)


def _parts(sizes: list[tuple[int, str]]) -> str:
    return " + ".join(f"{size} B {name}" for size, name in sizes if size)


def _evaluation(bill: Bill, model: ModelFacts, config: TrainingConfig, mode: LayerMode, facts: LedgerFacts) -> None:
    """Books a forward without gradients: the largest layer, or the head and the loss."""
    shapes = shapes_of(mode, config.eval_batch_sequences, image_shapes(model, config))
    moment, run = Moment.EVALUATE, frozen_forward(model, config, mode, facts, config.eval_batch_sequences)
    bill.add(
        "evaluation-weight-copies",
        Account.PARAMETERS,
        run.casts,
        moment,
        lambda: "16-bit copies of trained weights",
        _CASTS,
    )
    _running(bill, "evaluation-working-set", run.peaks, run.at, shapes, moment, _SOURCE)
