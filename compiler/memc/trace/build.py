"""The model that the emitted script would train, without data behind its parameters."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer

from memc.config import AdapterPrecision, Engine, LossHead, Method, Precision, Task, TrainingConfig
from memc.trace.optional import library
from memc.trace.quantized import quantize, stored_nf4


def model_config(
    config: TrainingConfig, given: transformers.PretrainedConfig | dict[str, Any], layers: int | None
) -> Any:
    """Returns the text config of a model with the number of layers and the attention that are asked for."""
    if isinstance(given, dict):
        fields = dict(given)
        whole: Any = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    else:
        whole = copy.deepcopy(given)
    text = whole.get_text_config()
    if layers is not None:
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None):
            text.layer_types = _repeated(text.layer_types, layers)
    text.use_cache = False
    text._attn_implementation = config.attention.value
    return text


def _repeated(kinds: Sequence[str], layers: int) -> list[str]:
    """Returns the kinds of `layers` layers, by repeating the shortest pattern that `kinds` are made of."""
    pattern = next(p for p in range(1, len(kinds) + 1) if all(kinds[i] == kinds[i % p] for i in range(len(kinds))))
    return [kinds[i % pattern] for i in range(layers)]


def base_dtype(config: TrainingConfig) -> torch.dtype:
    """Returns the data type that the script loads base weights in."""
    if config.precision is Precision.FP32:
        return torch.float32
    half = torch.float16 if config.precision is Precision.FP16 else torch.bfloat16
    trains_fp32 = config.method is Method.FULL and uses_autocast(config)
    return torch.float32 if trains_fp32 else half


def uses_autocast(config: TrainingConfig) -> bool:
    """Returns whether accelerate wraps the forward in autocast.

    Source: accelerate/accelerator.py, native_amp is set for mixed precision except under DeepSpeed.
    """
    return config.precision in (Precision.BF16, Precision.FP16) and config.engine is not Engine.DEEPSPEED


def build(
    config: TrainingConfig, given: transformers.PretrainedConfig | dict[str, Any], layers: int | None
) -> torch.nn.Module:
    """Returns the model on the meta device, with adapters, 4-bit linears and checkpointing as configured."""
    text = model_config(config, given, layers)
    with torch.device("meta"), no_init_weights(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        automatic: Any = transformers.AutoModelForCausalLM
        model = automatic.from_config(text, dtype=base_dtype(config), attn_implementation=config.attention.value)
        model.tie_weights()
        model.train()
        if config.method is Method.QLORA:
            quantize(model, config, base_dtype(config))
        if config.lora is not None:
            model = _with_adapters(model, config)
        if config.loss is LossHead.CHUNKED:
            _fuse_head(model, config)
        if config.checkpoint_every:
            inner = model.get_base_model() if config.lora is not None else model
            inner.activation_checkpointing_enable(
                {"use_reentrant": config.zero_stage == 3 and config.lora is not None},
                every_n_layers=config.checkpoint_every,
            )
            if config.lora is not None:
                inner.enable_input_require_grads()
    result: torch.nn.Module = model
    return result


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
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(model, settings, autocast_adapter_dtype=not follow_base)
    wanted = adapter_dtype(config)
    for name, parameter in model.named_parameters():
        if "lora_" in name and parameter.dtype is not wanted:
            parameter.data = parameter.data.to(wanted)
    return model


def adapter_dtype(config: TrainingConfig) -> torch.dtype:
    """Returns the data type of adapters, which the script sets after PEFT and TRL have had their say.

    Source: deepspeed/runtime/engine.py (an engine's parameters share one 16-bit type), peft `autocast_adapter_dtype`.
    """
    assert config.lora is not None
    follow_base = config.engine is Engine.DEEPSPEED or config.lora.precision is AdapterPrecision.BASE
    return base_dtype(config) if follow_base else torch.float32


def _fuse_head(model: Any, config: TrainingConfig) -> None:
    """Gives the model TRL's fused head; SFTTrainer also asks it for entropy and accuracy."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    outputs = ("log_probs", "entropy", "is_top1") if config.task is Task.SFT else ("log_probs",)
    library("trl.trainer.utils", "a chunked loss").add_fused_lm_head(base, outputs=outputs)


def place(model: torch.nn.Module, config: TrainingConfig) -> None:
    """Gives every parameter and buffer a storage on the current device; tied tensors stay tied."""
    placed: dict[int, torch.Tensor] = {}
    for module in model.modules():
        if config.method is Method.QLORA and type(module).__name__ == "Linear4bit":
            module._parameters["weight"] = stored_nf4(module, config, base_dtype(config))
        for owner in (module._parameters, module._buffers):
            for name, tensor in list(owner.items()):
                if tensor is not None and tensor.device.type == "meta":
                    owner[name] = placed.setdefault(id(tensor), _storage_like(tensor))  # type: ignore[assignment]


def _storage_like(tensor: torch.Tensor) -> torch.Tensor:
    copy_ = torch.zeros(tensor.shape, dtype=tensor.dtype)
    return (
        torch.nn.Parameter(copy_, requires_grad=tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter)
        else copy_
    )


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the repeated layers, in order."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
