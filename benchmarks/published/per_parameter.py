"""A replay of steps under FSDP2, which gathers and reduces parameter by parameter, a group of them at a time.

Source: torch 2.13.0 distributed/fsdp/_fully_shard: _fsdp_param_group.py unshard, wait_for_unshard, pre_backward,
    post_backward; _fsdp_collectives.py foreach_all_gather, foreach_reduce; _fsdp_state.py _root_post_forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memc.ledger.blockrun import LayerMode
from memc.units import ceil_div

from published.caching import Block
from published.replay import Kept, Replay

_GATHER, _REDUCE = 1, 2


@dataclass
class _Group:
    """Parameters that are gathered and reduced together.

    Attributes:
        sizes: Bytes of each in the compute type.
        whole: The gathered parameters, while they are.
        buffer: The all-gather's output, until they are copied out of it.
    """

    sizes: Sequence[int]
    whole: Sequence[Block] = ()
    buffer: Block | None = None


class PerParameterReplay(Replay):
    """Steps of FSDP2 on the simulated allocator.

    The all-gather's output, and the copy of this rank's shards in the compute type that goes into it, come from the
    stream of copies; gathered parameters, their gradients and the reduction's input from the compute stream; reduced
    gradients from the reduction's. An output is held in forward until the next group's has been waited for, in backward
    until it is copied out. A reduction's input is held until the next group's is asked for.
    """

    def _start(self) -> None:
        super()._start()
        model, compute = self.model, self.types.compute
        tail = [
            compute * model.final_norm.params,
            compute * (model.embedding_params if model.tied else model.head_params),
        ]
        self.embedding = _Group([] if model.tied else [compute * model.embedding_params])
        self.tail = _Group(tail)
        self.groups = [_Group(self._layer_tensors(block, compute)) for block in self.layers]
        self.waiting: Block | None = None
        self.reducing: Block | None = None
        self.of_group: list[Block] = []

    def _layer_mode(self) -> LayerMode:
        """Returns the mode of layers, whose gradients are whole until they are reduced."""
        return replace(super()._layer_mode(), gradients_stay=True)

    def step(self) -> None:
        """Replays forward, loss, backward and the optimizer once."""
        if self.model.tied:
            self._gather_in_forward(self.tail)
        self._gather_in_forward(self.embedding)
        stream = self._take(self._stream_bytes)
        self._reshard(self.embedding)
        kept: list[Kept] = []
        for index, block in enumerate(self.layers):
            self._gather_in_forward(self.groups[index])
            layer, stream = self._forward(index, block, stream)
            kept.append(layer)
            if self.reshards:
                self._reshard(self.groups[index])
        if not self.model.tied:
            self._gather_in_forward(self.tail)
        gradient = self._loss(stream)
        self._reduce_group(self.tail)
        for index in reversed(range(len(self.layers))):
            self._wait(self.groups[index])
            if index:
                self._begin(self.groups[index - 1])
            else:
                self._begin(self.embedding)
            gradient = self._backward(self.layers[index], kept[index], gradient)
            self._reduce_group(self.groups[index])
        self._wait(self.embedding)
        self.of_group += [self._take(size) for size in self.embedding.sizes]
        self._free(gradient)
        self._reduce_group(self.embedding)
        self._give_up_reducing()
        self._optimize()

    @property
    def reshards(self) -> bool:
        """Whether layers are given up after forward."""
        return self.config.fsdp is None or self.config.fsdp.reshard_after_forward

    # -- moments of the loss -------------------------------------------------------------------------------------------

    def _logits_made(self) -> None:
        """The model's forward has ended: what it still holds of the last all-gather goes."""
        self._give_up_waiting()

    def _logits_gradient_made(self) -> None:
        """Backward of the model begins: the last layer is gathered ahead."""
        self._begin(self.groups[-1])

    def _head_gradient_made(self) -> None:
        """The head's and the final norm's gradients are made."""
        self.of_group += [self._take(size) for size in self.tail.sizes]

    # -- gathering and reducing ----------------------------------------------------------------------------------------

    def _begin(self, group: _Group) -> None:
        """Starts the all-gather of a group that is neither whole nor under way."""
        if group.whole or group.buffer is not None or not group.sizes:
            return
        shards = None
        if self.types.stored != self.types.compute:
            shards = self._take(ceil_div(sum(group.sizes), self.ranks), _GATHER)
        group.buffer = self._take(sum(group.sizes), _GATHER)
        if shards is not None:
            self._free(shards)

    def _wait(self, group: _Group) -> None:
        """Copies a group's parameters out of the all-gather's output, which goes."""
        if group.buffer is not None:
            group.whole = [self._take(size) for size in group.sizes]
            self._free(group.buffer)
            group.buffer = None

    def _gather_in_forward(self, group: _Group) -> None:
        """Gathers a group and waits for it; the output stays in the place of the one before."""
        self._begin(group)
        if group.buffer is None:
            return
        self._give_up_waiting()
        group.whole = [self._take(size) for size in group.sizes]
        self.waiting, group.buffer = group.buffer, None

    def _give_up_waiting(self) -> None:
        if self.waiting is not None:
            self._free(self.waiting)
        self.waiting = None

    def _reshard(self, group: _Group) -> None:
        self._drop(group.whole)
        group.whole = ()

    def _reduce_group(self, group: _Group) -> None:
        """Gives up a group's parameters and reduces its gradients to this rank's shards of them."""
        made, self.of_group = self.of_group, []
        self._reshard(group)
        self._give_up_reducing()
        if not group.sizes or not made:
            return
        fsdp = self.config.fsdp
        elements = sum(group.sizes) // self.types.compute
        item = 4 if fsdp is not None and fsdp.reduce_fp32 else self.types.compute
        self.reducing = self._take(item * elements)
        self._drop(made)
        share = ceil_div(elements, self.ranks)
        reduced = self._take(item * share, _REDUCE)
        if item != self.types.stored:
            narrow, reduced = reduced, self._take(self.types.stored * share, _REDUCE)
            self._free(narrow)
        if self.config.offload_optimizer.value != "none":
            self._free(reduced)
        else:
            self.gradients.append(reduced)

    def _give_up_reducing(self) -> None:
        if self.reducing is not None:
            self._free(self.reducing)
        self.reducing = None

    def _weight_gradient(self, made: Block) -> None:
        """Takes in a gradient that a layer's backward leaves."""
        self.of_group.append(made)
