"""How each kind of file spells what it states: key path → name of a value, in the words of the spec if it has one."""

from __future__ import annotations

from collections.abc import Mapping

from memc.lint.records import Kind

Paths = Mapping[tuple[str, ...], str]


def _paths(text: str) -> Paths:
    """Returns the pairs of a text of lines `dotted.key name`."""
    pairs = (line.split() for line in text.strip().splitlines())
    return {tuple(key.split(".")): name for key, name in pairs}


ARGUMENTS = _paths("""
learning_rate learning_rate
weight_decay weight_decay
adam_beta1 adam_beta1
adam_beta2 adam_beta2
adam_epsilon adam_epsilon
max_grad_norm gradient_clipping
warmup_steps warmup_steps
warmup_ratio warmup_ratio
max_steps max_steps
num_train_epochs epochs
per_device_train_batch_size micro_batch_size
per_gpu_train_batch_size micro_batch_size
per_device_eval_batch_size eval_batch_size
per_gpu_eval_batch_size eval_batch_size
gradient_accumulation_steps gradient_accumulation_steps
bf16 bf16
fp16 fp16
tf32 tf32
gradient_checkpointing activation_checkpointing
activation_checkpointing activation_checkpointing
gradient_checkpointing_kwargs.use_reentrant use_reentrant
activation_checkpointing_kwargs.use_reentrant use_reentrant
optim optimizer
lr_scheduler_type scheduler
save_strategy save_strategy
save_steps save_steps
save_only_model save_only_model
load_best_model_at_end load_best_model_at_end
eval_strategy eval_strategy
evaluation_strategy eval_strategy
do_eval do_eval
eval_steps eval_steps
max_length max_length
max_seq_length max_length
packing packing
auto_find_batch_size auto_find_batch_size
ddp_find_unused_parameters ddp_find_unused_parameters
model_name_or_path model
attn_implementation attention
torch_dtype weights_dtype
dtype weights_dtype
model_init_kwargs.attn_implementation attention
model_init_kwargs.torch_dtype weights_dtype
model_init_kwargs.dtype weights_dtype
model_init_kwargs.device_map device_map
device_map device_map
load_in_4bit load_in_4bit
load_in_8bit load_in_8bit
bnb_4bit_quant_storage quant_storage
use_peft use_peft
lora_r lora_rank
lora_alpha lora_alpha
lora_target_modules target_modules
lora_modules_to_save modules_to_save
fsdp_transformer_layer_cls_to_wrap wrap_class
""")
AXOLOTL = _paths("""
learning_rate learning_rate
weight_decay weight_decay
adam_beta2 adam_beta2
adam_epsilon adam_epsilon
max_grad_norm gradient_clipping
warmup_steps warmup_steps
warmup_ratio warmup_ratio
max_steps max_steps
num_epochs epochs
micro_batch_size micro_batch_size
eval_batch_size eval_batch_size
gradient_accumulation_steps gradient_accumulation_steps
bf16 bf16
fp16 fp16
tf32 tf32
gradient_checkpointing activation_checkpointing
gradient_checkpointing_kwargs.use_reentrant use_reentrant
optimizer optimizer
save_strategy save_strategy
save_steps save_steps
evals_per_epoch eval_steps
eval_steps eval_steps
fsdp_version fsdp_version
sequence_len max_length
sample_packing packing
base_model model
load_in_4bit load_in_4bit
load_in_8bit load_in_8bit
adapter adapter
lora_r lora_rank
lora_alpha lora_alpha
lora_target_modules target_modules
lora_modules_to_save modules_to_save
flash_attention flash_attention
attn_implementation attention
""")
FACTORY = {
    **ARGUMENTS,
    **_paths("""
cutoff_len max_length
finetuning_type adapter
flash_attn attention
quantization_bit quantization_bit
lora_rank lora_rank
lora_target target_modules
additional_target modules_to_save
val_size validation_share
"""),
}
DEEPSPEED = _paths("""
train_batch_size train_batch_size
train_micro_batch_size_per_gpu micro_batch_size
gradient_accumulation_steps gradient_accumulation_steps
gradient_clipping gradient_clipping
optimizer.type engine_optimizer
optimizer.params.lr learning_rate
optimizer.params.eps adam_epsilon
optimizer.params.weight_decay weight_decay
scheduler.type engine_scheduler
scheduler.params.warmup_num_steps warmup_steps
scheduler.params.total_num_steps max_steps
scheduler.params.warmup_max_lr learning_rate
bf16.enabled bf16
bfloat16.enabled bf16
fp16.enabled fp16
zero_optimization.stage zero_stage
zero_optimization.offload_optimizer.device offload_optimizer
zero_optimization.offload_optimizer.nvme_path nvme_path
zero_optimization.offload_optimizer.buffer_count nvme_state_buffers
zero_optimization.offload_param.device offload_param
zero_optimization.offload_param.nvme_path nvme_path
zero_optimization.offload_param.buffer_size nvme_buffer_elements
zero_optimization.offload_param.buffer_count nvme_buffers
zero_optimization.stage3_gather_16bit_weights_on_model_save gathers_on_save
zero_optimization.gather_16bit_weights_on_model_save gathers_on_save
zero_optimization.stage3_gather_fp16_weights_on_model_save gathers_on_save
zero_optimization.zero_hpz_partition_size hpz_partition
zero_force_ds_cpu_optimizer force_cpu_optimizer
activation_checkpointing.partition_activations engine_checkpointing
""")
ACCELERATE = _paths("""
mixed_precision mixed_precision
num_processes num_processes
num_machines nodes
machine_rank machine_rank
gradient_accumulation_steps gradient_accumulation_steps
deepspeed_config.zero_stage zero_stage
deepspeed_config.gradient_accumulation_steps gradient_accumulation_steps
deepspeed_config.gradient_clipping gradient_clipping
deepspeed_config.offload_optimizer_device offload_optimizer
deepspeed_config.offload_param_device offload_param
deepspeed_config.offload_param_nvme_path nvme_path
deepspeed_config.offload_optimizer_nvme_path nvme_path
deepspeed_config.zero3_init_flag zero3_init
deepspeed_config.zero3_save_16bit_model gathers_on_save
deepspeed_config.deepspeed_multinode_launcher multinode_launcher
deepspeed_config.deepspeed_hostfile hostfile
deepspeed_config.deepspeed_moe_layer_cls_names moe_classes
""")
FSDP = _paths("""
version fsdp_version
transformer_layer_cls_to_wrap wrap_class
auto_wrap_policy wrap_policy
activation_checkpointing fsdp_checkpointing
offload_params fsdp_offload
cpu_offload fsdp_offload
use_orig_params use_orig_params
sync_module_states sync_module_states
cpu_ram_efficient_loading efficient_loading
sharding_strategy sharding_strategy
reshard_after_forward reshard_after_forward
state_dict_type state_dict_type
forward_prefetch forward_prefetch
backward_prefetch backward_prefetch
""")
ADAPTER = _paths("""
r lora_rank
lora_alpha lora_alpha
target_modules target_modules
modules_to_save modules_to_save
trainable_token_indices trainable_token_indices
base_model_name_or_path model
""")
QUANTIZATION = _paths("""
load_in_4bit load_in_4bit
load_in_8bit load_in_8bit
bnb_4bit_quant_storage quant_storage
bnb_4bit_compute_dtype quant_compute_dtype
""")
LAUNCHERS: Mapping[str, Paths] = {
    "accelerate": _paths("""
num_processes num_processes
num_machines nodes
machine_rank machine_rank
mixed_precision mixed_precision
gradient_accumulation_steps gradient_accumulation_steps
gradient_clipping gradient_clipping
zero_stage zero_stage
offload_optimizer_device offload_optimizer
offload_param_device offload_param
zero3_init_flag zero3_init
zero3_save_16bit_model gathers_on_save
deepspeed_multinode_launcher multinode_launcher
deepspeed_hostfile hostfile
fsdp_version fsdp_version
fsdp_transformer_layer_cls_to_wrap wrap_class
fsdp_auto_wrap_policy wrap_policy
fsdp_offload_params fsdp_offload
fsdp_activation_checkpointing fsdp_checkpointing
"""),
    "torchrun": _paths("""
nproc_per_node processes_per_node
nnodes nodes
node_rank machine_rank
"""),
    "deepspeed": _paths("""
num_gpus processes_per_node
num_nodes nodes
hostfile hostfile
"""),
}
SLURM = _paths("""
nodes slurm_nodes
ntasks_per_node slurm_tasks_per_node
ntasks slurm_tasks
gpus_per_node slurm_gpus_per_node
gpus_per_task slurm_gpus_per_task
gres slurm_gres
""")


def paths_of(kind: Kind, dialect: str) -> Paths:
    """Returns how documents of a kind spell what they state."""
    if kind is Kind.ARGUMENTS:
        return {"axolotl": AXOLOTL, "llama-factory": FACTORY}.get(dialect, ARGUMENTS)
    if kind is Kind.LAUNCH:
        return LAUNCHERS.get(dialect, {})
    return {
        Kind.DEEPSPEED: DEEPSPEED,
        Kind.ACCELERATE: ACCELERATE,
        Kind.FSDP: FSDP,
        Kind.ADAPTER: ADAPTER,
        Kind.QUANTIZATION: QUANTIZATION,
        Kind.SLURM: SLURM,
    }.get(kind, {})
