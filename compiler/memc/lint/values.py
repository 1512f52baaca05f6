"""The values that rules test, of what files state: by the names of `memc.rules.facts_of`, and more that files have."""

from __future__ import annotations

from typing import Any

from memc.facts.records import Component, ModelFacts
from memc.lint.context import Context
from memc.lint.records import Kind, Stated
from memc.lint.settings import table
from memc.lint.statements import Statements
from memc.lint.world import processes
from memc.rules.records import in_range

_OPTIMIZERS = {
    "adamw_torch": "adamw_torch",
    "adamw_torch_fused": "adamw_torch_fused",
    "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "paged_adamw_32bit": "paged_adamw_32bit",
    "paged_adamw": "paged_adamw_32bit",
}
_ATTENTIONS = {"flash_attention_2": "flash_attention_2", "fa2": "flash_attention_2", "sdpa": "sdpa", "eager": "eager"}


def values_of(context: Context) -> dict[str, Any]:
    """Returns the values that rules test, by the names of `memc.rules.facts_of` and those that only files have."""
    statements = context.statements
    engine = _engine(statements)
    world = processes(context)
    method = _method(statements)
    values = {
        "engine": engine,
        "zero_stage": statements.value("zero_stage") if engine == "deepspeed" else None,
        "method": method,
        "precision": _precision(statements),
        "optimizer": _OPTIMIZERS.get(str(statements.value("optimizer")).lower()),
        "offload_optimizer": _offload(statements, "offload_optimizer", engine),
        "offload_param": _offload(statements, "offload_param", engine),
        "checkpoint_every": _switch(statements.value("activation_checkpointing")),
        "gradient_accumulation_steps": statements.value("gradient_accumulation_steps"),
        "world_size": world.value if world is not None else None,
        "shard_ranks": world.value if world is not None else None,
        "nodes": statements.value("nodes"),
        "packing": statements.value("packing"),
        "attention": _ATTENTIONS.get(str(statements.value("attention")).lower()),
        "max_length": statements.value("max_length"),
        "fsdp_version": _fsdp_version(context) if engine == "fsdp" else None,
        **_of_card(context),
        **_of_model(context.model, statements),
        **_of_files(context, method, engine),
    }
    return {name: value for name, value in values.items() if value is not None}


def _engine(statements: Statements) -> str | None:
    stated = [str(item.value) for item in statements.all("engine")]
    for engine in ("deepspeed", "fsdp"):
        if engine in stated:
            return engine
    if stated:
        world = statements.first("num_processes")
        return "ddp" if stated[0] == "ddp" and (world is None or world.value != 1) else "single"
    launch = statements.first("processes_per_node") or statements.first("num_processes")
    return None if launch is None else ("ddp" if launch.value > 1 else "single")


def _method(statements: Statements) -> str | None:
    """Returns how the run trains: with adapters where any file says so, whole where none can."""
    adapter = str(statements.value("adapter") or "").lower()
    four_bit = statements.value("load_in_4bit") is True or statements.value("quantization_bit") == 4
    if four_bit or adapter == "qlora":
        return "qlora"
    if adapter in ("lora", "dora") or statements.value("use_peft") is True:
        return "lora"
    if adapter in ("full", "freeze"):
        return "full"
    return (
        "full"
        if statements.of(Kind.SCRIPT)
        or any(document.dialect == "axolotl" for document in statements.of(Kind.ARGUMENTS))
        else None
    )


def _precision(statements: Statements) -> str | None:
    for name in ("bf16", "fp16"):
        if any(item.value is True for item in statements.all(name)):
            return name
    mixed = str(statements.value("mixed_precision")).lower()
    return mixed if mixed in ("bf16", "fp16") else None


def _offload(statements: Statements, name: str, engine: str | None) -> str | None:
    if engine == "fsdp" and name == "offload_param":
        return "cpu" if statements.value("fsdp_offload") is True else "none"
    if engine != "deepspeed":
        return None
    value = str(statements.value(name) or "none").lower()
    return value if value in ("cpu", "nvme", "none") else "none"


def _switch(value: Any) -> int | None:
    return None if value is None else int(bool(value))


def _fsdp_version(context: Context) -> int | None:
    """Returns which FSDP runs: as stated, else accelerate's default, or that of the arguments."""
    statements = context.statements
    stated = statements.value("fsdp_version")
    if stated is not None:
        return int(stated)
    if _axolotl(statements) or any(item.kind in (Kind.ACCELERATE, Kind.LAUNCH) for item in statements.all("engine")):
        return 1
    return 2 if in_range(context.versions["transformers"].text, ">=5.24") else None


def _of_card(context: Context) -> dict[str, Any]:
    gpu = context.gpu
    if gpu is None:
        return {}
    capability = gpu.compute_capability
    old = gpu.vendor == "nvidia" and capability is not None and capability < (8, 0)
    return {
        "gpu_bf16": gpu.bf16,
        "gpu_name": gpu.name,
        "gpu_flash_attention": gpu.flash_attention_2,
        "gpu_tf32": not old if gpu.vendor == "nvidia" and capability is not None else None,
    }


def _of_model(model: ModelFacts | None, statements: Statements) -> dict[str, Any]:
    if model is None:
        return {}
    experts = sum(
        tensor.params * group.count
        for group in model.groups
        for tensor in group.block.tensors
        if tensor.component is Component.EXPERTS
    )
    length = statements.value("max_length")
    positions = model.max_position_embeddings
    beyond = length - positions if isinstance(length, int) and positions is not None else None
    return {
        "model_type": model.model_type,
        "model_name": model.key,
        "model_tied": model.tied,
        "fused_expert_params": experts,
        "routed_experts": max((group.block.mlp.experts for group in model.groups), default=0),
        "tokens_beyond_positions": beyond,
        "positions": positions,
    }


def _of_files(context: Context, method: str | None, engine: str | None) -> dict[str, Any]:
    """Returns what only files can have: things that memc never writes."""
    statements = context.statements
    saves, evaluates = _saves(statements), _evaluates(statements)
    micro, evaluation = statements.value("micro_batch_size"), statements.first("eval_batch_size")
    optimizer = str(statements.value("optimizer") or "").lower()
    hpz = statements.value("hpz_partition")
    return {
        "saves": saves,
        "gathers_on_save": statements.value("gathers_on_save"),
        "evaluates": evaluates,
        "eval_batch_left_out": _left_out(evaluation, micro) if evaluates and not _axolotl(statements) else None,
        "eval_batch_size": evaluation.value if evaluation is not None else _default(context, "eval"),
        "eval_batch_times": evaluation.value / micro
        if evaluation is not None and micro and not evaluation.default and evaluates
        else None,
        "micro_batch_size": micro if micro is not None else _default(context, "train"),
        "use_reentrant": _reentrant(context),
        "wraps_itself": _wraps_itself(statements),
        "input_gradients": bool(statements.value("input_gradients")) if statements.of(Kind.SCRIPT) else None,
        "device_map": _places_model(statements),
        "loads_early": any(document.extra.get("early_load") for document in statements.of(Kind.SCRIPT)) or None,
        "quant_storage_matches": _storage_matches(statements) if method == "qlora" else None,
        "checkpointing_twice": bool(
            statements.value("activation_checkpointing") is True and statements.value("fsdp_checkpointing") is True
        ),
        "fsdp_checkpointing": statements.value("fsdp_checkpointing"),
        "hpz_partition": hpz,
        "hpz_differs": _hpz_differs(context, hpz),
        "offload": engine == "deepspeed"
        and any(
            _offload(statements, name, engine) in ("cpu", "nvme") for name in ("offload_optimizer", "offload_param")
        ),
        "client_optimizer": _client_optimizer(statements, optimizer),
        "embeddings_whole": _embeddings_whole(statements),
        "token_indices": statements.value("trainable_token_indices") is not None,
        "zero3_init": statements.value("zero3_init"),
        "efficient_loading": statements.value("efficient_loading"),
        "sync_module_states": statements.value("sync_module_states"),
        "tf32": statements.value("tf32"),
        "moe_leaf_named": _leaf_named(statements),
        "wraps_by_class": _wraps_by_class(statements, engine),
        "nvme_path_given": statements.value("nvme_path") is not None,
        "use_orig_params": statements.value("use_orig_params"),
        "auto_find_batch_size": statements.value("auto_find_batch_size"),
        "save_only_model": statements.value("save_only_model"),
        "load_best_model_at_end": statements.value("load_best_model_at_end"),
        "collects_logits": _collects_logits(statements),
        "state_dict_type": statements.value("state_dict_type"),
        "grows_vocabulary": any(document.has("resize_token_embeddings") for document in statements.of(Kind.SCRIPT))
        or None,
        "embeddings_train": bool(_embeddings_whole(statements))
        or statements.first("trainable_token_indices") is not None
        or bool(_tables_in(statements.value("target_modules"))),
        "one_tied_table_saved": len(_tables_in(statements.value("modules_to_save"))) == 1,
        "ddp_find_unused_parameters": _on(statements.value("ddp_find_unused_parameters")),
        "scaled_by_torch": engine != "deepspeed",
        "weights_dtype": str(statements.value("weights_dtype") or "").lower().removeprefix("torch.") or None,
        "strategies_differ": _strategies_differ(statements),
        **_cadences(statements),
        "device_map_spreads": _spreads(statements, engine),
        "freezes_adapters": statements.value("freezes_adapters"),
        "adapters_before": statements.value("adapters_before"),
        "computes_in_fp32": _computes_in_fp32(statements),
    }


def _cadences(statements: Statements) -> dict[str, Any]:
    """Returns the steps between evaluations and between checkpoints, and whether the latter is no multiple."""
    evaluation, saving = statements.value("eval_steps"), statements.value("save_steps")
    each = (statements.value("eval_strategy"), statements.value("save_strategy"))
    if each != ("steps", "steps") or _axolotl(statements):
        return {}
    saving = 500 if saving is None else saving
    if not (isinstance(evaluation, int) and isinstance(saving, int) and min(evaluation, saving) >= 1):
        return {}
    return {"eval_steps": evaluation, "save_steps": saving, "cadences_differ": bool(saving % evaluation)}


def _spreads(statements: Statements, engine: str | None) -> bool | None:
    """Whether device_map divides the model among GPUs; ZeRO-3 refuses every device_map, which another rule says."""
    if engine == "deepspeed" and statements.value("zero_stage") == 3:
        return None
    value = statements.value("device_map")
    return isinstance(value, str) and value.lower() in ("auto", "balanced", "balanced_low_0", "sequential")


def _computes_in_fp32(statements: Statements) -> bool:
    """Whether weights are loaded in fp32 and every file that could ask for a 16-bit type says that it does not."""
    weights = str(statements.value("weights_dtype") or "").lower().removeprefix("torch.")
    mixed = [str(item.value).lower() for item in statements.all("mixed_precision")]
    stated = {name: statements.all(name) for name in ("bf16", "fp16")}
    off = all(items and not any(item.value for item in items) for items in stated.values())
    return weights in ("float32", "fp32") and off and all(value == "no" for value in mixed)


def _default(context: Context, side: str) -> Any:
    """Returns the batch that transformers takes when nobody sets one."""
    return table("training-arguments").default(f"per_device_{side}_batch_size", context.versions["transformers"].text)


def _axolotl(statements: Statements) -> bool:
    """Whether axolotl makes the arguments, which fills in the evaluation batch and the type of 4-bit storage."""
    return any(document.dialect == "axolotl" for document in statements.of(Kind.ARGUMENTS))


def _left_out(evaluation: Stated | None, micro: Any) -> bool:
    """Whether nobody set the batch of the evaluation, and its default is more than the micro-batch."""
    if evaluation is None or not evaluation.default:
        return evaluation is None
    return micro is None or evaluation.value > micro


def _saves(statements: Statements) -> bool | None:
    """Whether the run writes checkpoints; what the arguments leave out is their default."""
    strategy = statements.first("save_strategy")
    if strategy is not None:
        return str(strategy.value).lower() not in ("no", "false")
    return True if statements.first("save_steps") is not None else None


def _evaluates(statements: Statements) -> bool | None:
    strategy = statements.first("eval_strategy")
    if strategy is not None:
        return str(strategy.value).lower() not in ("no", "false")
    for document in statements.of(Kind.ARGUMENTS):
        if document.has("eval_strategy") or document.has("evaluation_strategy"):
            return True  # a value that only a run can tell
    if statements.value("do_eval") is True or statements.value("validation_share"):
        return True
    return True if _axolotl(statements) and statements.first("eval_steps") is not None else None


def _reentrant(context: Context) -> bool | None:
    """Returns whether checkpoints are reentrant: as stated, else the default of the library.

    Before transformers 5 that was reentrant; what later versions up to the one that was read do is not known.
    """
    statements = context.statements
    stated = statements.value("use_reentrant")
    if stated is not None or statements.value("activation_checkpointing") is not True:
        return stated if isinstance(stated, bool) else None
    if any(document.dialect in ("sft", "dpo", "grpo", "reward", "kto") for document in statements.of(Kind.ARGUMENTS)):
        return None  # TRL sets it by itself
    version = context.versions["transformers"].text
    return True if in_range(version, "<5") else False if in_range(version, ">=5.24") else None


def _wraps_itself(statements: Statements) -> bool | None:
    scripts = statements.of(Kind.SCRIPT)
    return any(document.has("get_peft_model") for document in scripts) if scripts else None


def _places_model(statements: Statements) -> bool | None:
    value = statements.value("device_map")
    return None if value is None else bool(value)


def _storage_matches(statements: Statements) -> bool | None:
    """Whether 4-bit codes are stored in the type that is computed in; None for what only a run can tell."""
    held = statements.of(Kind.QUANTIZATION)
    if _axolotl(statements):
        return None  # it chooses the type of the storage by itself
    if statements.first("quant_storage") is None and any(item.has("bnb_4bit_quant_storage") for item in held):
        return None
    storage = str(statements.value("quant_storage") or "uint8").lower().removeprefix("torch.")
    names = {"bf16": "bfloat16", "fp16": "float16"}
    precision = _precision(statements)
    return storage == names.get(precision or "", storage) and storage in ("bfloat16", "float16", "float32")


def _hpz_differs(context: Context, hpz: Any) -> bool | None:
    if not isinstance(hpz, int) or hpz <= 1:
        return None
    per_node = context.given.gpus_per_node or context.statements.value("processes_per_node")
    if per_node is None:
        world, nodes = processes(context), context.statements.value("nodes")
        per_node = world.value // nodes if world is not None and isinstance(nodes, int) and nodes > 0 else None
    return None if per_node is None else per_node != hpz


def _client_optimizer(statements: Statements, optimizer: str) -> bool | None:
    """Whether an optimizer that DeepSpeed did not make would step on states that it keeps in host memory."""
    if not optimizer or statements.first("engine_optimizer") is not None:
        return None
    if statements.value("force_cpu_optimizer") is False:
        return None
    return not optimizer.startswith("adamw_torch") and optimizer not in ("adamw_hf", "adamw")


def _embeddings_whole(statements: Statements) -> bool | None:
    modules = statements.value("modules_to_save")
    return None if modules is None else bool(_tables_in(modules))


def _tables_in(modules: Any) -> frozenset[str]:
    """Returns the names of embeddings and heads among those of modules."""
    names = modules if isinstance(modules, list) else str(modules or "").split(",")
    tables = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "word_embeddings")
    return frozenset(last for name in names if (last := str(name).strip().rpartition(".")[2]) in tables)


def _on(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _leaf_named(statements: Statements) -> bool:
    if statements.first("moe_classes") is not None:
        return True
    return any(document.has("zero_optimization", "leaf_module") for document in statements.of(Kind.DEEPSPEED))


def _wraps_by_class(statements: Statements, engine: str | None) -> bool | None:
    """Whether FSDP is told how to cut the model: by class, by size, or by what the model says of itself."""
    if engine != "fsdp" or not statements.of(Kind.FSDP):
        return None
    policy = str(statements.value("wrap_policy") or "").upper()
    return policy not in ("", "NO_WRAP") or statements.first("wrap_class") is not None


def _collects_logits(statements: Statements) -> bool | None:
    """Whether a script asks for metrics of the predictions, and lets them pile up on the GPU."""
    asked = any(
        document.has("trainer_arguments", "compute_metrics")
        and not document.has("trainer_arguments", "preprocess_logits_for_metrics")
        for document in statements.of(Kind.SCRIPT)
    )
    arguments = statements.of(Kind.ARGUMENTS)
    moved = any(document.has("eval_accumulation_steps") or document.has("batch_eval_metrics") for document in arguments)
    only_loss = any(document.value("prediction_loss_only") is True for document in arguments)
    return (asked and not moved and not only_loss) if statements.of(Kind.SCRIPT) else None


def _strategies_differ(statements: Statements) -> bool | None:
    saving, evaluating = statements.first("save_strategy"), statements.first("eval_strategy")
    if statements.value("load_best_model_at_end") is not True or saving is None or saving.value == "best":
        return None
    other: Stated | None = evaluating
    return other is None or str(other.value).lower() != str(saving.value).lower()
