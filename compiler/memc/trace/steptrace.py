"""StepTrace: what one optimizer step holds in GPU memory, from the real modelling code run without data."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any

import transformers

from memc.config import TrainingConfig
from memc.ledger.entries import Account, Moment
from memc.trace.build import model_config
from memc.trace.extrapolate import Peaks, extrapolated, shallow_depths
from memc.trace.loop import record_steps
from memc.trace.peaks import Instant, Peak, Share, instant_of, region_peaks, saved_bytes

_ACCOUNTS = {
    Share.PARAMETERS: Account.PARAMETERS,
    Share.WEIGHT_CASTS: Account.PARAMETERS,
    Share.GRADIENTS: Account.GRADIENTS,
    Share.OPTIMIZER_STATES: Account.OPTIMIZER_STATES,
    Share.INPUTS: Account.ACTIVATIONS,
    Share.SAVED: Account.ACTIVATIONS,
    Share.WORKING: Account.ACTIVATIONS,
    Share.KERNEL_WORKSPACE: Account.WORKSPACE,
}
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
    """Allocated bytes of one step on one GPU, by instant. cuBLAS workspaces are not in them.

    Attributes:
        layers: Depth of the model that the figures are of.
        traced_layers: Depths that were run.
        peaks: The largest sum in each part of the step, every block rounded up to 512 bytes.
        layer_saved_bytes: What the second layer made in forward and keeps for backward, weight casts left out.
        layer_cast_bytes: 16-bit copies of the second layer's weights that live at the end of forward.
        outside_saved_bytes: What the rest of the model keeps, weight casts left out (of the smaller traced depth).
    """

    layers: int
    traced_layers: tuple[int, ...]
    peaks: dict[Instant, Peak]
    layer_saved_bytes: int
    layer_cast_bytes: int
    outside_saved_bytes: int

    @property
    def binding_instant(self) -> Instant:
        """Where the step peaks (the earliest of equals)."""
        return max(self.peaks, key=lambda instant: self.peaks[instant].allocated_bytes)

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
            sums[_ACCOUNTS[share]] += size
        return sums


def trace_step(
    config: TrainingConfig, model: transformers.PretrainedConfig | dict[str, Any], *, layers: int | None = None
) -> StepTrace:
    """Returns the memory of one optimizer step, after a warm-up step, of a model given by its config.

    Assumes: one GPU with CUDA semantics of compute capability 8 or 9 without cuDNN attention; every label counts;
        gradient buckets of DDP and everything that DeepSpeed allocates are not in it (under `engine: deepspeed` there
        is no optimizer); dropout masks and attention masks are materialised as on CUDA.
    Source: transformers modelling code, PEFT, TRL and torch's autograd, run on tensors without data.

    Args:
        config: The training configuration.
        model: A transformers config, or the fields of a config.json.
        layers: Depth to use instead of the config's own. Deep models are extrapolated from two shallow traces.
    """
    text = model_config(config, model, layers)
    depth: int = text.num_hidden_layers
    period = _period(config, text)
    depths = shallow_depths(depth, period)
    if depths is None:
        tape = record_steps(config, model, depth)
        return result_of(depth, (depth,), region_peaks(tape), saved_bytes(tape))
    tapes = [record_steps(config, model, shallow) for shallow in depths]
    peaks = extrapolated(region_peaks(tapes[0]), region_peaks(tapes[1]), depths, depth)
    return result_of(depth, depths, peaks, saved_bytes(tapes[0]))


def result_of(depth: int, traced: tuple[int, ...], regions: Peaks, saved: tuple[int, int, int]) -> StepTrace:
    """Returns the trace of a model with `depth` layers from its peaks by region and what forward leaves behind."""
    peaks: dict[Instant, Peak] = {}
    for (stage, region), peak in regions.items():
        instant = instant_of(stage, region, depth)
        if instant not in peaks or peak.allocated_bytes > peaks[instant].allocated_bytes:
            peaks[instant] = peak
    return StepTrace(
        layers=depth,
        traced_layers=traced,
        peaks={instant: peaks[instant] for instant in Instant if instant in peaks},
        layer_saved_bytes=saved[0],
        layer_cast_bytes=saved[1],
        outside_saved_bytes=saved[2],
    )


def _period(config: TrainingConfig, text: Any) -> int:
    """Returns after how many layers the pattern of layer kinds and checkpoints repeats."""
    kinds = list(getattr(text, "layer_types", None) or [""])
    pattern = next(p for p in range(1, len(kinds) + 1) if all(kinds[i] == kinds[i % p] for i in range(len(kinds))))
    return lcm(pattern, config.checkpoint_every or 1)
