"""What helps against each cause, cheapest first; and against each account, in the order of the ladder."""

from __future__ import annotations

from memc.diagnose.records import Cause
from memc.ledger.entries import Account

_RERUN = "after each change run again, measure the peak and note the configuration"

BY_ACCOUNT: dict[Account, tuple[str, ...]] = {
    Account.PARAMETERS: (
        "train adapters instead of all weights (method lora), over a 4-bit base (qlora) when that is not enough",
        "divide weights over several GPUs (ZeRO-3 or FSDP)",
        "move the optimizer, then weights, to host memory",
        "use a smaller model",
    ),
    Account.MASTER_WEIGHTS: (
        "divide masters over several GPUs (ZeRO-1 or 2)",
        "train adapters instead of all weights (method lora)",
        "move masters and optimizer to host memory",
    ),
    Account.GRADIENTS: (
        "divide gradients over several GPUs (ZeRO-2)",
        "train adapters instead of all weights (method lora)",
    ),
    Account.OPTIMIZER_STATES: (
        "divide optimizer states over several GPUs (ZeRO-1 or 2)",
        "keep them in 8 bits (adamw_8bit)",
        "train adapters instead of all weights (method lora)",
        "move them to host memory",
    ),
    Account.ACTIVATIONS: (
        "halve the micro-batch and double gradient accumulation: same result, nearly no cost",
        "compute the loss in tiles instead of keeping all logits",
        "recompute activations (activation checkpointing), every layer when every other is not enough",
        "shorten max_length, or group samples by length",
    ),
    Account.WORKSPACE: (
        "set PYTORCH_ALLOC_CONF=expandable_segments:True (PYTORCH_CUDA_ALLOC_CONF before torch 2.9)",
        "use smaller reduction and gathering buckets",
    ),
}

BY_CAUSE: dict[Cause, tuple[str, ...]] = {
    Cause.OTHER_PROCESS: (
        "end the other process, or pick a free card with CUDA_VISIBLE_DEVICES (nvidia-smi shows who uses which)",
        "write what is left as memory.target in the spec when the card must be shared",
    ),
    Cause.FRAGMENTATION: (
        "set PYTORCH_ALLOC_CONF=expandable_segments:True (PYTORCH_CUDA_ALLOC_CONF before torch 2.9)",
        "pad to few different lengths, or pack, so that blocks can be used again",
    ),
    Cause.ALLOCATOR_LIMIT: ("raise or remove torch.cuda.set_per_process_memory_fraction",),
    Cause.LONG_SAMPLE: (
        "lower data.max_length, so that longer samples are cut",
        "group samples by length, or bound the tokens of a batch rather than its samples",
        "use sdpa or flash attention: eager attention grows with the square of the length",
        "halve the micro-batch and double gradient accumulation",
    ),
    Cause.LOGITS: (
        "compute the loss in tiles (pin.loss: chunked, or a fused linear cross-entropy)",
        "halve the micro-batch and double gradient accumulation",
    ),
    Cause.GROWTH: (
        "keep numbers, not tensors: loss.item() or detach() before anything is stored over steps",
        *BY_ACCOUNT[Account.ACTIVATIONS],
        "set PYTORCH_ALLOC_CONF=expandable_segments:True against fragmentation",
    ),
    Cause.EVALUATION: (
        "lower per_device_eval_batch_size (pin.eval_batch_size)",
        "set prediction_loss_only, or eval_accumulation_steps so that logits move to the host",
        "compute the loss in tiles",
    ),
    Cause.GATHER: (
        "save sharded checkpoints (stage3_gather_16bit_weights_on_model_save: false) and merge them afterwards",
        "leave headroom for the gathered weights: lower memory.target",
    ),
    Cause.BUCKETS: (
        "use smaller reduction and gathering buckets (pin.reduce_bucket_size, pin.allgather_bucket_size)",
        "set pin.overlap_comm: false, which needs one bucket instead of two",
        "leave NCCL a few hundred MiB per process: lower memory.target",
    ),
    Cause.LIBRARY: (
        "leave the card headroom: lower memory.target, since libraries allocate outside torch's allocator",
        *BY_ACCOUNT[Account.ACTIVATIONS],
    ),
    Cause.CONTEXT: (
        "end other processes on the card (nvidia-smi shows them); a context alone needs some hundred MiB",
        "start one process per GPU, and set the device before the first CUDA call",
    ),
    Cause.KV_CACHE: (
        "keep the key/value cache in 8 bits or fewer",
        "limit the context and the number of requests at once",
        "share the cache of common prefixes",
        "load the weights in 8 or 4 bits",
    ),
    Cause.HOST: (
        "give the spec hardware.host_memory, so that the plan is checked against it",
        "offload less: the optimizer but not the weights, or neither",
        "start fewer data loader workers, and load weights once (ZeRO-3 init) instead of once per process",
    ),
    Cause.SHARED_MEMORY: (
        "give the container more shared memory (docker run --shm-size=16g, or --ipc=host)",
        "start fewer data loader workers",
    ),
    Cause.OVER_OPTIMISED: (
        "take back what is not needed: offload first, then checkpointing of every layer",
        "confirm that bf16 is on",
        "check that data loading keeps up (more dataloader workers)",
        "compile a spec: memc takes the fewest techniques that fit",
    ),
    Cause.IN_USE: ("nothing failed in what was read; give the log of the run that ran out of memory",),
}
for _cause, _account in (
    (Cause.STATIC, Account.PARAMETERS),
    (Cause.FIRST_STEP, Account.OPTIMIZER_STATES),
    (Cause.MASTERS, Account.MASTER_WEIGHTS),
    (Cause.BACKWARD, Account.ACTIVATIONS),
    (Cause.ACTIVATIONS, Account.ACTIVATIONS),
):
    BY_CAUSE[_cause] = BY_ACCOUNT[_account]


def remedies(cause: Cause) -> tuple[str, ...]:
    """Returns what helps against a cause, cheapest first, and the rule that ends every cure."""
    return (*BY_CAUSE[cause], _RERUN)
