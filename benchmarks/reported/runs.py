"""What only a run can show: which end-to-end test shows it, and how that test ended where it has been run."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

TESTS = "tests/e2e/test_reported.py"
RESULTS = Path(__file__).parents[2] / "build" / "reported.xml"
RESULTS_VARIABLE = "MEMC_REPORTED_RUNS"

# What a report says of the run, and the tests that look at it.
_SHOWN: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        r"lora_?b\b.*(non-?zero|update|move|change|norm)|(non-?zero|moved?|updated?).*lora_?b\b",
        ("test_every_lora_b_moves_in_one_step", "test_a_run_whose_adapters_stay_zero_stops_before_it_saves"),
    ),
    (
        r"\bgrad(ient)?s?\b.*(lora|adapter|param)|(lora|adapter|param).*\bgrad(ient)?s?\b|backward",
        ("test_every_adapter_has_a_gradient_after_one_backward", "test_a_script_without_its_input_gradients_is_seen"),
    ),
    (
        r"(weight|checkpoint|file|adapter)s?\b.*(disk|saved|size|bytes)|(saved|size of).*(weight|checkpoint|file)",
        ("test_partitioned_weights_are_saved_whole",),
    ),
    (
        r"first loss|initial loss|loss.*(ln|log)\W*\(?vocab|missing",
        ("test_experts_load_whole_into_shards", "test_experts_that_are_missing_stop_the_run"),
    ),
)


@dataclass(frozen=True)
class Shown:
    """The tests that show something of a run.

    Attributes:
        tests: Their functions.
        ended: How each of their cases ended: ``passed``, ``failed`` or ``skipped``; empty where none has been run.
    """

    tests: tuple[str, ...]
    ended: dict[str, str]

    @property
    def passed(self) -> bool | None:
        """Whether all of them have passed; None when not all have been run."""
        cases = [[how for case, how in self.ended.items() if case.partition("[")[0] == test] for test in self.tests]
        if any("failed" in hows for hows in cases):
            return False
        return True if all("passed" in hows for hows in cases) else None


def shown_by(words: str) -> Shown | None:
    """Returns the tests that show what a report says of a run; None when nothing is known to show it."""
    tests = next((tests for pattern, tests in _SHOWN if re.search(pattern, words.lower())), None)
    return None if tests is None else Shown(tests, _ended(Path(os.environ.get(RESULTS_VARIABLE, RESULTS))))


def _ended(path: Path) -> dict[str, str]:
    """Returns how each case of a run of pytest ended, from what ``--junitxml`` wrote; empty without such a file."""
    if not path.is_file():
        return {}
    found = {}
    for case in ElementTree.parse(path).iter("testcase"):
        if case.get("classname", "").replace(".", "/") + ".py" != TESTS:
            continue
        kinds = {child.tag for child in case}
        how = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[case.get("name", "")] = how
    return found
