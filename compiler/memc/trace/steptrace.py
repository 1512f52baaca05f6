"""StepTrace: what one optimizer step holds in GPU memory, from the real modelling code run without data."""

from __future__ import annotations

import time
from dataclasses import dataclass

from memc.config import Attention, Engine, Method, Quantization, TrainingConfig
from memc.ledger.entries import Account, Moment, Phase
from memc.trace.attribution import ACCOUNTS, PhasePeak, TimelinePoint, phase_peaks, timeline
from memc.trace.build import Given
from memc.trace.loop import Run, record_steps
from memc.trace.peaks import Instant, Peak, peaks_by_instant, saved_bytes
from memc.trace.records import H100, Card
from memc.trace.reserved import Reserved, cublas_workspace_bytes, reserved
from memc.trace.splice import NotPeriodicError
from memc.trace.stacks import StackDepth
from memc.trace.tape import garbage_left_alone

_MOMENTS = {
    Instant.FORWARD: Moment.FORWARD,
    Instant.LOSS_FORWARD: Moment.LOSS,
    Instant.LOSS_BACKWARD: Moment.LOSS,
    Instant.BACKWARD_FIRST_LAYER: Moment.BACKWARD_FIRST_LAYER,
    Instant.BACKWARD_LAST_LAYER: Moment.BACKWARD_LAST_LAYER,
    Instant.BACKWARD_EMBEDDING: Moment.BACKWARD_EMBEDDING,
    Instant.STEP: Moment.STEP,
}


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """Allocated bytes of one step on one GPU, by instant and by phase. cuBLAS workspaces are not in them.

    Attributes:
        layers: Depth of the main stack, the last one of the model.
        stacks: Every stack of layers, with the depth that was run; the figures are of all layers.
        peaks: The largest sum in each part of the step, every block rounded up to 512 bytes.
        phases: The peak of each phase in time order (load, forward, loss, backward, step), by module and account.
        timeline: The course of the step.
        layer_saved_bytes: What the second layer made in forward and keeps for backward, weight casts left out.
        layer_cast_bytes: 16-bit copies of the second layer's weights that live at the end of forward.
        outside_saved_bytes: What the rest of the model keeps, weight casts left out.
        reserved: What torch's allocator holds over both steps, cuBLAS workspaces included, as a band.
        seconds: How long the trace took, without imports.
        assumes: What was assumed about the batch.
        not_modelled: What a real run allocates in torch's allocator and this trace leaves out.
    """

    layers: int
    stacks: tuple[StackDepth, ...]
    peaks: dict[Instant, Peak]
    phases: dict[Phase, PhasePeak]
    timeline: tuple[TimelinePoint, ...]
    layer_saved_bytes: int
    layer_cast_bytes: int
    outside_saved_bytes: int
    reserved: Reserved
    seconds: float
    assumes: tuple[str, ...]
    not_modelled: tuple[str, ...]

    @property
    def traced_layers(self) -> int:
        """Layers of the main stack that were run."""
        return self.stacks[-1].traced_layers

    @property
    def binding_instant(self) -> Instant:
        """Where the step peaks (the earliest of equals)."""
        return max(self.peaks, key=lambda instant: self.peaks[instant].allocated_bytes)

    @property
    def binding_phase(self) -> Phase:
        """The phase in which the step peaks (the earliest of equals)."""
        steps = {phase: peak for phase, peak in self.phases.items() if phase is not Phase.LOAD}
        return max(steps, key=lambda phase: steps[phase].allocated_bytes)

    @property
    def peak_allocated_bytes(self) -> int:
        """Largest sum of the step."""
        return self.peaks[self.binding_instant].allocated_bytes

    def by_moment(self) -> dict[Moment, int]:
        """Returns allocated peaks by the ledger's moments; a middle layer's backward belongs to none of them."""
        found: dict[Moment, int] = {}
        for instant, peak in self.peaks.items():
            if instant in _MOMENTS:
                moment = _MOMENTS[instant]
                found[moment] = max(found.get(moment, 0), peak.allocated_bytes)
        return found

    def by_account(self, instant: Instant | None = None) -> dict[Account, int]:
        """Returns bytes by account at the peak of `instant` (default: the binding one)."""
        sums = dict.fromkeys(Account, 0)
        for share, size in self.peaks[self.binding_instant if instant is None else instant].shares.items():
            sums[ACCOUNTS[share]] += size
        return sums


def trace_step(
    config: TrainingConfig, model: Given, *, card: Card = H100, capacity_bytes: int | None = None
) -> StepTrace:
    """Returns the memory of one optimizer step, after a first one, of a model given by its config.

    Assumes: one GPU with CUDA semantics, without cuDNN attention; every label counts;
        gradient buckets of DDP and everything that DeepSpeed or FSDP allocates are not in it (under them there is no
        optimizer); dropout masks and attention masks are materialised as on CUDA.
    Source: transformers modelling code, PEFT, TRL and torch's autograd, run on tensors without data.

    Args:
        config: The training configuration.
        model: A transformers config, or the fields of a config.json. Layers that repeat others are run once.
        card: The GPU: it decides the attention kernel, the parts of reductions, and the cuBLAS workspaces.
        capacity_bytes: What torch's allocator can have of the card; None for no limit.

    Raises:
        MemcError: `trace-model-unknown`, `trace-attention-unsupported` or `trace-library-missing`.
    """
    started = time.perf_counter()
    with garbage_left_alone():
        return result_of(config, _recorded(config, model, card), card, started, capacity_bytes)


def step_peaks(config: TrainingConfig, model: Given, *, card: Card = H100) -> dict[Instant, Peak]:
    """Returns the allocated peaks of one step and nothing else; arguments and errors are those of `trace_step`."""
    with garbage_left_alone():
        return peaks_by_instant(_recorded(config, model, card).recording)


def _recorded(config: TrainingConfig, model: Given, card: Card) -> Run:
    try:
        return record_steps(config, model, card=card)
    except NotPeriodicError:
        return record_steps(config, model, card=card, shallow=False)


def result_of(
    config: TrainingConfig, run: Run, card: Card, started: float, capacity_bytes: int | None = None
) -> StepTrace:
    """Returns the trace that a record of two steps gives. `started` is when the work began (`perf_counter`)."""
    main = run.stacks[-1]
    layer, casts, outside = saved_bytes(run.recording, main.name)
    return StepTrace(
        layers=main.layers,
        stacks=run.stacks,
        peaks=peaks_by_instant(run.recording),
        phases=phase_peaks(run.recording),
        timeline=timeline(run.recording),
        layer_saved_bytes=layer,
        layer_cast_bytes=casts,
        outside_saved_bytes=outside,
        reserved=reserved(
            run.recording,
            expandable_segments=config.expandable_segments,
            workspace_bytes=cublas_workspace_bytes(card.compute_capability),
            capacity_bytes=capacity_bytes,
        ),
        seconds=time.perf_counter() - started,
        assumes=run.assumes,
        not_modelled=_not_modelled(config, run.packages),
    )


def _not_modelled(config: TrainingConfig, packages: tuple[str, ...]) -> tuple[str, ...]:
    """Returns what a run of this configuration allocates and the trace does not see."""
    found = ["workspaces of cuDNN: convolutions, and attention where torch chooses it"]
    if config.engine is Engine.DDP:
        found.append("gradient buckets of DistributedDataParallel")
    if config.engine in (Engine.DEEPSPEED, Engine.FSDP):
        found.append("gathered weights, buckets, masters and optimizer states of the sharding engine")
    if config.method is Method.QLORA and config.quantization is Quantization.GPTQ:
        found.append("GPTQ's packing and kernels: the base counts as NF4")
    if packages:
        found.append(f"kernels of {' and '.join(packages)}, where installed: torch's operators count in their place")
    if config.attention is Attention.FLASH_ATTENTION_2:
        found.append("buffers inside the flash-attn package's kernels")
    return tuple(found)
