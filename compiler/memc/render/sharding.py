"""What accelerate.yaml says of FSDP, and which part of the work its plugin takes over from the model."""

from __future__ import annotations

from typing import Any

from memc.config import FsdpConfig, Method, Offload, Precision, TrainingConfig
from memc.facts.records import ModelFacts

AMP_OF_PRECISION = {
    Precision.BF16: "bf16",
    Precision.BF16_PURE: "no",
    Precision.FP16: "fp16",
    Precision.FP32: "no",
}


def fsdp_sections(config: TrainingConfig, model: ModelFacts, fsdp: FsdpConfig) -> dict[str, Any]:
    """Returns what accelerate.yaml says of FSDP: the plugin, and the device mesh where the ranks have several roles.

    Raises:
        ValueError: For version 1, which is priced only.
    """
    if fsdp.version != 2:
        raise ValueError("FSDP1 is not written")
    layers = sorted({group.block.layer_class for group in model.groups})
    sections: dict[str, Any] = {
        "distributed_type": "FSDP",
        "mixed_precision": AMP_OF_PRECISION[config.precision],
        "use_cpu": False,
        "fsdp_config": {
            "fsdp_version": fsdp.version,
            "fsdp_reshard_after_forward": fsdp.reshard_after_forward,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": ",".join(layers),
            "fsdp_offload_params": fsdp.offload is Offload.CPU,
            "fsdp_cpu_ram_efficient_loading": loads_on_one_rank(config),
            "fsdp_state_dict_type": "SHARDED_STATE_DICT" if fsdp.sharded_checkpoints else "FULL_STATE_DICT",
            "fsdp_activation_checkpointing": checkpoints_in_plugin(config),
            "fsdp_activation_checkpointing_offload": checkpoints_in_plugin(config) and config.checkpoint_offload,
        },
    }
    if fsdp.hybrid or config.context_parallel > 1:
        replicas = config.nodes if fsdp.hybrid else 1
        sections["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": replicas,
            "parallelism_config_dp_shard_size": config.world_size // (replicas * config.context_parallel),
            "parallelism_config_cp_size": config.context_parallel,
            "parallelism_config_tp_size": 1,
        }
    return sections


def loads_on_one_rank(config: TrainingConfig) -> bool:
    """Returns whether only the first rank of a node reads the checkpoint; a 4-bit base is quantised on every GPU."""
    return config.fsdp is not None and config.fsdp.efficient_loading and config.method is not Method.QLORA


def checkpoints_in_plugin(config: TrainingConfig) -> bool:
    """Returns whether FSDP's plugin, not the model, checkpoints activations.

    It knows every layer or none, and it renames the modules that it wraps: PEFT would find no adapter to save in them.
    """
    return config.fsdp is not None and config.checkpoint_every == 1 and config.lora is None
