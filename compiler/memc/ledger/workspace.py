"""What surrounds the tensors on the GPU: cuBLAS workspaces, CUDA context, NCCL, what the allocator rounds away."""

from __future__ import annotations

from memc.config import LossHead, Method, TrainingConfig
from memc.facts.records import ModelFacts
from memc.ledger.constants import LedgerFacts
from memc.ledger.entries import Account, Entry, Moment, Resource
from memc.ledger.parts import ALWAYS, gpu_entry

_RUNNING = ALWAYS - {Moment.LOAD}


def workspace_entries(model: ModelFacts, config: TrainingConfig, facts: LedgerFacts) -> list[Entry]:
    """Returns the workspace entries of one GPU, inside and outside the allocator."""
    stranded = 0 if config.expandable_segments else _largest_tensor(model, config)
    entries = [
        gpu_entry(
            "cublas-workspaces",
            Account.WORKSPACE,
            2 * facts.cublas_workspace_bytes,
            _RUNNING,
            f"2 threads (forward, autograd) x {facts.cublas_workspace_bytes} B",
            "torch CUDABlas.cpp getChosenWorkspaceSize",
        ),
        Entry(
            name="cuda-context",
            account=Account.WORKSPACE,
            resource=Resource.GPU,
            bytes=facts.context_bytes,
            moments=ALWAYS,
            formula=f"{facts.context_bytes} B measured, outside torch's allocator",
            source=facts.context_source,
            in_allocator=False,
            uncertainty_bytes=facts.context_spread_bytes,
            uncertainty="varies with driver and loaded libraries",
        ),
        Entry(
            name="allocator-rounding",
            account=Account.WORKSPACE,
            resource=Resource.GPU,
            bytes=facts.segment_bytes,
            moments=ALWAYS,
            formula=f"{facts.segment_bytes} B: the end of the large pool that no block fills",
            source="torch CUDACachingAllocator.cpp",
            in_allocator=False,
            uncertainty_bytes=facts.segment_bytes
            + (0 if config.expandable_segments else _largest_tensor(model, config)),
            uncertainty="holes depend on the order of allocations"
            + ("" if not stranded else "; fixed segments can strand one of the largest tensor"),
        ),
    ]
    if config.world_size > 1:
        entries.append(
            Entry(
                name="nccl-buffers",
                account=Account.WORKSPACE,
                resource=Resource.GPU,
                bytes=facts.nccl_bytes,
                moments=ALWAYS,
                formula=f"{facts.nccl_bytes} B of channel buffers, outside torch's allocator",
                source="specs/libraries/nccl.yaml",
                in_allocator=False,
                uncertainty_bytes=facts.nccl_bytes,
                uncertainty="channels depend on topology",
            )
        )
    if config.method is Method.QLORA:
        largest = max(linear.weight_params for group in model.groups for linear in group.block.linears)
        apart = config.quantizes_layer_by_layer  # what is being quantised stands beside the layer that is cut
        entries.append(
            gpu_entry(
                "dequantized-weight",
                Account.WORKSPACE,
                2 * largest,
                # That of a step is part of its layers.
                frozenset({Moment.EVALUATE}) if apart else frozenset({Moment.EVALUATE, Moment.LOAD}),
                f"2 B x {largest} elements of the largest 4-bit linear",
                "bitsandbytes autograd MatMul4Bit",
            )
        )
    return entries


def _largest_tensor(model: ModelFacts, config: TrainingConfig) -> int:
    """Returns the bytes of the largest tensor of the step that is freed and asked for again: logits, or MLP inner."""
    widest = max(group.block.mlp.intermediate for group in model.groups)
    if config.loss is LossHead.PLAIN:
        widest = max(widest, 2 * model.vocab_size)
    return 2 * widest * config.micro_batch_tokens
