"""What a trace costs: seconds and memory of its process, libraries included, for large models of the catalogue.

Every case is traced in a process of its own, as `memc trace` does. The last line printed is one JSON object; the exit
status is 1 when a case takes more than the limits.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass

from agreement.cases import MODES, Mode, config_of, facts_of, training_config
from agreement.compare import GPU
from memc.certify import NotTraced, Request, TraceProcess
from memc.errors import MemcError
from memc.facts import load_gpu
from memc.units import GIB

LARGEST = (
    "meta-llama/Llama-3.1-405B",
    "meta-llama/Llama-3.1-70B",
    "mistralai/Mixtral-8x22B-v0.1",
    "mistralai/Mixtral-8x7B-v0.1",
    "deepseek-ai/DeepSeek-V3",
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "Qwen/Qwen3-235B-A22B",
    "Qwen/Qwen2.5-VL-72B-Instruct",
    "openai/gpt-oss-120b",
    "google/gemma-3-27b-pt",
    "google-t5/t5-11b",
    "openai/whisper-large-v3",
)
"""The deepest, widest and most various of the catalogue: long stacks, experts, two stacks, images."""
DEFAULT_MODES = ("full/none/sdpa/1x2048", "qlora/every-2/eager/4x512")
MOST_SECONDS, MOST_BYTES = 10.0, 3 * GIB // 2
TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class Cost:
    """What one trace took.

    Attributes:
        model, mode: Its case.
        trace_seconds: The trace alone.
        process_seconds: Its process, the import of torch and transformers included.
        cpu_seconds: What that process had of a processor: nearly as much on an idle machine, less on a busy one.
        peak_resident_bytes: The most memory that the process had; None where that is not counted.
        error: Why there is no trace; empty when there is one.
    """

    model: str
    mode: str
    trace_seconds: float
    process_seconds: float
    cpu_seconds: float
    peak_resident_bytes: int | None
    error: str = ""

    @property
    def within(self) -> bool:
        """Whether there is a trace, within the limits."""
        return not self.error and self.trace_seconds < MOST_SECONDS and (self.peak_resident_bytes or 0) < MOST_BYTES


def cost_of(model: str, mode: Mode) -> Cost:
    """Returns what the trace of a case takes in a process of its own."""
    card, started = load_gpu(GPU), time.perf_counter()
    request = Request(
        training_config(facts_of(model), mode), config_of(model), card.compute_capability, card.multiprocessors
    )
    with TraceProcess() as process:
        found = process.trace(request, TIMEOUT_SECONDS)
    seconds = round(time.perf_counter() - started, 2)
    if isinstance(found, NotTraced):
        return Cost(model, str(mode), 0.0, seconds, 0.0, None, found.diagnostic.message)
    return Cost(model, str(mode), found["seconds"], seconds, found["cpu_seconds"], found["peak_resident_bytes"])


def modes_of(model: str, wanted: list[str]) -> list[Mode]:
    """Returns the modes of those names; attention without an SDPA path gets the eager one."""
    found = [mode for mode in MODES if str(mode) in wanted]
    only_eager = any(
        group.block.attention.eager_only or group.block.attention.logit_softcap for group in facts_of(model).groups
    )
    return [mode for mode in found if not (only_eager and mode.attention == "sdpa")]


def shown(cost: Cost) -> str:
    """Returns a line on one case."""
    resident = "?" if cost.peak_resident_bytes is None else f"{cost.peak_resident_bytes / GIB:.2f}"
    process = f"with imports {cost.process_seconds:6.1f} s (processor {cost.cpu_seconds:6.1f} s)"
    spent = f"{cost.trace_seconds:6.1f} s, {process}"
    figures = cost.error or f"{spent} {resident:>6} GiB"
    return f"{cost.model:<40} {cost.mode:<28} {figures}"


def main() -> int:
    """Returns 0 when every trace is within the limits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", default=list(LARGEST), help="names of the catalogue")
    parser.add_argument("--modes", nargs="+", default=list(DEFAULT_MODES), help="names of modes")
    options = parser.parse_args()
    costs = []
    for model in options.models:
        try:
            wanted = modes_of(model, options.modes)
        except MemcError as error:
            sys.exit(f"{model}: {error}")
        for mode in wanted:
            costs.append(cost_of(model, mode))
            print(shown(costs[-1]), flush=True)
    traced = [cost for cost in costs if not cost.error]
    figures = {
        "traces": len(costs),
        "within": sum(cost.within for cost in costs),
        "slowest_seconds": max((cost.trace_seconds for cost in traced), default=None),
        "slowest_process_seconds": max((cost.process_seconds for cost in traced), default=None),
        "most_cpu_seconds": max((cost.cpu_seconds for cost in traced), default=None),
        "peak_resident_bytes": max((cost.peak_resident_bytes or 0 for cost in traced), default=None),
    }
    print(json.dumps(figures))
    return 0 if figures["within"] == len(costs) else 1


if __name__ == "__main__":
    sys.exit(main())
