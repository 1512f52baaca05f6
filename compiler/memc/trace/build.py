"""The model that the emitted script would train, without data behind its parameters."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import torch
import transformers
from transformers.initialization import no_init_weights

from memc.config import AdapterPrecision, BasePrecision, Engine, LossHead, Method, Precision, Task, TrainingConfig
from memc.errors import usage_error
from memc.facts.architectures import architecture_keys, load_architecture
from memc.facts.vocabulary import vocabulary_modules
from memc.trace.optional import library
from memc.trace.quantized import is_packed, quantize, stored_nf4
from memc.trace.records import Region
from memc.trace.stacks import StackDepth, full_depths, shorten, stacks_of
from memc.trace.tape import Tape

Given = transformers.PretrainedConfig | dict[str, Any]

_AUTO_CLASSES = (
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForMaskedLM",
    "AutoModelForImageClassification",
    "AutoModel",
)


def model_config(given: Given) -> Any:
    """Returns a transformers config of its own; one given by its fields must name its `model_type`."""
    if isinstance(given, dict):
        fields = dict(given)
        whole: Any = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    else:
        whole = copy.deepcopy(given)
    for settings in (whole, whole.get_text_config()):
        settings.use_cache = False
    return whole


def model_class(settings: Any) -> Any:
    """Returns the class that the config names, or the choice of the auto class that its family is described for.

    A family without a description gets the first auto class' choice of one with a loss.

    Raises:
        MemcError: `trace-model-unknown`, when transformers has no model for the config.
    """
    for name in getattr(settings, "architectures", None) or ():
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    for name in (*_described_class(settings.model_type), *_AUTO_CLASSES):
        mapping = getattr(transformers, name)._model_mapping
        if type(settings) in mapping:
            found = mapping[type(settings)]
            return found[0] if isinstance(found, tuple) else found
    raise usage_error(
        "trace-model-unknown",
        f"transformers {transformers.__version__} has no model for model_type {settings.model_type!r}",
        hint="upgrade transformers, or skip the trace with --no-certify",
    )


def _described_class(model_type: str) -> tuple[str, ...]:
    """Returns the auto class that a family's description names; empty where there is no description."""
    if model_type not in architecture_keys():
        return ()
    return (str(load_architecture(model_type).get("auto_class", _AUTO_CLASSES[0])),)


def base_dtype(config: TrainingConfig) -> torch.dtype:
    """Returns the data type that the script loads base weights in."""
    if config.precision is Precision.FP32 or config.base_precision is BasePrecision.FP32:
        return torch.float32
    half = torch.float16 if config.precision is Precision.FP16 else torch.bfloat16
    if config.base_precision is BasePrecision.HALF:
        return half
    trains_fp32 = config.method is Method.FULL and uses_autocast(config)
    return torch.float32 if trains_fp32 else half


def uses_autocast(config: TrainingConfig) -> bool:
    """Returns whether accelerate wraps the forward in autocast.

    Source: accelerate/accelerator.py, native_amp is set for mixed precision except under DeepSpeed.
    """
    return config.precision in (Precision.BF16, Precision.FP16) and config.engine is not Engine.DEEPSPEED


def build(config: TrainingConfig, given: Given, *, shallow: bool) -> tuple[Any, tuple[StackDepth, ...]]:
    """Returns the model on the meta device, with adapters, 4-bit linears and checkpointing as configured.

    With `shallow`, layers that repeat others are left out; the second value says which stand for how many.
    """
    settings = model_config(given)
    if config.task is Task.CLASSIFICATION:
        settings.num_labels = config.classes
        settings.get_text_config().pad_token_id = settings.get_text_config().pad_token_id or 0  # the script sets it
        automatic: Any = transformers.AutoModelForSequenceClassification._model_mapping[type(settings)]
    else:
        automatic = model_class(settings)
    with torch.device("meta"), no_init_weights(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = automatic._from_config(
                settings, dtype=base_dtype(config), attn_implementation=config.attention.value
            )
        except ValueError as refused:
            if "attention implementation" not in str(refused):
                raise
            raise usage_error(
                "trace-attention-unsupported",
                f"{automatic.__name__} has no {config.attention.value} attention in transformers "
                f"{transformers.__version__}",
                hint="set `attention: eager`",
            ) from refused
        model.tie_weights()
        model.train()
        if config.checkpoint_every:
            reentrant = config.zero_stage == 3 and config.lora is not None
            model.activation_checkpointing_enable(
                {"use_reentrant": reentrant},
                every_n_layers=config.checkpoint_every,
                offload=config.checkpoint_offload,
            )
        depths = shorten(model) if shallow else full_depths(model)
        if config.method is Method.QLORA:
            quantize(model, config, base_dtype(config))
            if config.upcast_unquantized:
                _upcast(model)
        wrapped = _with_adapters(model, config) if config.lora is not None else model
        if config.loss is LossHead.CHUNKED:
            _fuse_head(model, config)
        if config.checkpoint_every and config.lora is not None:
            model.enable_input_require_grads()
    named = zip(depths, stacks_of(wrapped), strict=True)
    return wrapped, tuple(replace(depth, name=name) for depth, name in named)


def _upcast(model: torch.nn.Module) -> None:
    """Casts what is not quantised to fp32 (peft/utils/other.py, prepare_model_for_kbit_training)."""
    for parameter in model.parameters():
        if parameter.dtype in (torch.float16, torch.bfloat16) and type(parameter).__name__ != "Params4bit":
            parameter.data = parameter.data.to(torch.float32)


def _with_adapters(model: Any, config: TrainingConfig) -> Any:
    peft = library("peft", "adapters")
    lora = config.lora
    assert lora is not None
    follow_base = lora.precision is AdapterPrecision.BASE
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.target_modules),
        exclude_modules=lora.excluded_modules or None,
        **_vocabulary_settings(model, config),
    )
    if lora.new_tokens:
        wrapper = library("peft.utils.other", "adapters").TrainableTokensWrapper
        wrapper.bias = property(lambda self: getattr(self.original_module, "bias", None))  # as the script does
    wrapped = peft.get_peft_model(model, settings, autocast_adapter_dtype=not follow_base)
    wanted = adapter_dtype(config)
    for parameter in wrapped.parameters():
        if parameter.requires_grad and parameter.dtype is not wanted:
            parameter.data = parameter.data.to(wanted)
    return wrapped


def _vocabulary_settings(model: Any, config: TrainingConfig) -> dict[str, Any]:
    """Returns what PEFT is told of modules outside the layers that train beside the adapters."""
    lora, text = config.lora, model.config.get_text_config()
    assert lora is not None
    if lora.new_tokens:
        names = vocabulary_modules(text.model_type)
        modules = [names.embedding] if text.tie_word_embeddings else [names.embedding, names.head]
        return {"trainable_token_indices": {module: list(range(lora.new_tokens)) for module in modules}}
    if not lora.modules_to_save:
        return {}
    tied = text.tie_word_embeddings and config.task is not Task.CLASSIFICATION
    return {"modules_to_save": list(lora.modules_to_save)} | ({"ensure_weight_tying": True} if tied else {})


def adapter_dtype(config: TrainingConfig) -> torch.dtype:
    """Returns the data type of adapters, which the script sets after PEFT and TRL have had their say.

    Source: deepspeed/runtime/engine.py (an engine's parameters share one 16-bit type), peft `autocast_adapter_dtype`.
    """
    assert config.lora is not None
    follow_base = config.engine is Engine.DEEPSPEED or config.lora.precision is AdapterPrecision.BASE
    return base_dtype(config) if follow_base else torch.float32


def _fuse_head(model: Any, config: TrainingConfig) -> None:
    """Gives the model TRL's fused head; SFTTrainer also asks it for entropy and accuracy."""
    outputs = {
        Task.SFT: ("log_probs", "entropy", "is_top1"),
        Task.DPO: ("log_probs", "entropy", "mean_logits", "is_top1"),
    }.get(config.task, ("log_probs",))
    library("trl.trainer.utils", "a chunked loss").add_fused_lm_head(model, outputs=outputs)


def place(model: torch.nn.Module, config: TrainingConfig, tape: Tape, regions: dict[str, Region]) -> None:
    """Gives every parameter and buffer a storage on the current device; tied tensors stay tied."""
    placed: dict[int, torch.Tensor] = {}
    outside = tape.outside
    for module_name, module in model.named_modules():
        with tape.inside(module_name, regions.get(module_name, outside)):
            if config.method is Method.QLORA and is_packed(module):
                module._parameters["weight"] = stored_nf4(module, config, base_dtype(config))
            for owner in (module._parameters, module._buffers):
                for name, tensor in list(owner.items()):
                    if tensor is not None and tensor.device.type == "meta":
                        if id(tensor) not in placed:
                            placed[id(tensor)] = _storage_like(tensor)
                        owner[name] = placed[id(tensor)]


def _storage_like(tensor: torch.Tensor) -> torch.Tensor:
    copy_ = torch.zeros(tensor.shape, dtype=tensor.dtype)
    return (
        torch.nn.Parameter(copy_, requires_grad=tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter)
        else copy_
    )
