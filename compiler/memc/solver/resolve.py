"""From what the user said to the configuration as asked: every choice resolved, pins applied, contradictions named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from memc.config import (
    Attention,
    Engine,
    LoraConfig,
    LossHead,
    Method,
    Offload,
    Optimizer,
    Precision,
    Reference,
    Task,
    TrainingConfig,
)
from memc.errors import Diagnostic, MemcError
from memc.facts import GpuFacts, ModelFacts, default_lora_targets
from memc.facts.classifiers import classifier_head
from memc.facts.records import Objective
from memc.facts.vocabulary import vocabulary_modules
from memc.ladder import LADDER, Dimension, Situation, Technique, technique_names
from memc.ledger.adapted import without_adapters
from memc.ledger.constants import LedgerFacts
from memc.plan import Budget, PreferenceSettings, RunSettings
from memc.solver.cadence import longest_loss_seconds
from memc.solver.combinations import refused_combinations
from memc.solver.engines import engine_contradictions, fsdp_settings, pinned_engine, wants_fsdp, zero_settings
from memc.solver.images import (
    image_assumptions,
    image_contradictions,
    image_settings,
    image_tokens_of,
    sequence_tokens,
    skipped_stacks,
)
from memc.solver.releases import broken_notes, broken_techniques, builds_without_card, library_notes, unknown_releases
from memc.spec import Data, LoadedSpec, ModuleSet, Pin, Spec
from memc.units import ceil_div, format_gib

_RESERVE_PART = 50
_LORA_RANK = {Task.SFT: 32, Task.PRETRAIN: 64, Task.DPO: 32, Task.CLASSIFICATION: 16}
_LEARNING_RATE = {Method.FULL: 2e-5, Method.LORA: 2e-4, Method.QLORA: 2e-4}
# Source: trl 1.16.0, the commands at the top of scripts/dpo.py.
_PREFERENCE_LEARNING_RATE = {Method.FULL: 5e-7, Method.LORA: 5e-6, Method.QLORA: 5e-6}

# Source: trl 1.16.0 data_utils.py _pack_wrapped: rows are cut from all tokens in a line; nothing tells samples apart.
_SHARED_ROWS = (
    "data.packing joins samples end to end and cuts rows of max_length out of them (TRL's wrapped): a sample may be "
    "cut in two, and the tokens of a row see those of the samples before them"
)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A spec with its facts: what the solver answers.

    Attributes:
        loaded: The spec and its positions.
        model: Facts of the model.
        gpu: Facts of the card.
        asked: The configuration as asked, pins applied, no technique switched on.
        situation: What techniques may look at.
        frozen: Dimensions that pins have decided.
        forbidden: Technique names that are ruled out, by the spec or by pins.
        required: Technique names that must be used.
        budget: The limits.
        given_samples: Training samples as they were counted or stated; None when unknown.
        samples: Sequences per epoch, packing counted in; None when unknown.
        evaluation_samples: Samples of one evaluation; None when unknown.
        length_share: Mean tokens of a sequence over max_length, at most 1.
        assumptions: Sentences about what the spec left open.
        margin_bytes: What of each GPU's budget is kept free beyond the reserve; the budget is without it.
    """

    loaded: LoadedSpec
    model: ModelFacts
    gpu: GpuFacts
    asked: TrainingConfig
    situation: Situation
    frozen: frozenset[Dimension]
    forbidden: frozenset[str]
    required: frozenset[str]
    budget: Budget
    given_samples: int | None
    samples: int | None
    evaluation_samples: int | None
    length_share: float
    assumptions: tuple[str, ...]
    margin_bytes: int = 0

    def with_margin(self, margin_bytes: int) -> Question:
        """Returns the question with so much more of each GPU's budget kept free."""
        left = max(0, self.budget.gpu_bytes - margin_bytes)
        return replace(self, budget=replace(self.budget, gpu_bytes=left), margin_bytes=self.margin_bytes + margin_bytes)


def resolve(
    loaded: LoadedSpec,
    model: ModelFacts,
    gpu: GpuFacts,
    ledger_facts: LedgerFacts,
    samples: int | None,
    evaluation_samples: int | None = None,
) -> Question:
    """Returns the question that a spec asks.

    Args:
        loaded: The spec.
        model: Facts of its model.
        gpu: Facts of its card.
        ledger_facts: For the reserve.
        samples: Training samples, counted or from the spec; None when unknown.
        evaluation_samples: Samples of the evaluation file, counted; None when unknown.

    Raises:
        MemcError: When pins and facts contradict each other, with every contradiction.
    """
    problems = _contradictions(loaded, model, gpu)
    if problems:
        raise MemcError(tuple(problems))
    spec, pin = loaded.spec, loaded.spec.pin
    zero, fsdp = zero_settings(loaded, model), fsdp_settings(loaded)
    lora = _lora_settings(loaded, model)
    method = spec.methods[0]
    config = pinned_engine(loaded, _as_asked(loaded, model, gpu, method, lora), zero, fsdp)
    refused = refused_combinations(loaded, config, lora, model, gpu)
    if refused:
        raise MemcError(tuple(refused))
    sequences, share, assumptions = _data_amount(loaded, samples)
    assumptions = (
        *_other_amount(spec.data, samples),
        *assumptions,
        *(_SHARED_ROWS,) * (config.packing and config.task is Task.SFT),
        *image_assumptions(spec.data, model),
    )
    target, capacity = spec.memory.target, gpu.capacity_bytes
    assert capacity is not None
    chosen = automatic_reserve_bytes(capacity, ledger_facts)
    reserve = spec.memory.reserve.bytes if spec.memory.reserve else chosen
    limit = spec.time.budget
    price = spec.hardware.usd_per_gpu_hour
    budget = Budget(
        gpu_bytes=target.bytes if target is not None else capacity - reserve,
        capacity_bytes=capacity,
        reserve_bytes=reserve if target is None else max(0, capacity - target.bytes),
        host_bytes=usable_host_bytes(spec.hardware.host_memory.bytes) if spec.hardware.host_memory else None,
        nvme_bytes=spec.hardware.nvme.bytes if spec.hardware.nvme else 0,
        seconds=limit.seconds if limit else None,
        usd=limit.usd if limit else None,
        usd_per_gpu_hour=price if price is not None else gpu.usd_per_hour,
    )
    if budget.host_bytes is None:
        pinned = Offload.CPU in (pin.offload_optimizer, pin.offload_param)
        note = "HOST MEMORY NOT CHECKED, though states go there" if pinned else "host memory is not checked"
        offloads = "" if pinned else ", nothing offloads"
        assumptions = (*assumptions, f"hardware.host_memory is not given: {note}{offloads}")
    situation = Situation(
        model=model,
        gpu=gpu,
        host_bytes=budget.host_bytes,
        methods=spec.methods,
        lora=lora,
        zero=zero,
        fsdp=fsdp,
        nvme_bytes=budget.nvme_bytes,
    )
    kept = _fulfilled(loaded, config, situation)
    broken = broken_techniques(loaded, config, situation)
    assumptions = (*assumptions, *library_notes(loaded, gpu), *broken_notes(broken))
    return Question(
        loaded=loaded,
        model=model,
        gpu=gpu,
        asked=config,
        situation=situation,
        frozen=_frozen(loaded) | {technique.dimension for technique in kept},
        forbidden=frozenset(spec.ladder.forbid) | _ruled_out(loaded) | frozenset(broken),
        required=frozenset(spec.ladder.require) - {technique.name for technique in kept},
        budget=budget,
        given_samples=samples,
        samples=sequences,
        evaluation_samples=evaluation_samples,
        length_share=share,
        assumptions=assumptions,
    )


_STANDING = (Dimension.METHOD, Dimension.STATES, Dimension.SHARDING, Dimension.LOSS, Dimension.CHECKPOINTING)


def _fulfilled(loaded: LoadedSpec, asked: TrainingConfig, situation: Situation) -> list[Technique]:
    """Returns the required techniques that the run as asked has already: what they decide then stays as it is.

    Only what can stand in a spec by itself is looked at, not what another technique must come before.
    """
    named = [item for item in LADDER if item.name in loaded.spec.ladder.require]
    return [item for item in named if item.dimension in _STANDING and item.apply(asked, situation) == asked]


def usable_host_bytes(size_bytes: int) -> int:
    """Returns what of a node's memory a run may use: one part in fifty stays for the system, as on the card."""
    return size_bytes - size_bytes // _RESERVE_PART


def automatic_reserve_bytes(capacity_bytes: int, facts: LedgerFacts) -> int:
    """Returns what is kept free of a card where the spec does not say: the spread of its context, and a share."""
    return facts.context_spread_bytes + capacity_bytes // _RESERVE_PART


def host_bytes_for(needed_bytes: int) -> int:
    """Returns the memory of a node of which `needed_bytes` may be used."""
    return ceil_div(needed_bytes * _RESERVE_PART, _RESERVE_PART - 1)


def run_settings(
    loaded: LoadedSpec, config: TrainingConfig, steps_per_epoch: int | None, mean_step_seconds: float
) -> RunSettings:
    """Returns what the emitted script needs beyond the configuration.

    Unless the spec says how often, a checkpoint is written once per epoch, or about every hour where that is sooner,
    and more often where a job is short.
    """
    spec, training = loaded.spec, loaded.spec.training
    usual = _PREFERENCE_LEARNING_RATE if spec.task is Task.DPO else _LEARNING_RATE
    rate = training.learning_rate if training.learning_rate is not None else usual[config.method]
    hourly = max(1, round(longest_loss_seconds(spec.launch) / mean_step_seconds))
    save = training.save_steps if training.save_steps is not None else min(steps_per_epoch or 500, hourly)
    evaluate = 0
    if spec.data.eval is not None:
        evaluate = training.eval_steps if training.eval_steps is not None else (steps_per_epoch or 500)
    return RunSettings(
        model=spec.model,
        train_data=spec.data.train or "",
        eval_data=spec.data.eval or "",
        epochs=float(training.epochs or 0),
        max_steps=training.max_steps or 0,
        learning_rate=rate,
        weight_decay=training.weight_decay,
        warmup_ratio=training.warmup_ratio,
        max_grad_norm=training.max_grad_norm,
        lr_scheduler=training.lr_scheduler.value,
        seed=training.seed,
        save_steps=save,
        eval_steps=evaluate,
        logging_steps=training.logging_steps,
        save_total_limit=training.save_total_limit,
        output_dir=training.output_dir,
        assistant_only_loss=spec.data.assistant_only_loss,
        trust_remote_code=training.trust_remote_code,
        nvme_path=spec.hardware.nvme_path,
        scheduler=spec.launch.scheduler.value,
        time_limit_hours=spec.launch.time_limit or 0,
        partition=spec.launch.partition or "",
        account=spec.launch.account or "",
        image=spec.launch.image or "",
        volume=spec.launch.volume or "",
        accelerator=spec.launch.accelerator or "",
        libraries=tuple(sorted(spec.libraries.named.items())),
        labels=spec.data.labels,
        new_tokens=spec.lora.new_tokens,
        dpo=_preference_settings(spec) if spec.task is Task.DPO else None,
    )


def _preference_settings(spec: Spec) -> PreferenceSettings:
    dpo = spec.dpo
    return PreferenceSettings(beta=dpo.beta, loss=dpo.loss.value, label_smoothing=dpo.label_smoothing)


def _contradictions(loaded: LoadedSpec, model: ModelFacts, gpu: GpuFacts) -> list[Diagnostic]:
    """Returns what the spec asks and the facts forbid."""
    spec, pin = loaded.spec, loaded.spec.pin
    found: list[Diagnostic] = [*unknown_releases(loaded), *builds_without_card(loaded, gpu)]

    def add(field: str, code: str, message: str, hint: str) -> None:
        found.append(loaded.diagnostic(field, code, message, hint))

    if gpu.capacity_bytes is None:
        add("hardware.gpu", "fact-unknown", f"the catalogue has no capacity_mib of {gpu.key}", "use another card")
    target = spec.memory.target
    if target is not None and gpu.capacity_bytes is not None and target.bytes > gpu.capacity_bytes:
        add(
            "memory.target",
            "target-above-capacity",
            f"memory.target {target.text} is above the {format_gib(gpu.capacity_bytes)} that torch sees of {gpu.name}",
            f"set memory.target below {format_gib(gpu.capacity_bytes)}, or leave it out",
        )
    reserve = spec.memory.reserve
    if (
        target is None
        and reserve is not None
        and gpu.capacity_bytes is not None
        and reserve.bytes >= gpu.capacity_bytes
    ):
        add(
            "memory.reserve",
            "reserve-above-capacity",
            f"memory.reserve {reserve.text} leaves nothing of the {format_gib(gpu.capacity_bytes)} that torch sees of "
            f"{gpu.name}",
            f"set memory.reserve below {format_gib(gpu.capacity_bytes)}, or leave it out",
        )
    wanted_bf16 = pin.precision in (Precision.BF16, Precision.BF16_PURE)
    if wanted_bf16 and not gpu.bf16:
        add(
            "pin.precision",
            "no-bf16",
            f"{gpu.name} has no bf16 matrix units",
            "pin precision to fp16, or remove the pin",
        )
    if pin.attention is Attention.FLASH_ATTENTION_2 and not gpu.flash_attention_2:
        add(
            "pin.attention",
            "no-flash-attention",
            f"FlashAttention-2 does not run on {gpu.name}",
            "pin attention to sdpa, which picks the best kernel of the card",
        )
    if Method.QLORA in spec.method and not gpu.bitsandbytes:
        add("method", "no-4bit", f"bitsandbytes 4-bit does not run on {gpu.name}", "use method lora")
    found += image_contradictions(loaded, model)
    longest = model.max_position_embeddings
    if longest is not None and sequence_tokens(spec.data, model) > longest:
        add(
            "data.max_length",
            "too-long",
            f"max_length {spec.data.max_length}{_with_images(spec.data, model)} exceeds the {longest} positions of "
            f"{model.key}",
            f"set data.max_length to {max(1, longest - image_tokens_of(spec.data, model))} or less",
        )
    names = technique_names()
    for key, used in (("forbid", spec.ladder.forbid), ("require", spec.ladder.require)):
        for name in used:
            if name not in names:
                add(
                    f"ladder.{key}", "unknown-technique", f"{name!r} is no technique", "use one of: " + ", ".join(names)
                )
    return [
        *found,
        *engine_contradictions(loaded),
        *_target_contradictions(loaded, model),
        *_vocabulary_contradictions(loaded, model),
    ]


def _vocabulary_contradictions(loaded: LoadedSpec, model: ModelFacts) -> list[Diagnostic]:
    """Returns modules to train whole that are neither the model's embedding nor its head."""
    if loaded.spec.task is Task.CLASSIFICATION:
        return []
    names = vocabulary_modules(model.model_type)
    wrong = [name for name in loaded.spec.lora.modules_to_save if name not in (names.embedding, names.head)]
    if not wrong:
        return []
    message = f"lora.modules_to_save names {', '.join(wrong)}; {model.key} has {names.embedding} and {names.head}"
    hint = "name one of the two; for modules of the layers, write lora.target_modules"
    return [loaded.diagnostic("lora.modules_to_save", "unknown-module", message, hint)]


def _with_images(data: Data, model: ModelFacts) -> str:
    tokens = image_tokens_of(data, model)
    return f" with {tokens} tokens of images" if tokens else ""


def _target_contradictions(loaded: LoadedSpec, model: ModelFacts) -> list[Diagnostic]:
    """Returns LoRA target modules that the model does not have."""
    skipped = skipped_stacks(loaded.spec, model)
    spec, known = loaded.spec, without_adapters(model, skipped).linear_names()
    found = []
    for field, targets in (
        ("lora.target_modules", spec.lora.target_modules),
        ("pin.target_modules", spec.pin.target_modules),
    ):
        if targets is None or isinstance(targets, ModuleSet):
            continue
        outer = [name for name in targets if name in _vocabulary_names(spec, model)]
        missing = [name for name in targets if name not in known and name not in outer]
        if outer:
            message = f"{', '.join(outer)} of {model.key} stands outside the layers: memc plans no adapter on it"
            hint = (
                "take it out of the list; lora.modules_to_save trains it whole, lora.new_tokens the rows of new tokens"
            )
            found.append(loaded.diagnostic(field, "unknown-module", message, hint))
        if missing:
            found.append(
                loaded.diagnostic(
                    field,
                    "unknown-module",
                    f"{model.key} has no linear module named {', '.join(missing)}",
                    _of_the_tower(model, missing) or "use some of: " + ", ".join(known),
                )
            )
    return found


def _vocabulary_names(spec: Spec, model: ModelFacts) -> tuple[str, ...]:
    """Returns the names of the embedding and the head of a model that ends in one for tokens; none for classes."""
    if spec.task is Task.CLASSIFICATION:
        return ()
    names = vocabulary_modules(model.model_type)
    return names.embedding, names.head


def _of_the_tower(model: ModelFacts, missing: list[str]) -> str:
    """Returns what to do about modules that only a tower of images has; empty when they are nowhere."""
    return "" if set(missing) - set(model.linear_names()) else "set lora.image_tower to true: only the tower has them"


def _lora_settings(loaded: LoadedSpec, model: ModelFacts) -> LoraConfig:
    """Returns the adapters that LoRA would use."""
    lora, pin = loaded.spec.lora, loaded.spec.pin
    rank = pin.lora_rank or lora.rank or _LORA_RANK[loaded.spec.task]
    targets = pin.target_modules if pin.target_modules is not None else lora.target_modules
    skipped = skipped_stacks(loaded.spec, model)
    adapted = without_adapters(model, skipped)
    if isinstance(targets, ModuleSet):
        names = default_lora_targets(adapted, "attention" if targets is ModuleSet.ATTENTION else "all-linear")
    else:
        names = tuple(name for name in adapted.linear_names() if name in targets)
    return LoraConfig(
        rank=rank,
        alpha=pin.lora_alpha or lora.alpha or 2 * rank,
        dropout=pin.lora_dropout if pin.lora_dropout is not None else lora.dropout,
        target_modules=names,
        precision=pin.adapter_precision or lora.precision,
        modules_to_save=_whole_modules(loaded, model),
        trains_embedding=_trains(loaded, model, vocabulary_modules(model.model_type).embedding),
        trains_head=_trains(loaded, model, vocabulary_modules(model.model_type).head),
        new_tokens=len(lora.new_tokens),
        skipped_stacks=skipped,
    )


def _trains(loaded: LoadedSpec, model: ModelFacts, module: str) -> bool:
    """Returns whether a module with a row for every token trains whole beside adapters; tied ones do together."""
    named = loaded.spec.lora.modules_to_save
    return bool(named) if model.tied else module in named


def _whole_modules(loaded: LoadedSpec, model: ModelFacts) -> tuple[str, ...]:
    """Returns the modules that train whole beside adapters: a head for classes, or what the spec names."""
    if loaded.spec.task is not Task.CLASSIFICATION:
        return loaded.spec.lora.modules_to_save
    return classifier_head(model.model_type).trained


def _as_asked(loaded: LoadedSpec, model: ModelFacts, gpu: GpuFacts, method: Method, lora: LoraConfig) -> TrainingConfig:
    """Returns the configuration without any technique, pins applied but for those of the engine."""
    spec, pin = loaded.spec, loaded.spec.pin
    world = spec.world_size
    per_rank = spec.training.global_batch_size // spec.data_parallel_ranks
    micro, accumulation = _batch(pin.micro_batch_size, pin.gradient_accumulation_steps, per_rank)
    packing = (spec.data.packing or spec.task is Task.PRETRAIN) and not image_tokens_of(spec.data, model)
    images, pixels = image_settings(spec.data, model)
    evaluation = pin.eval_batch_size or micro if spec.data.eval is not None else 0
    pairs = spec.task is Task.DPO
    decodes = model.objective in (Objective.CAUSAL_LM, Objective.IMAGE_TEXT_LM)
    tiled = decodes and model.tiled_loss
    chunks = pairs or (tiled and spec.task is Task.SFT and "chunked-loss" not in spec.ladder.forbid)
    loss = LossHead.CHUNKED if chunks else LossHead.PLAIN
    attentions = [group.block.attention for group in model.groups]
    capped = any(one.logit_softcap is not None or one.eager_only for one in attentions)
    attention = Attention.EAGER if capped else Attention.SDPA  # transformers has no SDPA path with capped scores
    return TrainingConfig(
        task=spec.task,
        method=method,
        precision=pin.precision or (Precision.BF16 if gpu.bf16 else Precision.FP16),
        engine=Engine.SINGLE if world == 1 else Engine.DDP,
        gpus_per_node=spec.hardware.count,
        nodes=spec.hardware.nodes,
        micro_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        max_length=sequence_tokens(spec.data, model),
        packing=packing,
        padding_mask=pin.padding_mask if pin.padding_mask is not None else (not packing and (pairs or micro > 1)),
        attention=pin.attention or attention,
        loss=pin.loss or loss,
        checkpoint_every=_checkpoint_every(pin),
        optimizer=pin.optimizer or Optimizer.ADAMW,
        lora=None if method is Method.FULL else lora,
        zero=None,
        eval_batch_size=evaluation,
        expandable_segments=pin.expandable_segments if pin.expandable_segments is not None else True,
        gradient_as_bucket_view=pin.gradient_as_bucket_view if pin.gradient_as_bucket_view is not None else True,
        double_quantization=pin.double_quantization if pin.double_quantization is not None else True,
        checkpoint_offload=bool(pin.checkpoint_offload),
        context_parallel=pin.context_parallel or 1,
        reference=reference_of(spec, method),
        classes=spec.data.classes if spec.task is Task.CLASSIFICATION else 0,
        images_per_sample=images,
        image_pixels=pixels,
    )


def reference_of(spec: Spec, method: Method) -> Reference:
    """Returns where the reference of preference training comes from under a method, unless a technique changes it."""
    if spec.task is not Task.DPO:
        return Reference.NONE
    if method is not Method.FULL:
        return Reference.ADAPTERS_OFF
    return Reference(spec.pin.reference.value) if spec.pin.reference is not None else Reference.MODEL


def _batch(micro: int | None, accumulation: int | None, per_rank: int) -> tuple[int, int]:
    """Returns micro-batch and accumulation of one rank; the spec has checked that pins divide."""
    if micro is not None:
        return micro, accumulation or max(1, per_rank // micro)
    if accumulation is not None:
        return max(1, per_rank // accumulation), accumulation
    return per_rank, 1


def _checkpoint_every(pin: Pin) -> int:
    """Returns how many layers share a checkpoint, 0 for none: who offloads checkpoints has them."""
    return int(bool(pin.checkpoint_offload)) if pin.activation_checkpointing is None else pin.activation_checkpointing


def _frozen(loaded: LoadedSpec) -> frozenset[Dimension]:
    """Returns the dimensions that pins have decided."""
    pin = loaded.spec.pin
    plain = pin.engine in (Engine.SINGLE, Engine.DDP)
    checks: tuple[tuple[Dimension, Callable[[], bool]], ...] = (
        (Dimension.STATES, lambda: pin.optimizer is not None),
        (Dimension.ADAPTERS, lambda: pin.adapter_precision is not None),
        (Dimension.SHARDING, lambda: pin.zero_stage is not None or plain or wants_fsdp(loaded)),
        (Dimension.OFFLOAD_OPTIMIZER, lambda: pin.offload_optimizer is not None or plain),
        (Dimension.OFFLOAD_PARAM, lambda: pin.offload_param is not None or plain),
        (
            Dimension.ENGINE_STATES,
            lambda: plain or pin.bf16_master_weights is not None or pin.bf16_optimizer_states is not None,
        ),
        (Dimension.CONTEXT, lambda: plain or pin.context_parallel is not None),
        (Dimension.LOSS, lambda: pin.loss is not None),
        (Dimension.REFERENCE, lambda: pin.reference is not None),
        (Dimension.CHECKPOINTING, lambda: pin.activation_checkpointing is not None),
        (Dimension.CHECKPOINT_OFFLOAD, lambda: pin.checkpoint_offload is not None),
        (
            Dimension.MICRO_BATCH,
            lambda: pin.micro_batch_size is not None or pin.gradient_accumulation_steps is not None,
        ),
    )
    return frozenset(dimension for dimension, decided in checks if decided())


def _ruled_out(loaded: LoadedSpec) -> frozenset[str]:
    """Returns techniques that a pin outside their own dimension excludes."""
    pin = loaded.spec.pin
    names: set[str] = set()
    if pin.precision is not None:
        names |= {"bf16-states", "bf16-adamw-8bit", "zero-bf16-states"}
    if pin.zero_stage in (0, 1):
        names |= {"offload-optimizer", "offload-optimizer-nvme", "offload-param", "offload-param-nvme"}
    if pin.zero_stage == 2:
        names |= {"offload-optimizer-nvme", "offload-param", "offload-param-nvme"}
    moved = {pin.offload_optimizer, pin.offload_param} & {Offload.CPU, Offload.NVME}
    if pin.engine is Engine.DEEPSPEED or moved:  # what FSDP moves it moves together
        names |= {"fsdp", "fsdp-hybrid"}
    if pin.offload_optimizer is Offload.NVME or pin.offload_param in (Offload.CPU, Offload.NVME):
        names |= {"zero-1", "zero-2"}
    if pin.offload_optimizer is Offload.NONE:
        names |= {"offload-param", "offload-param-nvme"}
    if pin.hybrid_sharding is False:
        names |= {"fsdp-hybrid", "zero-3-hybrid"}
    if pin.hybrid_sharding:
        names |= {"zero-1", "zero-2", "zero-3", "fsdp"}
    return frozenset(names)


def _unknown_amount(loaded: LoadedSpec) -> str:
    """Returns what is not known of the run because its data are not."""
    spec = loaded.spec
    what = f"{spec.data.train} could not be counted beside the spec" if spec.data.train else "the data are not named"
    if spec.time.budget is not None:
        return f"TIME BUDGET NOT CHECKED: {what}; give data.samples"
    return f"{what}: no time for the whole run; give data.samples"


def _other_amount(data: Data, samples: int | None) -> tuple[str, ...]:
    """Returns that the file beside the spec holds another number of samples than the spec says; empty when not."""
    if data.samples is None or samples is None or samples == data.samples:
        return ()
    return (
        f"data.samples says {data.samples:,}, but {data.train} beside the spec holds {samples:,}: steps, time and "
        "checkpoints are those of the file; remove data.samples, or take the file away if the run has another one",
    )


def _data_amount(loaded: LoadedSpec, samples: int | None) -> tuple[int | None, float, tuple[str, ...]]:
    """Returns sequences per epoch, their mean length over max_length, and what was assumed."""
    data = loaded.spec.data
    packs = data.packing or loaded.spec.task is Task.PRETRAIN
    if samples is None:
        return None, 1.0, (_unknown_amount(loaded),)
    if data.mean_tokens is None:
        note = "data.mean_tokens is not given: every sample is taken to have max_length tokens, an upper bound"
        return samples, 1.0, (note,)
    if packs:
        return max(1, -(-samples * data.mean_tokens // data.max_length)), 1.0, ()
    return samples, min(1.0, data.mean_tokens / data.max_length), ()
