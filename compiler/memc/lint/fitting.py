"""What files say of a model that it does not have: layer classes, modules, buffers that its tensors do not fit."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from functools import cache

from memc.errors import MemcError
from memc.facts.documents import nearest, read_spec, spec_keys
from memc.facts.records import Linear, ModelFacts
from memc.lint.agreement import shown
from memc.lint.context import Context
from memc.lint.records import Place, Remark, Stated, Weight
from memc.lint.settings import table
from memc.lint.world import processes
from memc.units import GIB, format_gib

_HALF_BYTES = 2
_PARTS = ("MoeBlock", "MoE", "Moe", "MLP", "Mlp", "Attention", "Experts", "Embedding", "Embeddings")


def fitting_remarks(context: Context) -> Iterator[Remark]:
    """Yields remarks on names and sizes that do not fit the model."""
    yield from _wrap_classes(context)
    yield from _adapter_modules(context)
    yield from _buffers(context)


def _wrap_classes(context: Context) -> Iterator[Remark]:
    """Yields a remark for each class that FSDP is to wrap and that the model does not have."""
    model = context.model
    for stated in context.statements.all("wrap_class"):
        names = stated.value if isinstance(stated.value, list) else str(stated.value).split(",")
        for name in (str(item).strip() for item in names):
            if not name:
                continue
            if model is not None:
                if name in _classes(model):
                    continue
                message = (
                    f"{model.key} has no layer of class {name}: its layers are {', '.join(sorted(_classes(model)))}"
                )
                hint = f"write {', '.join(sorted(_main_classes(model)))}"
            else:
                known = _all_classes()
                folded = next((other for other in known if other.casefold() == name.casefold() and other != name), None)
                if folded is None or name in known:
                    continue
                message = (
                    f"no layer is called {name}: classes are told apart by case, and the one that is known is {folded}"
                )
                hint = f"write {folded}"
            inner = model is not None and _inside_a_layer(name, model)
            yield Remark(
                code="no-such-layer-class",
                weight=Weight.WARNING if inner else Weight.ERROR,
                message=message,
                hint=hint,
                place=stated.place,
                others=_model_place(context),
            )


def _classes(model: ModelFacts) -> frozenset[str]:
    stacks = (model.groups, *(stack.groups for stack in model.other_stacks))
    return frozenset(group.block.layer_class for groups in stacks for group in groups if group.block.layer_class)


def _inside_a_layer(name: str, model: ModelFacts) -> bool:
    """Whether a class is called like a part of the model's layers: FSDP can wrap those too, if they are there."""
    families = {re.sub(r"(Text|Vision)?(Decoder|Encoder)?(Layer|Block)$", "", known) for known in _classes(model)}
    return name.endswith(_PARTS) and any(family and name.startswith(family) for family in families)


def _main_classes(model: ModelFacts) -> frozenset[str]:
    return frozenset(group.block.layer_class for group in model.groups)


@cache
def _all_classes() -> frozenset[str]:
    """Returns the layer classes of all described families."""
    found = []
    for key in spec_keys("architectures"):
        try:
            record = read_spec("architectures", key)
        except MemcError:
            continue
        stacks = [record, *(record.get("stacks") or ())] if isinstance(record.get("stacks"), list) else [record]
        found += [str(stack["layer_class"]) for stack in stacks if isinstance(stack, dict) and "layer_class" in stack]
    return frozenset(found)


def _adapter_modules(context: Context) -> Iterator[Remark]:
    """Yields a remark for each adapter target that the model has no linear of."""
    model = context.model
    if model is None:
        return
    linears = frozenset(linear.name for linear in _linears(model))
    tables = frozenset({"lm_head", "embed_tokens", "wte", "score", "classifier"})
    for name in ("target_modules",):
        for stated in context.statements.all(name):
            asked = stated.value if isinstance(stated.value, list) else _listed(str(stated.value))
            wrong = [
                item
                for item in map(str, asked)
                if item.rpartition(".")[2] not in linears | tables and item not in ("all-linear", "all")
            ]
            if not wrong or not _plain(wrong):
                continue
            guess = nearest(wrong[0], linears, count=1)
            message = (
                f"{model.key} has no linear module {', '.join(wrong[:3])}; it has {', '.join(sorted(linears)[:12])}"
            )
            hint = f"write {guess[0]}" if guess else "write all-linear, or names from this list"
            weight = Weight.ERROR if len(wrong) == len(asked) else Weight.WARNING
            yield Remark(
                code="no-such-module",
                weight=weight,
                message=message,
                hint=hint,
                place=stated.place,
                others=_model_place(context),
            )


def _linears(model: ModelFacts) -> Iterator[Linear]:
    for groups in (model.groups, *(stack.groups for stack in model.other_stacks)):
        for group in groups:
            yield from group.block.linears
    for stack in model.other_stacks:
        yield from stack.linears
    yield from model.outer_linears


def _listed(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _plain(names: Iterable[str]) -> bool:
    """Whether names are names and no patterns."""
    return all(set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.") for name in names)


def _buffers(context: Context) -> Iterator[Remark]:
    """Yields remarks on NVMe buffers: smaller than a tensor that passes through them, or more than host memory."""
    statements, model = context.statements, context.model
    if str(statements.value("offload_param")).lower() != "nvme":
        return
    size = statements.first("nvme_buffer_elements")
    default = context_default(context, "buffer_size")
    elements = size.value if size is not None else default
    place = size or statements.first("offload_param")
    if place is None or not isinstance(elements, int | float):
        return
    if model is not None:
        yield from _too_small(context, model, place, int(elements))
    count = statements.value("nvme_buffers") or context_default(context, "buffer_count") or 0
    pinned = int(elements * count * _HALF_BYTES)
    if pinned >= 16 * GIB:
        message = (
            f"{shown(count)} buffers of {int(elements):,} elements pin {format_gib(pinned)} of host memory per process"
        )
        yield Remark(
            code="nvme-buffers-pinned",
            weight=Weight.WARNING,
            message=message,
            hint="lower buffer_size to the largest tensor of the model",
            place=place.place,
        )


def _too_small(context: Context, model: ModelFacts, place: Stated, elements: int) -> Iterator[Remark]:
    largest = largest_tensor_elements(model)
    world = processes(context)
    ranks = world.value if world is not None else context.given.gpus_per_node or 1
    shard = math.ceil(largest / ranks)
    if elements >= shard:
        return
    of = f", {shard:,} on each of {ranks} GPUs" if ranks > 1 else ""
    message = (
        f"buffer_size is {elements:,} elements, and the largest tensor of {model.key} has {largest:,}{of}: "
        "it does not pass through the buffer"
    )
    yield Remark(
        code="nvme-buffer-too-small",
        weight=Weight.ERROR,
        message=message,
        hint=f"write buffer_size: {shard}",
        place=place.place,
        others=_model_place(context),
    )


def largest_tensor_elements(model: ModelFacts) -> int:
    """Returns the elements of the model's largest single weight."""
    rows = model.vocab_size * model.hidden_size if model.embedding_params else 0
    tensors = [
        tensor.params
        for groups in (model.groups, *(stack.groups for stack in model.other_stacks))
        for group in groups
        for tensor in group.block.tensors
    ]
    return max([rows, model.head_params, *(linear.weight_params for linear in _linears(model)), *tensors], default=0)


def context_default(context: Context, name: str) -> int | float | None:
    """Returns the default of a setting of `offload_param` in the DeepSpeed that counts."""
    value = table("deepspeed-offload-param").default(name, context.versions["deepspeed"].text)
    return value if isinstance(value, int | float) else None


def _model_place(context: Context) -> tuple[Place, ...]:
    stated = context.statements.first("model")
    return (stated.place,) if stated is not None else ()
