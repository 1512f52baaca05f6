"""What the probing process runs: one line of JSON on standard output for each part, as soon as it is measured."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memc.probing.parts import PARTS, Part

Measured = tuple[dict[str, list[float]], dict[str, Any]]


def main() -> None:
    """Measures the parts that the first argument asks for. What libraries print goes to standard error."""
    asked = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for answer in measured(asked):
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def measured(asked: dict[str, Any]) -> Any:
    """Yields what stands for the machine, then each part: its figures, or why it is absent.

    A part that compiles is announced (`preparing`), and said to be ready (`prepared`), with the seconds that took.

    Args:
        asked: `parts` (names), `seconds` (until when all should be done), `folder` (of the drive).
    """
    import torch

    end = time.monotonic() + float(asked["seconds"])
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    yield {"machine": _machine(gpus)}
    waiting = [part for part in PARTS if part.name in asked["parts"]]
    runs = [part for part in waiting if part.gpus <= gpus]
    for part in waiting:
        if part not in runs:
            what = "no GPU" if gpus == 0 else f"{gpus} GPU, and it takes {part.gpus}"
            yield {"part": part.name, "absent": f"this machine has {what}"}
    while runs:
        part, *runs = runs
        if part.compiles:
            yield {"preparing": part.name}
            begin = time.monotonic()
            unready = _tried(_prepare)
            end += time.monotonic() - begin
            yield {"prepared": part.name}
            if unready:
                yield {"part": part.name, **unready}
                continue
        left = max(0.0, end - time.monotonic())
        share = left * part.weight / (part.weight + sum(other.weight for other in runs))
        yield {"part": part.name, **_answer(part, share, gpus, Path(asked["folder"]))}


def _answer(part: Part, seconds: float, gpus: int, folder: Path) -> dict[str, Any]:
    def run() -> dict[str, Any]:
        figures, details = _run(part.name, seconds, gpus, folder)
        return {"figures": figures, "details": details}

    return _tried(run)


def _tried(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns what `run` returns, or why there is nothing; one part that fails, in whatever way, leaves the others."""
    try:
        return run()
    except ImportError as error:
        return {"absent": f"{error.name or 'a library'} is not installed"}
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        return {"absent": f"{type(error).__name__}: {text or 'no message'}"}


def _prepare() -> dict[str, Any]:
    from memc.probing import hosts

    hosts.ready_deepspeed_adam()
    return {}


def _run(name: str, seconds: float, gpus: int, folder: Path) -> Measured:
    """Returns the figures of one part and what else is to be said of it."""
    from memc.probing import hosts

    alone: dict[str, Callable[[float], dict[str, list[float]]]] = {
        "host-memory": hosts.copies,
        "host-adam": hosts.torch_adam,
        "deepspeed-adam": hosts.deepspeed_adam,
    }
    if name in alone:
        return alone[name](seconds), {}
    if name == "disk":
        return hosts.drive(folder, seconds)
    import torch

    from memc.probing import cards

    device = torch.device("cuda", 0)
    if name == "products":
        return cards.products(device, seconds)
    if name == "card-memory":
        return cards.copies(device, seconds), {}
    return cards.transfers(device, seconds) if name == "pcie" else cards.all_reduce(gpus, seconds)


def _machine(gpus: int) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads(), "gpus": gpus}
    if gpus:
        found |= {"device_name": torch.cuda.get_device_name(0), "cuda": torch.version.cuda}
        names = {torch.cuda.get_device_name(index) for index in range(gpus)}
        found |= {"other_cards": sorted(names - {found["device_name"]})}
    return found


if __name__ == "__main__":
    main()
