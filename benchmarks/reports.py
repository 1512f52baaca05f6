"""Reports of runs that failed, held against memc's answers: `make reports DATA=<yaml in the collection's form>`.

Each report names conditions, a sketch of a spec, and checks that its `expected` asks for. A check passes, fails, or
waits for something that memc cannot be asked yet, with the reason. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))

from reported.answers import answered
from reported.checks import Finding, Outcome, evaluate, verdict

CASES = Path(__file__).parents[1] / "tests" / "cases" / "reports"


def reports_in(paths: Iterable[Path]) -> list[Mapping[str, Any]]:
    """Returns the reports of files in the collection's form: a mapping with `reports`, or a list of them."""
    found: list[Mapping[str, Any]] = []
    for path in paths:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        found += document["reports"] if isinstance(document, Mapping) else document
    return found


def outcomes(report: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], Outcome]]:
    """Returns every check of a report with what became of it.

    What goes wrong while one is evaluated is a failure of that one, with the error as its detail.
    """
    expected = report.get("expected") or {}
    checks = [*(expected.get("checks") or [])]
    if expected.get("verdict"):
        checks.append({"type": "verdict", "text": str(expected["verdict"])})
    with tempfile.TemporaryDirectory(prefix="memc-reports-") as scratch:
        try:
            answers = answered(report, Path(scratch))
        except Exception as error:  # a form of its own must not end the others
            return [(check, _broken(error)) for check in checks]
        found = []
        for check in checks:
            try:
                outcome = verdict(check["text"], answers) if check["type"] == "verdict" else evaluate(check, answers)
            except Exception as error:
                outcome = _broken(error)
            found.append((check, outcome))
        return found


def _broken(error: Exception) -> Outcome:
    return Outcome(
        Finding.FAILED, f"could not be evaluated: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    )


def main() -> None:
    """Prints one line per check, then the JSON object; exits 1 when a check failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("data", nargs="*", type=Path, help="files (default: the checked-in cases)")
    parser.add_argument("--only", default="", help="ids or kinds, separated by commas")
    options = parser.parse_args()
    wanted = set(filter(None, options.only.split(",")))
    totals: Counter[str] = Counter()
    reports = 0
    for report in reports_in(options.data or sorted(CASES.glob("*.yaml"))):
        if wanted and not wanted & {str(report["id"]), str(report.get("kind"))}:
            continue
        reports += 1
        print(f"{report['id']}: {report.get('title', '')}")
        for check, outcome in outcomes(report):
            finding = (
                "disagrees" if check.get("disagree") and outcome.finding is not Finding.PASSED else outcome.finding
            )
            totals[str(finding)] += 1
            print(f"  {finding:9} {check['type']}: {outcome.detail}")
    evaluated = totals["passed"] + totals["failed"]
    result = {
        "schema": "memc/reports/1",
        "reports": reports,
        "checks": totals.total(),
        **{name: totals[name] for name in ("passed", "failed", "waits", "disagrees")},
        "passed_share": round(totals["passed"] / evaluated, 4) if evaluated else None,
    }
    print(json.dumps(result))
    sys.exit(1 if totals["failed"] else 0)


if __name__ == "__main__":
    main()
