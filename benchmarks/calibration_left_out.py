"""What a calibration would do for a step that it has not seen: each measured step is predicted from the others.

    python benchmarks/calibration_left_out.py [FILE...]

Three ways are held beside the catalogue alone: the common rate of matrix products that `memc calibrate` writes, such a
rate for each kind of training, and the ratio of measured to predicted time for each kind.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import yaml
from memc.calibration.corpus import read
from memc.calibration.records import Measurement

HERE = Path(__file__).parent
FILES = (HERE / "measured" / "h200-memory.yaml", HERE / "measured" / "h200-time.yaml")
FEWEST = 2
"""Others of its kind that a step needs; with fewer the catalogue stands."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One measured step.

    Attributes:
        kind: Method, and attention kernel.
        model: Its name.
        seconds: Measured.
        clock_seconds: By the catalogue.
        rate: Of products, at which the clock says the measured time.
        products_share: How much of a small change of the rate the time follows.
    """

    kind: tuple[str, str]
    model: str
    seconds: float
    clock_seconds: float
    rate: float
    products_share: float


Key = Callable[[Step], object]
KINDS: dict[str, Key] = {
    "all together": lambda step: 0,
    "by method": lambda step: step.kind[0],
    "by method and attention": lambda step: step.kind,
    "by model": lambda step: step.model,
    "by model and method": lambda step: (step.model, step.kind[0]),
}


def steps(paths: Iterable[Path]) -> Iterator[Step]:
    """Yields the steps of which a rate is told, of one card and one type of products each."""
    attention = {
        record["step_time_s"]: str(record["attention"])
        for path in paths
        for record in yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
        if record.get("step_time_s")
    }
    for found in read(paths):
        if not isinstance(found, Measurement) or "products_share" not in found.conditions:
            continue
        told = found.conditions
        (rate,) = (value for name, value in found.figures.items() if name.startswith("training_flops_per_second."))
        yield Step(
            kind=(str(told["method"]), attention[told["step_seconds"]]),
            model=str(told["model"]),
            seconds=told["step_seconds"],
            clock_seconds=told["clock_seconds"],
            rate=rate,
            products_share=told["products_share"],
        )


def by_rate(step: Step, others: list[Step]) -> float:
    """Returns the relative error of the clock with the others' median rate."""
    return float((step.rate / median(other.rate for other in others)) ** step.products_share - 1)


def by_ratio(step: Step, others: list[Step]) -> float:
    """Returns the relative error of the clock times the others' median of measured over predicted time."""
    return step.clock_seconds * median(other.seconds / other.clock_seconds for other in others) / step.seconds - 1


def alone(step: Step, others: list[Step]) -> float:
    """Returns the relative error of the clock with the catalogue's rate."""
    return step.clock_seconds / step.seconds - 1


def left_out(measured: list[Step], key: Key, way: Callable[[Step, list[Step]], float]) -> list[float]:
    """Returns the error of each step, predicted from the others of its kind where that is nearer for those."""
    errors = []
    for step in measured:
        others = [other for other in measured if other is not step and key(other) == key(step)]
        nearer = len(others) >= FEWEST and _median(way, others) < _median(alone, others)
        errors.append(abs(way(step, others) if nearer else alone(step, others)))
    return sorted(errors)


def _median(way: Callable[[Step, list[Step]], float], those: list[Step]) -> float:
    return median(abs(way(one, those)) for one in those)


def line(name: str, errors: list[float]) -> str:
    """Returns median, ninth tenth and worst of some errors, which are in order."""
    return f"{name:<42} {median(errors):7.1%} {errors[int(0.9 * len(errors))]:7.1%} {errors[-1]:7.1%}"


def main() -> None:
    """Prints the table."""
    measured = list(steps([Path(name) for name in sys.argv[1:]] or FILES))
    print(f"{len(measured)} steps; error of the step's time:    median    p90   worst")
    print(line("the catalogue alone", left_out(measured, KINDS["all together"], alone)))
    for name, key in KINDS.items():
        print(line(f"rate of products, {name}", left_out(measured, key, by_rate)))
        print(line(f"ratio of times, {name}", left_out(measured, key, by_ratio)))


if __name__ == "__main__":
    main()
