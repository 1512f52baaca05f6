"""What is known of GPUs, models and libraries: frozen records with sources, and the loaders of specs/."""

from memc.facts.adapters import default_lora_targets, lora_params
from memc.facts.architectures import architecture_keys, ledger_described
from memc.facts.gpus import GpuRow, gpu_keys, gpu_rows, load_gpu
from memc.facts.libraries import fact_keys, facts_read, load_fact
from memc.facts.models import (
    ModelRow,
    load_model,
    load_model_config,
    model_from_config,
    model_keys,
    model_rows,
)
from memc.facts.records import (
    AttentionFacts,
    Block,
    BlockGroup,
    Component,
    Fact,
    GpuFacts,
    Linear,
    MlpFacts,
    ModelFacts,
    Norm,
    NormKind,
    Objective,
    Sees,
    Stack,
    Tensor,
)

__all__ = [
    "AttentionFacts",
    "Block",
    "BlockGroup",
    "Component",
    "Fact",
    "GpuFacts",
    "GpuRow",
    "Linear",
    "MlpFacts",
    "ModelFacts",
    "ModelRow",
    "Norm",
    "NormKind",
    "Objective",
    "Sees",
    "Stack",
    "Tensor",
    "architecture_keys",
    "default_lora_targets",
    "fact_keys",
    "facts_read",
    "gpu_keys",
    "gpu_rows",
    "ledger_described",
    "load_fact",
    "load_gpu",
    "load_model",
    "load_model_config",
    "lora_params",
    "model_from_config",
    "model_keys",
    "model_rows",
]
