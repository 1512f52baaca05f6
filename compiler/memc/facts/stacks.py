"""Stacks of a model: a config read with the descriptions of its family and of the families it is composed of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from memc.facts.architectures import Names, load_architecture, read_names
from memc.facts.blocks import build_groups, build_linears, build_norm, build_norms, build_side_block, build_tensors
from memc.facts.records import Block, BlockGroup, Norm, NormKind, Patches, Sees, Stack


@dataclass(frozen=True, kw_only=True)
class Described:
    """A config, or a part of one, with the description of its family.

    Attributes:
        architecture: The description.
        names: What its names stand for.
        config: The config that they were read from.
        parts: The parts that it is composed of, by name; empty for most families.
    """

    architecture: Mapping[str, Any]
    names: Names
    config: Mapping[str, Any]
    parts: Mapping[str, Described]

    @property
    def main(self) -> Described:
        """The part whose layers are the main stack: itself, or the one that the description names."""
        return self.parts[self.architecture["main"]] if "main" in self.architecture else self


def describe(config: Mapping[str, Any], model_type: str, *, file: str) -> Described:
    """Returns a config with the description of its family.

    Args:
        config: The parsed config.json, or the part of one.
        model_type: The family.
        file: Path for errors.

    Raises:
        MemcError: As `memc.facts.load_model`.
    """
    architecture = load_architecture(model_type)
    parts = {name: _part(rule, config, file=file) for name, rule in architecture.get("parts", {}).items()}
    names = read_names(architecture, config, file=file, parts={name: part.names for name, part in parts.items()})
    return Described(architecture=architecture, names=names, config=config, parts=parts)


def _part(rule: Mapping[str, Any], config: Mapping[str, Any], *, file: str) -> Described:
    """Returns a part of a composed config: what stands under its key, or the whole config where it may be flat."""
    nested = config.get(rule["config"])
    part = nested if isinstance(nested, dict) else config if rule.get("may_be_flat") else {}
    stated = str(part.get("model_type", rule["model_type"]))
    model_type = rule["model_type"] if stated in rule.get("also_called", ()) else stated
    return describe(part, model_type, file=file)


def main_stack(described: Described) -> Stack:
    """Returns the stack that ends in the head, with what the composed model has outside it."""
    main = described.main
    stack = _stack(main.architecture, main.names, main.config, name="", sees=main.architecture.get("sees", "text"))
    if main is described:
        return stack
    linears, tensors, norms = _outside(described.architecture, described.names)
    return Stack(
        name="",
        sees=stack.sees,
        hidden_size=stack.hidden_size,
        groups=_masked(stack.groups) if described.architecture.get("masked") else stack.groups,
        embedding_params=stack.embedding_params,
        embedding_norms=stack.embedding_norms,
        final_norm=stack.final_norm,
        linears=(*stack.linears, *linears),
        tensors=(*stack.tensors, *tensors),
        norms=(*stack.norms, *norms),
        before=_merging(described, main) or stack.before,
    )


def _masked(groups: tuple[BlockGroup, ...]) -> tuple[BlockGroup, ...]:
    """Returns layers that are given a mask whatever the batch is."""

    def with_mask(block: Block) -> Block:
        return replace(block, attention=replace(block.attention, always_masked=True))

    return tuple(replace(group, block=with_mask(group.block)) for group in groups)


def _merging(described: Described, main: Described) -> Block | None:
    """Returns what a composed model does to the embedded text, as a block with what it has outside its parts."""
    description = described.architecture
    groups = build_groups(main.architecture, main.names, main.config)
    norms = build_norms(description.get("outer_norms", ()), described.names)
    return build_side_block(description, "before", described.names, groups, norms)


def other_stacks(described: Described) -> tuple[Stack, ...]:
    """Returns the stacks beside the main one, in the order of the description."""
    found = []
    for entry in described.architecture.get("stacks", ()):
        if "part" in entry:
            part = described.parts[entry["part"]]
            text = entry.get("text_positions", 0)
            stack = _stack(
                part.architecture,
                part.names,
                part.config,
                name=entry["name"],
                sees=part.architecture.get("sees", "text"),
                text_positions=None if text is None else described.names.size(text),
                unused_layers=described.names.size(entry.get("unused_layers", 0)),
            )
        else:
            stack = _stack(entry, described.names, described.config, name=entry["name"], sees=entry["sees"])
        found.append(stack)
    return tuple(found)


def _stack(
    description: Mapping[str, Any],
    names: Names,
    config: Mapping[str, Any],
    *,
    name: str,
    sees: str,
    text_positions: int | None = 0,
    unused_layers: int = 0,
) -> Stack:
    positions = description.get("positions")
    hidden = names.size(description.get("hidden", "hidden"))
    linears, tensors, norms = _outside(description, names)
    groups = build_groups(description, names, config)
    embedding_norms = build_norms(description.get("embedding_norms", ()), names)
    final_norm = _final_norm(description.get("final_norm"), names, hidden)
    return Stack(
        name=name,
        sees=Sees(sees),
        hidden_size=hidden,
        groups=groups,
        embedding_params=names.size(description.get("embedding", 0)),
        embedding_norms=embedding_norms,
        final_norm=final_norm,
        linears=linears,
        tensors=tensors,
        norms=norms,
        positions_per_item=None if positions is None else names.size(positions),
        text_positions_per_item=text_positions,
        input_elements=names.size(description.get("input_elements", 0)),
        patches=_patches(description.get("patches"), names),
        unused_layers=unused_layers,
        before=build_side_block(description, "before", names, groups, embedding_norms),
        after=build_side_block(description, "after", names, groups, (final_norm, *norms)),
    )


def _patches(section: Mapping[str, Any] | None, names: Names) -> Patches | None:
    if section is None:
        return None
    return Patches(
        side=names.size(section["side"]),
        merge=names.size(section["merge"]),
        window=names.size(section.get("window", 0)),
        most_pixels=names.size(section["most_pixels"]),
    )


def _outside(description: Mapping[str, Any], names: Names) -> tuple[Any, Any, Any]:
    """Returns linears, tensors and norms outside the layers."""
    return (
        build_linears(description.get("outer_linears", ()), names),
        build_tensors(description.get("outer_tensors", ()), names),
        build_norms(description.get("outer_norms", ()), names),
    )


def _final_norm(entry: Mapping[str, Any] | None, names: Names, hidden: int) -> Norm:
    if entry is None or not names.holds(entry, {}):
        return Norm(name="", kind=NormKind.NONE, size=hidden, rows=1, params=0, feeds="")
    return build_norm(entry, names)
