"""One record as a workload of the clock: what it computes, how it is spread, what its figure is."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from memc.clock.constants import ClockFacts, clock_facts
from memc.clock.schedule import Elements
from memc.clock.workload import AdamKind, Compute, Kernels, Layout, Sharding, adam_bytes
from memc.config import Precision
from memc.facts import ModelFacts

from timed.machines import MachineOf, machine_of
from timed.models import model_of
from timed.reading import UnreadableError, number, text, whole
from timed.words import (
    Parallel,
    Shards,
    attention_of,
    fused_loss,
    kernels_of,
    offload_of,
    parallel_of,
    recompute_of,
    shards_of,
)

_LORA_RANK = 16
_HOPPER = (9, 0)
_QUANTIZED_BYTES = 0.5 + 4 / 64
_METHODS = {"full": "full", "pretrain": "full", "lora": "lora", "qlora": "qlora"}


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A record that can be compared.

    Attributes:
        model: Its model.
        compute, layout, elements: Its workload.
        facts: Rates of its machine.
        measured_seconds: Its step, or of one micro-batch where only a rate is printed.
        tokens: Tokens per GPU in that time.
        card: Its card's key.
        notes: What was assumed.
    """

    model: ModelFacts
    compute: Compute
    layout: Layout
    elements: Elements
    facts: ClockFacts
    measured_seconds: float
    tokens: float
    card: str
    notes: tuple[str, ...]


def timed(record: dict[str, Any]) -> Timed:
    """Returns a record as a workload.

    Raises:
        UnreadableError: With the reason when the record does not say what was computed or is not like what memc times.
    """
    method = _METHODS.get(text(record.get("method")).casefold())
    if method is None:
        raise UnreadableError(f"method {text(record.get('method'))!r} is not one that memc writes")
    machine = machine_of(record)
    parallel = parallel_of(text(record.get("parallelism")))
    if re.search(r"\bep[2-9]|-ep[2-9]", text(record.get("fused"))):
        raise UnreadableError("expert parallelism")
    ranks = machine.gpus_per_node * machine.nodes
    shared = parallel.tensor * parallel.stages * parallel.context
    if ranks % shared:
        raise UnreadableError("degrees of parallelism do not divide the GPUs")
    model, inferred = model_of(record)
    batch = _batch(record, ranks // shared, shared, parallel.stages)
    notes = [*machine.notes, *batch.notes, *([inferred] if inferred else [])]
    precision = _precision(text(record.get("dtype")))
    shards = shards_of(text(record.get("sharding")), several=ranks // shared > 1)
    elements = _elements(record, model, method, parallel)
    recent = (machine.gpu.compute_capability or (0, 0)) >= _HOPPER
    compute, more = _compute(record, model, method, batch, parallel, precision, shards, recent=recent)
    layout = _layout(record, method, machine, parallel, batch, precision, shards)
    compute, still = _checkpointed(record, model, compute, layout, elements, machine)
    facts = _facts(machine, precision, ranks)
    _refuse_impossible(model, compute, batch, machine, shared)
    return Timed(
        model=model,
        compute=compute,
        layout=layout,
        elements=elements,
        facts=facts,
        measured_seconds=batch.seconds,
        tokens=batch.tokens_per_gpu / shared,
        card=machine.gpu.key,
        notes=(*notes, *more, *still),
    )


class ImpossibleError(UnreadableError):
    """A record prints more than its card can do."""


def _refuse_impossible(model: ModelFacts, compute: Compute, batch: _Batch, machine: MachineOf, shared: int) -> None:
    """Refuses a record whose layers alone need more operations per second than the datasheet's peak.

    Raises:
        ImpossibleError: When they do.
    """
    peak = machine.gpu.peak_flops_per_second.get(compute.dtype)
    linears = sum(linear.weight_params * count for linear, count in model.linear_modules())
    passes = 3 if compute.trains else 2
    if peak is not None and 2 * passes * linears * batch.tokens_per_gpu / shared / batch.seconds > peak:
        raise ImpossibleError("its rate is above the card's peak")


@dataclass(frozen=True, kw_only=True)
class _Batch:
    samples: int
    length: int
    micro_batches: int
    seconds: float
    tokens_per_gpu: float
    optimizer: bool
    notes: tuple[str, ...]


def _batch(record: dict[str, Any], data_ranks: int, shared: int, stages: int) -> _Batch:
    """Returns batch, length and the measured time; the step's, or that of the passes that a rate speaks of."""
    notes: list[str] = []
    piped = stages > 1
    samples, passes = whole(record.get("micro_batch")), whole(record.get("grad_accum"))
    together = whole(record.get("global_batch"))
    step, rate = number(record.get("step_time_s")), number(record.get("tokens_per_sec_per_gpu"))
    metric = text(record.get("metric")).casefold()
    if step is None and rate is None:
        raise UnreadableError("neither a step time nor a token rate is printed")
    if "optimizer step" in metric:
        raise UnreadableError("time of the optimizer step alone")
    if "micro-iteration" in metric:
        together, passes = None, 1
    if samples is None and together is not None and not piped:
        samples = max(1, together // (data_ranks * (passes or 1)))
        notes.append("micro-batch taken from the global batch")
    if samples is None:
        raise UnreadableError("micro-batch not stated")
    if passes is None and together is not None:
        passes = max(1, round(together / (samples * data_ranks)))
    passes = passes or 1
    if piped and passes < stages and samples >= stages:
        passes, samples = passes * samples, 1
        notes.append("pipeline fed one sample at a time")
    length, printed = whole(record.get("seq_len")), True
    if length is None:
        length, printed = _length(record, samples * passes, step, rate), False
        notes.append("mean length taken from tokens per step")
    tokens = float(samples * passes * length)
    if step is None:
        assert rate is not None
        step = tokens / (rate * shared)
    alone = re.search(
        r"fwd\+bwd\)|forward and backward only|micro-iteration", f"{metric} {text(record.get('value_printed'))}"
    )
    return _Batch(
        samples=samples,
        length=length,
        micro_batches=passes,
        seconds=step,
        tokens_per_gpu=tokens,
        optimizer=not alone,
        notes=tuple(notes) if not printed or len(notes) else (),
    )


def _length(record: dict[str, Any], samples: int, step: float | None, rate: float | None) -> int:
    """Returns the mean tokens of a sample where no length is printed but tokens per step follow.

    Raises:
        UnreadableError: When they do not.
    """
    if step is not None and rate is not None:
        return max(1, round(step * rate / samples))
    said = re.search(r"median about (\d+) tokens", text(record.get("notes")))
    if said is not None:
        return int(said.group(1))
    raise UnreadableError("length not stated")


@dataclass(frozen=True, kw_only=True)
class _Precision:
    products: str
    autocast: bool
    masters: bool


def _precision(words: str) -> _Precision:
    folded = words.casefold()
    if re.search(r"nvfp4|mxfp8|mxfp|int8|int4 train", folded):
        raise UnreadableError(f"products in {words} have no rate in the catalogue")
    mixed = bool(re.search(r"amp|mixed|autocast|fp32 master", folded))
    if re.search(r"fp8|float8", folded):
        return _Precision(products="fp8", autocast=False, masters=True)
    if "bf16" in folded or "bfloat16" in folded:
        return _Precision(products="bf16", autocast=mixed, masters=mixed)
    if "tf32" in folded:
        return _Precision(products="tf32", autocast=False, masters=False)
    if "fp16" in folded or "float16" in folded:
        return _Precision(products="fp16", autocast=mixed, masters=mixed)
    if "fp32" in folded or "float32" in folded:
        return _Precision(products="fp32", autocast=False, masters=False)
    return _Precision(products="", autocast=False, masters=False)


def _compute(
    record: dict[str, Any],
    model: ModelFacts,
    method: str,
    batch: _Batch,
    parallel: Parallel,
    precision: _Precision,
    shards: Shards,
    *,
    recent: bool,
) -> tuple[Compute, list[str]]:
    fused = text(record.get("fused"))
    kernels = kernels_of(fused)
    attention, note = attention_of(
        text(record.get("attention")),
        predates=parallel.tensor * parallel.stages > 1 and not recent,
    )
    notes = [note] if note else []
    dtype = precision.products or "bf16"
    if not precision.products:
        notes.append("16-bit products assumed")
    local = shards.kind in (Sharding.NONE, Sharding.STATES) or not shards.per_layer
    autocast = precision.autocast and local and not shards.masters and method == "full"
    wide = dtype in ("fp32", "tf32") or autocast
    recompute = recompute_of(text(record.get("checkpointing")))
    share, products, again = recompute or (0.0, 1.0, True)
    lora = method != "full"
    targets = frozenset(_targets(record, model)) if lora else frozenset()
    return Compute(
        samples=batch.samples,
        length=max(1, batch.length // parallel.context),
        context=batch.length,
        dtype=dtype,
        stream_bytes=4 if wide or _upcast(record, method) else 2,
        autocast=autocast,
        trains=not lora,
        quantized=method == "qlora",
        rank=_rank(record) if lora else 0,
        adapted=targets,
        adapter_bytes=4 if lora and _adapters_are_fp32(record, kernels) else 2,
        kernels=kernels,
        attention=attention,
        recompute=share,
        recompute_products=products,
        recompute_attention=again,
        fused_loss=fused_loss(fused),
        gathered=shards.kind is Sharding.WEIGHTS,
        tensor_parallel=parallel.tensor,
        stages=parallel.stages,
        experts_apart=not _has_grouped_experts(record),
    ), notes


def _has_grouped_experts(record: dict[str, Any]) -> bool:
    """Whether the versions that a record states run all experts of a layer in one product (transformers from 5 on)."""
    stated = re.search(r"\btransformers\s+(\d+)\.", text(record.get("versions")))
    return stated is not None and int(stated.group(1)) >= 5


def _upcast(record: dict[str, Any], method: str) -> bool:
    """Whether what a 4-bit base leaves unquantised is cast to fp32, as PEFT's preparation does."""
    return method == "qlora" and "baseline" in text(record.get("fused")).casefold()


def _adapters_are_fp32(record: dict[str, Any], kernels: Kernels) -> bool:
    """Whether adapters are fp32 beside a 16-bit base: PEFT's default, unless everything is said to be 16 bits."""
    dtype = text(record.get("dtype")).casefold()
    return "autocast" in dtype or (kernels is Kernels.EAGER and "true" not in dtype)


def _rank(record: dict[str, Any]) -> int:
    said = re.search(r"\br(?:ank)?[ =-]?(\d+)", text(record.get("notes")), re.IGNORECASE)
    return int(said.group(1)) if said is not None else _LORA_RANK


def _targets(record: dict[str, Any], model: ModelFacts) -> tuple[str, ...]:
    """Returns the adapted linears: those that the notes name, else queries and values, else all."""
    notes = text(record.get("notes")).casefold()
    names = model.linear_names()
    said = re.search(r"on ((?:[qkvo],)+[qkvo])\b", notes)
    if said is not None:
        letters = said.group(1).split(",")
        found = tuple(name for name in names if name[:1] in letters and name.endswith("_proj") and len(name) == 6)
        if found:
            return found
    if "target-mlp" in notes:
        found = tuple(name for name in names if name.startswith(("gate", "up", "down")))
        if found:
            return found
    attention = tuple(name for name in names if name in ("q_proj", "v_proj", "query_key_value", "c_attn", "qkv_proj"))
    return attention or names


def _elements(record: dict[str, Any], model: ModelFacts, method: str, parallel: Parallel) -> Elements:
    share = parallel.tensor * parallel.stages
    total = model.total_params // share
    if method == "full":
        return Elements(total=total, quantized=0, adapters=0, trainable=total)
    targets, rank = frozenset(_targets(record, model)), _rank(record)
    adapters = sum(
        rank * (linear.in_features + linear.out_features) * count
        for linear, count in model.linear_modules()
        if linear.name in targets
    )
    linears = sum(linear.weight_params * count for linear, count in model.linear_modules() if linear.quantized)
    quantized = linears // share if method == "qlora" else 0
    return Elements(total=total, quantized=quantized, adapters=adapters, trainable=adapters)


def _layout(
    record: dict[str, Any],
    method: str,
    machine: MachineOf,
    parallel: Parallel,
    batch: _Batch,
    precision: _Precision,
    shards: Shards,
) -> Layout:
    states, weights, activations = offload_of(text(record.get("offload")))
    model_ranks = parallel.tensor * parallel.stages
    ranks = machine.gpus_per_node * machine.nodes // model_ranks
    per_node = max(1, machine.gpus_per_node // parallel.tensor)
    whole_ranks = 1 if shards.kind is Sharding.NONE else min(ranks, per_node) if shards.within_node else ranks
    optimizer = text(record.get("optimizer")).casefold()
    kind = AdamKind.EIGHT_BIT if "8-bit" in optimizer or "8bit" in optimizer else AdamKind.FUSED
    if kind is AdamKind.FUSED and not re.search(r"fused|lamb|backward|cpu", optimizer):
        kind = AdamKind.FOREACH
    products = precision.products or "bf16"
    wide = products in ("fp32", "tf32") or precision.autocast or (shards.per_layer and method == "full")
    weight = 4 if wide else 2
    master = 4 if shards.masters or (precision.masters and not wide) else 0
    gradient = 4 if wide or shards.reduces_fp32 else 2
    state = 4 if wide or master else 2
    if not batch.optimizer:
        moved = 0.0
    elif master:
        moved = adam_bytes(kind, weight=2, gradient=gradient, state=4, master=4)
    else:
        moved = adam_bytes(kind, weight=weight, gradient=gradient, state=state, master=0)
    return Layout(
        micro_batches=batch.micro_batches,
        gpus_per_node=per_node,
        nodes=machine.nodes if ranks >= machine.nodes else max(1, ranks),
        data_ranks=ranks,
        shard_ranks=whole_ranks,
        shards_within_node=shards.within_node,
        sharding=shards.kind,
        gathers_in_forward=shards.per_layer,
        weight_bytes=_QUANTIZED_BYTES if method == "qlora" else 2.0,
        gradient_bytes=4 if shards.reduces_fp32 else 2 if products not in ("fp32", "tf32") else 4,
        reduce_every_pass=shards.kind in (Sharding.GRADIENTS, Sharding.WEIGHTS),
        adam=kind,
        adam_bytes=moved,
        offload_optimizer=states,
        offload_weights=weights,
        offload_activations=activations,
        torch_host_adam=shards.per_layer and not shards.masters,
        context_parallel=parallel.context,
    )


def _checkpointed(
    record: dict[str, Any],
    model: ModelFacts,
    compute: Compute,
    layout: Layout,
    elements: Elements,
    machine: MachineOf,
) -> tuple[Compute, list[str]]:
    """Returns the workload with checkpointing where the record is silent and the activations fit no other way."""
    if recompute_of(text(record.get("checkpointing"))) is not None or machine.gpu.capacity_bytes is None:
        return compute, []
    everything = replace(compute, recompute=1.0, recompute_products=1.0, recompute_attention=True)
    if _counts_recomputing(record, model, compute):
        return everything, ["checkpointing not stated: every layer, for the printed rate counts it"]
    ranks = layout.shard_ranks if layout.sharding is not Sharding.NONE else 1
    states = elements.trainable * 14 / ranks + (elements.total - elements.quantized) * 2 + elements.quantized * 0.56
    if layout.sharding is Sharding.WEIGHTS:
        states /= ranks
    layers = sum(group.count for group in model.groups) / compute.stages
    width = model.hidden_size * (10 + 24 / compute.tensor_parallel)
    alive = min(layout.micro_batches, compute.stages)
    kept = compute.tokens * layers * width * alive + compute.tokens * model.vocab_size / compute.tensor_parallel * 8
    if states + kept <= machine.gpu.capacity_bytes:
        return compute, ["checkpointing not stated: none, for it fits"]
    return everything, ["checkpointing not stated: every layer, for nothing else fits"]


def _counts_recomputing(record: dict[str, Any], model: ModelFacts, compute: Compute) -> bool:
    """Whether the printed operations per second are those of a step that computes the forward twice."""
    printed, rate = number(record.get("tflops_per_gpu_printed")), number(record.get("tokens_per_sec_per_gpu"))
    if printed is None or rate is None:
        return False
    scores = sum(12 * group.block.attention.query_width * compute.context * group.count for group in model.groups)
    return printed * 1e12 / rate > 1.15 * (6 * model.active_params + scores)


def _facts(machine: MachineOf, precision: _Precision, ranks: int) -> ClockFacts:
    products = precision.products
    if not products:
        products = "bf16" if machine.gpu.bf16 else "fp16"
    facts = clock_facts(
        machine.gpu, Precision.BF16, ranks, products=products, power_limit_watts=machine.power_limit_watts
    )
    if machine.network_bytes_per_second is not None:
        facts = replace(facts, network_bytes_per_second=machine.network_bytes_per_second)
    return facts
