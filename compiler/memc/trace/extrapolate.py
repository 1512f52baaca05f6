"""From two shallow traces to any depth: a decoder is periodic, so local peaks are affine in its depth."""

from __future__ import annotations

from memc.trace.peaks import Peak, Share
from memc.trace.records import Part, Region, Stage

Peaks = dict[tuple[Stage, Region], Peak]


def shallow_depths(layers: int, period: int) -> tuple[int, int] | None:
    """Returns two depths that stand for `layers`, one period apart; None when `layers` itself is as shallow.

    Each half of the smaller one holds every kind of layer, and two at the ends that may differ from the middle.
    """
    smallest = 2 * period + 2
    base = smallest + (layers - smallest) % period
    return (base, base + period) if layers > base + period else None


def extrapolated(shallow: Peaks, deeper: Peaks, depths: tuple[int, int], layers: int) -> Peaks:
    """Returns the peaks of a model with `layers` layers, by stage and region.

    Layers of the first half are matched by index, those of the second half by distance from the end. Layers in
    between are left out: what they peak at lies between the two halves.
    """
    periods, rest = divmod(layers - depths[0], depths[1] - depths[0])
    if rest:
        raise ValueError(f"{layers} layers are not a whole number of periods above {depths[0]}")
    peaks: Peaks = {}
    for (stage, region), low in shallow.items():
        high = deeper.get((stage, _moved(region, depths[0], depths[1])))
        if high is not None:
            peaks[stage, _moved(region, depths[0], layers)] = _affine(low, high, periods)
    return peaks


def _moved(region: Region, depth: int, to: int) -> Region:
    if region.part is Part.LAYER and region.layer >= depth // 2:
        return Region(Part.LAYER, region.layer + to - depth)
    return region


def _affine(low: Peak, high: Peak, periods: int) -> Peak:
    shares = {}
    for share in Share:
        start = low.shares.get(share, 0)
        shares[share] = start + periods * (high.shares.get(share, 0) - start)
    return Peak(low.allocated_bytes + periods * (high.allocated_bytes - low.allocated_bytes), shares)
