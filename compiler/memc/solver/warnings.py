"""Sentences that a person must read with a plan: thin margins, failure boundaries, assumptions."""

from __future__ import annotations

import re

from memc.clock import StepTime
from memc.config import Attention, Precision, TrainingConfig
from memc.facts import Component
from memc.ledger import Ledger
from memc.ledger.dtypes import dtypes
from memc.ledger.entries import Moment
from memc.plan import Budget
from memc.solver.combinations import combination_warnings
from memc.solver.frames import Candidate
from memc.solver.images import image_share
from memc.solver.resolve import Question
from memc.solver.search import Machine
from memc.spec import ModuleSet
from memc.units import format_gib

_SLOW_OFFLOAD_SHARE = 0.5
_SPILL_SHARE = 0.1
_DESKTOP_LINE = "GeForce"  # of these cards the driver for Windows falls back to system memory unless told not to
SPILLS = (
    "the card is nearly full: where the driver may spill to system memory (Windows, WSL), a longer sample does not "
    "stop the run but slows it to a crawl; switch that fallback of the driver off, or lower data.max_length"
)
_THIN_HOST_SHARE = 0.1


def warnings(machine: Machine, chosen: Candidate, time: StepTime) -> tuple[str, ...]:
    """Returns the warnings of a plan, most pressing first."""
    question, config, budget = machine.question, chosen.config, machine.question.budget
    found: list[str] = []
    ledger = chosen.price.ledger()
    headroom = budget.gpu_bytes - ledger.gpu.required_bytes
    if open_bytes(budget, ledger):
        found.append(
            f"headroom {format_gib(headroom)} is less than the {format_gib(ledger.gpu.uncertainty_bytes)} that the "
            "estimate leaves open: run memc verify before relying on it"
        )
    if may_spill(question, ledger.gpu.required_bytes):
        found.append(SPILLS)
    if config.gradient_accumulation_steps > _LONG_ACCUMULATION and config.zero is not None:
        found.append(
            f"{config.gradient_accumulation_steps} micro-batches add up in 16-bit gradients under DeepSpeed: late ones "
            "can round away"
        )
    lora = question.situation.lora
    if config.lora is not None and config.lora.precision is not lora.precision and config.zero is not None:
        found.append("under DeepSpeed adapters take the 16-bit type of the engine; their masters stay fp32")
    found += _paged_after_resume(ledger, config.world_size // config.nodes, headroom)
    if budget.host_bytes is not None:
        spare = budget.host_bytes - chosen.needs.host
        resuming = ledger.host.by_moment[Moment.RESUME] - budget.host_bytes
        if resuming > 0:
            found.append(
                f"RESUMING DOES NOT FIT: reading a checkpoint of this run back takes {format_gib(resuming)} of host "
                "memory more than it may use; resume on a node with more, or start again from saved weights"
            )
        if spare < _THIN_HOST_SHARE * budget.host_bytes:
            pinned = pinned_bytes(ledger)
            held = f" ({format_gib(pinned)} of what is used is pinned)" if pinned else ""
            found.append(
                f"host memory is tight: {format_gib(spare)} of {format_gib(budget.host_bytes)} is left for the system, "
                f"the data and whatever else pins memory{held}"
            )
    if config.precision is Precision.FP16 and question.loaded.spec.pin.precision is None:
        found.append(
            f"{question.gpu.name} has no bf16: fp16 with dynamic loss scaling instead; a model that was trained in "
            "bf16 may overflow"
        )
    if not time.unknown and time.offload_seconds > _SLOW_OFFLOAD_SHARE * time.step_seconds:
        share = time.offload_seconds / time.step_seconds
        found.append(f"{share:.0%} of the step is spent on transfers and the CPU optimizer: compare with a larger card")
    found += whole_vocabulary(question, config)
    found += without_adapters(question, config)
    found += _gathered_experts(question, config, time)
    found += combination_warnings(config, question.model, question.gpu, question.loaded.spec.libraries.named)
    if config.attention is Attention.EAGER:
        found.append("eager attention keeps the scores of all heads: memory grows with the square of the length")
    found += [technique.boundary for technique in chosen.techniques if technique.rung >= _STATED_FROM_RUNG]
    found += image_share(machine.estimator, config, question.loaded.spec.data)
    found += question.assumptions
    if machine.order_note:
        found.append("ladder order " + machine.order_note)
    return tuple(dict.fromkeys(found))


def open_bytes(budget: Budget, ledger: Ledger) -> int:
    """Returns by how many bytes a card's budget could be missed if all that its estimate leaves open came true."""
    return max(0, ledger.gpu.required_bytes + ledger.gpu.uncertainty_bytes - budget.gpu_bytes)


def whole_vocabulary(question: Question, config: TrainingConfig) -> list[str]:
    """Returns what it costs that embedding or head train whole beside adapters, and the cheap way."""
    lora, model = config.lora, question.model
    if lora is None or not (lora.trains_embedding or lora.trains_head):
        return []
    tables = 1 if model.tied else lora.trains_embedding + lora.trains_head
    elements, types = tables * model.vocab_size * model.hidden_size, dtypes(config)
    masters = 4 if types.masters else 0
    size = elements * (types.adapter + types.gradient + masters + 2 * types.state)
    return [
        f"lora.modules_to_save ({', '.join(lora.modules_to_save)}) makes {elements:,} elements trainable: "
        f"{format_gib(size)} of copies, gradients and optimizer states, over all ranks that hold them, beside frozen "
        "originals; for tokens that are new, lora.new_tokens trains their rows alone (PEFT trainable_token_indices), "
        "and a chat checkpoint or spare tokens of the vocabulary need neither"
    ]


def without_adapters(question: Question, config: TrainingConfig) -> list[str]:
    """Returns what of a model with experts carries no adapter though every linear was asked for.

    Source: transformers 5.24.0 keeps routed experts in fused tensors, which are no linears; peft 0.21.2
        utils/transformers_weight_conversion.py takes the names of other linears of such an MLP for those tensors.
    """
    model, lora = question.model, config.lora
    experts = sum(
        tensor.params * group.count
        for group in model.groups
        for tensor in group.block.tensors
        if tensor.component is Component.EXPERTS
    )
    if lora is None or not experts or question.loaded.spec.lora.target_modules is not ModuleSet.ALL_LINEAR:
        return []
    linears = [linear for group in model.groups for linear in group.block.linears]
    kept = tuple(dict.fromkeys(linear.name for linear in linears if not linear.adaptable))
    others = f", and {', '.join(kept)} beside them, whose names PEFT takes for theirs," if kept else ""
    return [
        f"lora.target_modules all-linear adapts {', '.join(lora.target_modules)}: the routed experts, "
        f"{experts / 1e9:.1f}B of {model.total_params / 1e9:.1f}B weights, are fused tensors and no linears; "
        f"they{others} carry no adapter and stay as they are"
    ]


def _gathered_experts(question: Question, config: TrainingConfig, time: StepTime) -> list[str]:
    """Returns what it costs to partition the weights of a model of which a token uses few experts."""
    total, active = question.model.total_params, question.model.active_params
    partitioned = config.fsdp is not None or config.zero_stage == 3
    if active >= total or not partitioned or config.world_size == 1:
        return []
    sharding = "FSDP" if config.fsdp is not None else "ZeRO-3"
    share = "" if time.unknown else f" ({time.communication_seconds / time.step_seconds:.0%} of this step)"
    return [
        f"MoE under {sharding}: each pass gathers the total parameters ({total / 1e9:.1f}B) while only the active ones "
        f"({active / 1e9:.1f}B) compute for a token: communication{share} is that of a dense model of all of "
        "them, the arithmetic that of a small one; where each GPU can hold a copy of the base, none of it is gathered"
    ]


def _paged_after_resume(ledger: Ledger, ranks: int, headroom_bytes: int) -> list[str]:
    """Returns what is said of paged moments that the card could not hold once they no longer page.

    Source: bitsandbytes optim/optimizer.py, load_state_dict: the states that it reads are ordinary tensors of the GPU.
    """
    paged = sum(entry.bytes for entry in ledger.host.entries if entry.name == "paged-adam-moments") // ranks
    if paged <= headroom_bytes:
        return []
    return [
        f"A RESUMED RUN MAY NOT FIT: bitsandbytes reads paged states back as ordinary tensors of the GPU, "
        f"{format_gib(paged)} where {format_gib(headroom_bytes)} is left; start again from saved weights instead"
    ]


def may_spill(question: Question, required_bytes: int) -> bool:
    """Whether a need is so near to the whole card that a desktop's driver may move part of it to system memory."""
    capacity = question.budget.capacity_bytes
    near = abs(capacity - required_bytes) < _SPILL_SHARE * capacity
    return near and _DESKTOP_LINE in question.gpu.name


def pinned_bytes(ledger: Ledger) -> int:
    """Returns what of the host's memory is pinned."""
    return sum(entry.bytes for entry in ledger.host.entries if re.search(r"(?<!not )pinned", entry.formula))


_STATED_FROM_RUNG = 6
_LONG_ACCUMULATION = 16
