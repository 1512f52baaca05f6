"""From the record of a shallow first step to the record of two steps at full depth, by copying what repeats."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby

from memc.trace.records import Block, Event, Owner, Part, Recording, Region, Stage
from memc.trace.stacks import StackDepth, Window


def placed(record: Recording) -> Recording:
    """Returns the record with host tensors left out and with what runs outside layers told apart.

    Below all layers, between stacks, above all layers: which it is shows only when a stage is over. What happens
    between two layers of a stack, such as the release of the older one's input, counts with the first of them.
    """
    events = [event for event in record.events if record.owners.get(event.block) is not Owner.HOST]
    moved: list[Event] = []
    blocks = list(record.blocks)
    for stage_index, group in groupby(events, key=lambda event: event.stage_index):
        stage = record.stages[stage_index]
        if stage not in (Stage.FORWARD, Stage.BACKWARD):
            moved += group
            continue
        for event in _placed_stage(stage, list(group)):
            moved.append(event)
            if event.delta > 0 and blocks[event.block].region is not event.region:
                blocks[event.block] = _at(blocks[event.block], event.region)
    return Recording(blocks, moved, record.stages, record.owners, record.lists)


def _placed_stage(stage: Stage, events: list[Event]) -> list[Event]:
    in_layers = [index for index, event in enumerate(events) if event.region.part is Part.LAYER]
    if not in_layers:
        return events
    before, after = (Part.BELOW, Part.ABOVE) if stage is Stage.FORWARD else (Part.ABOVE, Part.BELOW)
    moved = [event._replace(region=Region(before)) for event in events[: in_layers[0]]]
    for index, following in zip(in_layers, [*in_layers[1:], len(events)], strict=True):
        here = events[index].region
        last = following == len(events)
        same_stack = not last and events[following].region.stack == here.stack
        gap = here if same_stack else Region(after if last else Part.BETWEEN)
        moved.append(events[index])
        moved += [event._replace(region=gap) for event in events[index + 1 : following]]
    return moved


def _at(block: Block, region: Region) -> Block:
    return Block(block.size_bytes, block.operator, block.stage_index, region, block.module)


def repeated_in_time(record: Recording, gradients: Sequence[int | None], stand_ins: Sequence[int | None]) -> Recording:
    """Returns the record with the first step's forward and backward once more, in place of the stand-in gradients.

    The second step does what the first did, except that the optimizer has its states: that part has been run.
    """
    cut = record.stages.index(Stage.STAND_IN)
    first = [index for index, stage in enumerate(record.stages[:cut]) if stage in (Stage.FORWARD, Stage.BACKWARD)]
    stages = [*record.stages[:cut], *(record.stages[index] for index in first), Stage.STEP]
    blocks, owners = list(record.blocks), dict(record.owners)
    again = {stage_index: cut + place for place, stage_index in enumerate(first)}
    copies: dict[int, int] = {}
    replayed: list[Event] = []
    for block, delta, stage_index, region, module in record.events:
        if stage_index not in again:
            continue
        if delta > 0:
            copies[block] = _copied(blocks, owners, block, again[stage_index])
        replayed.append(Event(copies.get(block, block), delta, again[stage_index], region, module))
    stood_for = {
        stand_in: copies[real]
        for stand_in, real in zip(stand_ins, gradients, strict=True)
        if stand_in is not None and real is not None
    }
    before = [event for event in record.events if event.stage_index < cut]
    after = [
        event._replace(block=stood_for.get(event.block, event.block), stage_index=len(stages) - 1)
        for event in record.events
        if event.stage_index > cut
    ]
    for block in {event.block for event in after if event.delta > 0}:
        blocks[block] = replace_stage(blocks[block], len(stages) - 1)
    return Recording(blocks, [*before, *replayed, *after], stages, owners, record.lists)


def replace_stage(block: Block, stage_index: int) -> Block:
    """Returns the block as one that was made in another stage."""
    return Block(block.size_bytes, block.operator, stage_index, block.region, block.module)


def _copied(blocks: list[Block], owners: dict[int, Owner], block: int, stage_index: int | None = None) -> int:
    made = blocks[block]
    blocks.append(made if stage_index is None else replace_stage(made, stage_index))
    if block in owners:
        owners[len(blocks) - 1] = owners[block]
    return len(blocks) - 1


def whole_depth(record: Recording, stack: StackDepth) -> Recording:
    """Returns the record of a model with all layers of a stack, of which a shallow one was run.

    What the window's layers do is copied for each layer that they stand for. Where one of them touches a block of
    the layer next to the window, the copy touches the block that has the same place among those of its own neighbour.

    Raises:
        NotPeriodicError: When the layers of the window do not repeat those around it.
    """
    if stack.window is None:
        return record
    return _Splice(record, stack, stack.window).run()


class NotPeriodicError(ValueError):
    """Layers that look alike do not do the same."""


class _Splice:
    """One stack's window, its copies, and the events that become of it."""

    def __init__(self, record: Recording, stack: StackDepth, window: Window) -> None:
        self._record, self._stack, self._window = record, stack, window
        self._end = window.first + window.period
        self._blocks, self._owners = list(record.blocks), dict(record.owners)
        self._layers = [self._layer(block.region) for block in record.blocks]
        self._by_layer: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._rank: dict[int, int] = {}
        self._copies: list[dict[int, int]] = [{} for _ in range(window.copies + 1)]
        self._regions: dict[int, Region] = {}
        for event in record.events:
            layer = self._layers[event.block]
            if event.delta > 0 and layer >= 0:
                made = self._by_layer[record.blocks[event.block].stage_index, layer]
                self._rank[event.block] = len(made)
                made.append(event.block)

    def run(self) -> Recording:
        """Returns the record at full depth."""
        lists = self._resized_lists()
        inside = [block for block in self._rank if self._inside(self._layers[block])]
        for copy in range(1, self._window.copies + 1):
            for block in inside:
                self._copies[copy][block] = self._copied(block, copy)
        events: list[Event] = []
        passed: set[tuple[str, int]] = set()
        for kind, group in groupby(self._record.events, key=self._kind):
            if kind[0] == "inside" and kind in passed:
                raise NotPeriodicError(f"the layers of {self._stack.name} do not run one after the other")
            passed.add(kind)
            if kind[0] == "once":
                events += [self._seen_from_outside(event) for event in group]
            else:
                events += self._repeated(kind, list(group))
        for block, made in enumerate(self._record.blocks):
            if self._layers[block] >= self._end:
                self._blocks[block] = _at(made, self._moved(made.region))
        _check(events)
        return Recording(self._blocks, events, self._record.stages, self._owners, lists)

    def _layer(self, region: Region) -> int:
        """Returns the index of a layer of this stack; -1 for everything else."""
        return region.layer if region.stack == self._stack.name else -1

    def _inside(self, layer: int) -> bool:
        return self._window.first <= layer < self._end

    def _moved(self, region: Region, copy: int = 0) -> Region:
        """Returns the region at full depth: of a copy of the window, or of what stands above all of them."""
        layer = self._layer(region)
        if layer < self._window.first:
            return region
        moved = layer + (copy * self._window.period if layer < self._end else self._window.added_layers)
        if moved not in self._regions:
            self._regions[moved] = Region(Part.LAYER, moved, region.stack)
        return self._regions[moved]

    def _copied(self, block: int, copy: int) -> int:
        made = self._record.blocks[block]
        new = _copied(self._blocks, self._owners, block)
        self._blocks[new] = _at(made, self._moved(made.region, copy))
        return new

    def _kind(self, event: Event) -> tuple[str, int]:
        """Returns which events are copied together: a pass through the window, or a run over its blocks elsewhere."""
        in_step = self._record.stages[event.stage_index] is Stage.STEP
        if self._inside(self._layer(event.region)) and not in_step:
            return "inside", event.stage_index
        layer = self._layers[event.block]
        if self._inside(layer) and (in_step or self._refers_to_all(event, layer)):
            return "all", event.stage_index
        return "once", event.stage_index

    def _refers_to_all(self, event: Event, layer: int) -> bool:
        """Returns whether an event outside the window that touches one of its blocks stands for one of each copy."""
        at = self._layer(event.region)
        return at < 0 or abs(at - layer) > self._window.period

    def _seen_from_outside(self, event: Event) -> Event:
        """Returns an event beside the window: below it, it touches the first copy, above it, the last."""
        block, at = event.block, self._layer(event.region)
        if at < self._window.first:
            return event
        if at >= self._end and self._inside(self._layers[block]):
            block = self._copies[self._window.copies][block]
        return Event(block, event.delta, event.stage_index, self._moved(event.region), event.module)

    def _repeated(self, kind: tuple[str, int], group: list[Event]) -> Iterator[Event]:
        """Yields the events of a run once for every copy of the window, in the order in which the copies run.

        What all copies use, and one of them releases, the last one to run releases.
        """
        order = range(self._window.copies + 1)
        if self._record.stages[kind[1]] is Stage.BACKWARD:
            order = order[::-1]
        touched = [self._touched(event) for event in group]
        for copy in order:
            moved = {region: self._moved(region, copy) for region in {event.region for event in group}}
            for (block, delta, stage_index, region, module), block_of in zip(group, touched, strict=True):
                if block_of is not None:
                    yield Event(block_of[copy], delta, stage_index, moved[region], module)
                elif copy == order[-1]:
                    yield Event(block, delta, stage_index, moved[region], module)

    def _touched(self, event: Event) -> list[int] | None:
        """Returns the block that an event in the window touches in each copy; None for one that they share."""
        block, window = event.block, self._window
        layer = self._layers[block]
        if self._inside(layer):
            return [block, *(self._copies[copy][block] for copy in range(1, window.copies + 1))]
        if layer == window.first - 1:
            twin = self._twin(block, self._end - 1)
            return [block, twin, *(self._copies[copy][twin] for copy in range(1, window.copies))]
        if layer == self._end:
            twin = self._twin(block, window.first)
            return [*(self._copies[copy][twin] for copy in range(1, window.copies + 1)), block]
        return None

    def _twin(self, block: int, layer: int) -> int:
        """Returns the block of another layer that has the same place in the same stage.

        Raises:
            NotPeriodicError: When there is none, or it has another size.
        """
        made = self._record.blocks[block]
        others = self._by_layer[made.stage_index, layer]
        rank = self._rank[block]
        if rank >= len(others) or self._record.blocks[others[rank]].size_bytes != made.size_bytes:
            raise NotPeriodicError(f"layers {made.region.layer} and {layer} of {self._stack.name} differ")
        return others[rank]

    def _resized_lists(self) -> dict[int, Counter[Region]]:
        """Lets what the optimizer makes of a list of tensors grow with the list. Returns the lists at full depth."""
        lists = {}
        for block, places in self._record.lists.items():
            grown: Counter[Region] = Counter()
            for region, count in places.items():
                copies = self._window.copies if self._inside(self._layer(region)) else 0
                for copy in range(copies + 1):
                    grown[self._moved(region, copy)] += count
            made = self._record.blocks[block]
            if self._layers[block] < 0 and places:
                made.size_bytes = made.size_bytes * grown.total() // places.total()
            lists[block] = grown
        return lists


def _check(events: list[Event]) -> None:
    """Raises NotPeriodicError when a block is released that is not there, or made twice."""
    alive: dict[int, int] = {}
    for event in events:
        left = alive[event.block] = alive.get(event.block, 0) + event.delta
        if left not in (0, 1):
            raise NotPeriodicError("a copied layer releases what is not there")
