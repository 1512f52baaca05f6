"""The clock: seconds of one optimizer step from operations, bytes and achievable rates."""

from __future__ import annotations

from collections import Counter

from memc.clock.constants import ClockFacts
from memc.clock.flops import micro_batch_flops
from memc.clock.steptime import StepTime
from memc.config import Engine, LossHead, Method, Offload, Optimizer, TrainingConfig
from memc.facts.records import Block, ModelFacts
from memc.ledger.activations import saved_per_token
from memc.ledger.layer import LayerMode, layer_mode
from memc.ledger.states import ParamCounts

_KERNELS_PER_LAYER = 60
_ADAM_BYTES = 28
_ADAM_8BIT_BYTES = 16


class Clock:
    """Times configurations of one model on one machine."""

    def __init__(self, model: ModelFacts, facts: ClockFacts) -> None:
        self.model = model
        self.facts = facts
        shapes = Counter[Block]()
        for group in model.groups:
            shapes[group.block] += group.count
        self._blocks = tuple(shapes.items())
        self._saved: dict[LayerMode, tuple[int, ...]] = {}

    def step_time(
        self,
        config: TrainingConfig,
        counts: ParamCounts,
        *,
        total_steps: int | None = None,
        length_share: float = 1.0,
        usd_per_gpu_hour: float | None = None,
    ) -> StepTime:
        """Returns the time of one optimizer step, and of the run when its steps are known.

        Args:
            config: What runs.
            counts: Its element counts.
            total_steps: Optimizer steps of the run; None when unknown.
            length_share: Mean tokens of a sequence over max_length; shortens the work of a mean step.
            usd_per_gpu_hour: Price of one GPU; None when unknown.

        Assumes: every sample has max_length tokens in the timed step; overlap as stated in `assumptions`.
        Source: rates of `ClockFacts`, each with its source in specs/.
        """
        facts, steps = self.facts, config.gradient_accumulation_steps
        compute = steps * micro_batch_flops(self.model, config).total / facts.flops_per_second
        bandwidth = steps * self._memory_bound(config) + self._optimizer(config, counts)
        floor = steps * self._launch_floor(config)
        compute = max(compute, floor - bandwidth)
        transfers = self._communication(config, counts), self._transfers(config, counts)
        exposed, offload = (max(0.0, seconds - facts.overlap * compute) for seconds in transfers)
        host = self._cpu_adam(config, counts)
        shorter = max(compute * length_share, floor - bandwidth * length_share)
        waits = sum(max(0.0, seconds - facts.overlap * shorter) for seconds in transfers)
        mean = shorter + bandwidth * length_share + waits + host
        total = None if total_steps is None else total_steps * mean
        usd = None
        if total is not None and usd_per_gpu_hour is not None:
            usd = total / 3600 * usd_per_gpu_hour * config.world_size
        return StepTime(
            compute_seconds=compute,
            bandwidth_seconds=bandwidth,
            communication_seconds=exposed,
            offload_seconds=offload + host,
            tokens_per_step=config.micro_batch_tokens * steps * config.world_size,
            world_size=config.world_size,
            total_seconds=total,
            total_usd=usd,
            assumptions=facts.assumptions,
        )

    def _memory_bound(self, config: TrainingConfig) -> float:
        """Returns seconds of one micro-batch in element-wise work, the loss and dequantisation.

        Every tensor that a layer keeps is written once and read twice in forward (by the next operation and by
        backward); backward moves about as much for gradients; recomputation repeats the forward share.
        """
        mode, tokens = layer_mode(config), config.micro_batch_tokens
        share = 1 / config.checkpoint_every if config.checkpoint_every else 0.0
        moved = sum(int(size * tokens * (4 + 2 * share)) for size in self._saved_per_token(mode))
        if config.loss is LossHead.PLAIN:
            moved += 40 * tokens * self.model.vocab_size
        else:
            moved += 12 * tokens * self.model.vocab_size
        if config.method is Method.QLORA:
            passes = 2 + (1 / config.checkpoint_every if config.checkpoint_every else 0)
            linears = sum(lin.weight_params * group.count for group in self.model.groups for lin in group.block.linears)
            moved += int(passes * linears * 2.5)
        return moved / self.facts.memory_bytes_per_second

    def _saved_per_token(self, mode: LayerMode) -> tuple[int, ...]:
        """Returns bytes per token that all layers of each shape keep; few modes occur among many configurations."""
        if mode not in self._saved:
            self._saved[mode] = tuple(saved_per_token(block, mode) * count for block, count in self._blocks)
        return self._saved[mode]

    def _optimizer(self, config: TrainingConfig, counts: ParamCounts) -> float:
        """Returns seconds that the GPU optimizer needs to read and write weights, gradients and moments."""
        if config.zero is not None and config.zero.offload_optimizer is not Offload.NONE:
            return 0.0
        ranks = config.world_size if config.zero is not None and config.zero.stage else 1
        eight_bit = config.optimizer in (Optimizer.ADAMW_8BIT, Optimizer.PAGED_ADAMW_8BIT)
        size = _ADAM_8BIT_BYTES if eight_bit else _ADAM_BYTES
        return size * counts.trainable / ranks / self.facts.memory_bytes_per_second

    def _launch_floor(self, config: TrainingConfig) -> float:
        """Returns the least seconds of one micro-batch: the host has to launch every kernel."""
        passes = 3 + (1 / config.checkpoint_every if config.checkpoint_every else 0)
        if config.lora is not None:
            passes *= 1.5
        return passes * self.model.num_layers * _KERNELS_PER_LAYER * self.facts.kernel_launch_seconds

    def _communication(self, config: TrainingConfig, counts: ParamCounts) -> float:
        """Returns seconds of collectives of one optimizer step over the bus between the GPUs.

        All-reduce of gradients moves 2(N-1)/N of their bytes, reduce-scatter and all-gather half of that each.
        ZeRO-3 gathers parameters in forward and in backward of every micro-batch.
        """
        ranks = config.world_size
        if ranks == 1:
            return 0.0
        factor, steps = (ranks - 1) / ranks, config.gradient_accumulation_steps
        size = 2 if config.engine is Engine.DEEPSPEED or config.lora is None else 4
        gradients = size * counts.trainable * factor
        if config.zero_stage == 0:
            volume = 2 * gradients
        elif config.zero_stage == 1:
            volume = 2 * gradients + 2 * counts.trainable * factor
        elif config.zero_stage == 2:
            volume = steps * gradients + 2 * counts.trainable * factor
        else:
            volume = steps * (gradients + 2 * 2 * (counts.total + counts.adapters) * factor)
        return volume / self.facts.bus_bytes_per_second

    def _transfers(self, config: TrainingConfig, counts: ParamCounts) -> float:
        """Returns seconds of PCIe traffic of one optimizer step on one GPU."""
        zero = config.zero
        if zero is None:
            if config.optimizer is Optimizer.PAGED_ADAMW_8BIT:
                return 2 * 2.1 * counts.trainable / self.facts.pcie_bytes_per_second
            return 0.0
        share = counts.trainable / (config.world_size if zero.stage else 1)
        moved = 0.0
        if zero.offload_optimizer is Offload.CPU:
            moved += config.gradient_accumulation_steps * 2 * share + 2 * share
        if zero.offload_param is Offload.CPU:
            total = (counts.total + counts.adapters) / config.world_size
            moved += config.gradient_accumulation_steps * 2 * 2 * total
        return moved / self.facts.pcie_bytes_per_second

    def _cpu_adam(self, config: TrainingConfig, counts: ParamCounts) -> float:
        """Returns seconds of the optimizer step on the host, which all ranks of a node share."""
        zero = config.zero
        if zero is None or zero.offload_optimizer is not Offload.CPU:
            return 0.0
        return counts.trainable / config.nodes / self.facts.host_params_per_second
