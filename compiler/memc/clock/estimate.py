"""The clock: seconds of one optimizer step, and of a run, from operations, bytes and achievable rates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from memc.clock.collectives import Ring, pass_seconds
from memc.clock.constants import ClockFacts
from memc.clock.microbatch import MicroBatch, micro_batch
from memc.clock.schedule import Elements, Waits, waits
from memc.clock.steptime import StepTime
from memc.clock.workload import Compute, Layout, compute_of, gathers_weights, layout_of, reference_compute
from memc.config import Method, Reference, TrainingConfig
from memc.facts.records import ModelFacts
from memc.ledger.adapted import adapted_model
from memc.ledger.states import ParamCounts
from memc.units import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLength:
    """How long a run is.

    Attributes:
        steps: Optimizer steps.
        evaluations: How often it evaluates.
        evaluation_samples: Samples of one evaluation, all ranks together.
        saves: How often it writes a checkpoint.
        samples: Training samples, each counted once; 0 when unknown.
    """

    steps: int
    evaluations: int = 0
    evaluation_samples: int = 0
    saves: int = 0
    samples: int = 0


PassTable: TypeAlias = "dict[tuple[object, ...], MicroBatch]"
"""Micro-batches by what tells them apart."""


class Clock:
    """Times configurations of one model on one machine.

    Clocks of one card, in whatever number and network, may share the table of micro-batches that they know.
    """

    def __init__(
        self, model: ModelFacts, facts: ClockFacts, known: dict[tuple[object, ...], PassTable] | None = None
    ) -> None:
        self.model = model
        self.facts = facts
        self._tables: dict[tuple[object, ...], PassTable] = {} if known is None else known

    def step_time(
        self,
        config: TrainingConfig,
        counts: ParamCounts,
        *,
        total_steps: int | None = None,
        length_share: float = 1.0,
        usd_per_gpu_hour: float | None = None,
        run: RunLength | None = None,
    ) -> StepTime:
        """Returns the time of one optimizer step, and of the run when its steps are known.

        Args:
            config: What runs.
            counts: Its element counts.
            total_steps: Optimizer steps of the run; None when unknown.
            length_share: Mean tokens of a sequence over max_length; shortens the work of a mean step.
            usd_per_gpu_hour: Price of one GPU; None when unknown.
            run: Steps, evaluations and saves together; stands in for `total_steps` where it is given.

        Assumes: every sample has max_length tokens in the timed step; collectives and copies of one layer run beside
            the computation of others.
        Source: rates of `ClockFacts`, each with its source in specs/.
        """
        layout, facts = layout_of(config), self.facts
        work = self.micro_batch(config)
        waiting = waits(work, layout, _elements(counts), facts)
        passes = layout.micro_batches
        bandwidth = passes * work.bandwidth
        if run is None and total_steps is not None:
            run = RunLength(steps=total_steps)
        fixed = waiting.communication + waiting.transfers + waiting.host + waiting.optimizer
        mean = passes * work.shortened(length_share) + fixed
        total = usd = None
        evaluating = saving = 0.0
        if run is not None and not facts.unknown:
            evaluating = _evaluation_seconds(config, work, run) * length_share
            saving = run.saves * _checkpoint_bytes(config, counts) / facts.nvme_write_bytes_per_second
            ahead = _precomputing_seconds(config, work, run) * length_share
            total = run.steps * mean + evaluating + saving + ahead
            if usd_per_gpu_hour is not None:
                usd = total / 3600 * usd_per_gpu_hour * config.world_size
        return StepTime(
            compute_seconds=passes * work.seconds - bandwidth,
            bandwidth_seconds=bandwidth + waiting.optimizer,
            communication_seconds=waiting.communication,
            offload_seconds=waiting.transfers + waiting.host,
            tokens_per_step=config.global_batch_size * config.task.sequences_per_sample * config.max_length,
            world_size=config.world_size,
            total_seconds=total,
            total_usd=usd,
            assumptions=facts.assumptions,
            evaluation_seconds=evaluating,
            saving_seconds=saving,
            unknown=facts.unknown,
            mean_step_seconds=mean,
            length_share=length_share,
        )

    def least_seconds(self, config: TrainingConfig) -> float:
        """Returns a lower bound of a step's seconds: its passes, without anything that it waits for."""
        return config.gradient_accumulation_steps * self.micro_batch(config).seconds

    def micro_batch(self, config: TrainingConfig) -> MicroBatch:
        """Returns the micro-batch of a configuration; few of them occur among many configurations."""
        table, key = self.pass_table(config), pass_key(config)
        found = table.get(key)
        if found is None:
            found = micro_batch(adapted_model(self.model, config), compute_of(config), self.facts)
            frozen = reference_compute(config)
            if frozen is not None:
                found = found.with_forward_of(micro_batch(self.model, frozen, self.facts))
            table[key] = found
        return found

    def pass_table(self, config: TrainingConfig) -> PassTable:
        """Returns the known micro-batches of what computes as a configuration does, by `pass_key`; `micro_batch` adds
        to it.
        """
        key = (
            config.max_length,
            config.context_parallel,
            config.method,
            config.precision,
            config.engine,
            config.attention,
            config.lora,
            config.base_precision,
            config.upcast_unquantized,
            config.task,
            config.reference,
            gathers_weights(config),
        )
        if key not in self._tables:  # not setdefault: a page's takes only text for a key
            self._tables[key] = {}
        return self._tables[key]


def pass_key(config: TrainingConfig) -> tuple[object, ...]:
    """Returns what tells micro-batches apart whose configurations compute alike."""
    return config.micro_batch_size, config.loss, config.checkpoint_every, config.padding_mask


def _elements(counts: ParamCounts) -> Elements:
    return Elements(
        total=counts.total, quantized=counts.quantized, adapters=counts.adapters, trainable=counts.trainable
    )


def _evaluation_seconds(config: TrainingConfig, work: MicroBatch, run: RunLength) -> float:
    """Returns seconds of all evaluations: forward passes over a rank's share of the samples."""
    share = ceil_div(run.evaluation_samples, config.data_parallel_ranks)
    return run.evaluations * share / config.micro_batch_size * work.forward_seconds


def _precomputing_seconds(config: TrainingConfig, work: MicroBatch, run: RunLength) -> float:
    """Returns seconds of scoring all samples once before the first step: forward passes over a rank's share.

    A run that sees only part of its samples scores them all the same.
    """
    if config.reference is not Reference.PRECOMPUTED:
        return 0.0
    samples = (run.samples or run.steps * config.global_batch_size) + (run.evaluation_samples if run.evaluations else 0)
    return ceil_div(samples, config.data_parallel_ranks) / config.micro_batch_size * work.forward_seconds


def _checkpoint_bytes(config: TrainingConfig, counts: ParamCounts) -> int:
    """Returns bytes of one checkpoint: trained weights in 16 bits, and two fp32 moments and a master copy of each."""
    weights = counts.trainable if config.method is not Method.FULL else counts.total
    return 2 * weights + 12 * counts.trainable


def workload_seconds(
    model: ModelFacts, compute: Compute, layout: Layout, elements: Elements, facts: ClockFacts
) -> float:
    """Returns the seconds of one optimizer step of a workload, tensor and pipeline parallelism included.

    Tensor parallelism sums the result of attention and of the feed-forward part over its ranks, in forward and in
    backward, and nothing runs beside it. A pipeline of p stages and m micro-batches is filled and drained in p - 1
    turns of one micro-batch.

    Source: arXiv 1909.08053 (four sums per layer), arXiv 2104.04473 (the bubble, (p - 1)/m).
    """
    work = micro_batch(model, compute, facts)
    seconds = work.seconds
    if compute.tensor_parallel > 1:
        moved = 2.0 * compute.tokens * model.hidden_size
        sums = (4 + 2 * compute.recompute) * work.layers / compute.stages
        seconds += 2 * pass_seconds(moved * sums, sums, Ring(compute.tensor_parallel, 1), facts)
    waiting: Waits = waits(work, layout, elements, facts)
    turns = layout.micro_batches + compute.stages - 1
    return turns * seconds + waiting.communication + waiting.transfers + waiting.host + waiting.optimizer
