"""Cases: a spec in words, and what memc must answer, each with the place its figures come from.

A file of `plans/` is a list of cases. A case has `id`, `source`, `spec` (a mapping, written out as the user's YAML) and
`expect`. `vary` runs the case once per mapping, which is laid over the spec; its `expect` is laid over that of the
case. What `expect` may say:

    feasible, binding, rung     the answer, the resource that binds a refusal, the rung of the plan
    settings                    values of plan.settings of the explain document; the nearest ones of a refusal
    uses, avoids                techniques that the plan has, or has not; a list in `uses` means any of them
    gib, gb                     low and high of a figure, in 2**30 or 10**9 bytes: see `figures`
    bytes_per_param             low and high of a sum of accounts over the parameters of the model
    entries, no_entries         names of ledger entries, on any resource
    relaxations, no_relaxations spec fields that a refusal must, or must not, offer to change
    says, never_says            text of the report, whatever the case of its letters
    error                       code, field and text of the diagnostic that refuses the spec
    files                       for each generated file, text that it must hold; `not` before what it must not hold
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from memc import driver
from memc.driver import Answer
from memc.errors import ExitCode, MemcError
from memc.plan import Plan
from memc.report import plan_report, refusal_report
from memc.units import GB, GIB
from rich.console import Console

PLANS = Path(__file__).parent / "plans"
KNOWN = frozenset(
    (
        "feasible",
        "binding",
        "rung",
        "settings",
        "uses",
        "avoids",
        "gib",
        "gb",
        "bytes_per_param",
        "entries",
        "no_entries",
        "relaxations",
        "no_relaxations",
        "says",
        "never_says",
        "error",
        "files",
    )
)


def merged(base: Any, over: Any) -> Any:
    """Returns `over` laid over `base`; None takes a key away."""
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    keys = [*base, *(key for key in over if key not in base)]
    laid = {key: merged(base.get(key), over[key]) if key in over else base[key] for key in keys}
    return {key: value for key, value in laid.items() if value is not None}


def cases() -> Iterator[Any]:
    for path in sorted(PLANS.glob("*.yaml")):
        for case in yaml.safe_load(path.read_text(encoding="utf-8")):
            assert case["source"], case["id"]
            for number, variant in enumerate(case.get("vary") or [{}]):
                changed = dict(variant)
                expect = merged(case.get("expect", {}), changed.pop("expect", {}))
                name = changed.pop("id", number if case.get("vary") else "")
                spec = merged(case["spec"], changed)
                yield pytest.param(spec, expect, id=f"{case['id']}-{name}" if name != "" else case["id"])


def figures(answer: Answer) -> dict[str, int]:
    """Returns every figure that a case may bound, in bytes.

    `gpu`, `host`: what one card, or the node while the run goes on, must have. `allocated`: the allocated peak.
    `<account>`: that account at the peak. `model_states`: parameters, master weights, gradients and optimizer states
    at the peak. `static`: these without master weights. `<phase>`: the allocated peak of a phase. `asked`: what the
    spec as asked would need of the card. `entry <name>`: one entry of the card; `host <name>`: one of the host.
    """
    document = answer.document()
    gpu, host = document["ledger"]["gpu"], document["ledger"]["host"]
    accounts = gpu["by_account"]
    static = accounts["parameters"] + accounts["gradients"] + accounts["optimizer_states"]
    found = {
        **accounts,
        **gpu["by_phase"],
        "gpu": gpu["required_bytes"],
        "host": max(size for phase, size in host["by_phase"].items() if phase != "resume"),
        "allocated": gpu["peak_allocated_bytes"],
        "static": static,
        "model_states": static + accounts["master_weights"],
    }
    asked = document["trail"][0]["peak_bytes"]
    if asked is not None:
        found["asked"] = asked
    found |= {f"entry {entry['name']}": entry["bytes"] for entry in gpu["entries"]}
    return found | {f"host {entry['name']}": entry["bytes"] for entry in host["entries"]}


def report(answer: Answer) -> str:
    """Returns the report as a terminal shows it, on one line."""
    result = answer.result
    console = Console(width=10_000, highlight=False)
    with console.capture() as capture:
        console.print(plan_report(result) if isinstance(result, Plan) else refusal_report(result))
    return " ".join(capture.get().split()).lower()


def check_figures(answer: Answer, expect: dict[str, Any]) -> None:
    known = figures(answer)
    for unit, size in (("gib", GIB), ("gb", GB)):
        for name, (low, high) in expect.get(unit, {}).items():
            assert low <= known[name] / size <= high, f"{name}: {known[name] / size:.3f} {unit}, not {low} to {high}"
    for names, (low, high) in expect.get("bytes_per_param", {}).items():
        share = sum(known[name] for name in names.split(" + ")) / answer.result.model.total_params
        assert low <= share <= high, f"{names}: {share:.4f} B per parameter, not {low} to {high}"


def check_plan(answer: Answer, expect: dict[str, Any]) -> None:
    document = answer.document()
    plan = document["plan"]
    if "feasible" in expect:
        assert document["feasible"] is expect["feasible"], report(answer)[:400]
    if "rung" in expect:
        assert plan["rung"] == expect["rung"]
    for name, value in expect.get("settings", {}).items():
        assert plan["settings"][name] == value, name
    for wanted in expect.get("uses", []):
        assert set(plan["techniques"]) & ({wanted} if isinstance(wanted, str) else set(wanted)), plan["techniques"]
    assert not set(plan["techniques"]) & set(expect.get("avoids", [])), plan["techniques"]
    entries = {entry["name"] for ledger in document["ledger"].values() for entry in ledger["entries"]}
    assert set(expect.get("entries", [])) <= entries
    assert not set(expect.get("no_entries", [])) & entries


def check_refusal(answer: Answer, expect: dict[str, Any]) -> None:
    refusal = answer.document()["infeasible"]
    if "binding" in expect:
        assert refusal["binding"] == expect["binding"]
    offered = {item["input"] for item in refusal["relaxations"]} if refusal else set()
    assert set(expect.get("relaxations", [])) <= offered
    assert not set(expect.get("no_relaxations", [])) & offered


def check_files(answer: Answer, folder: Path, expect: dict[str, Any]) -> None:
    if "files" not in expect:
        return
    written = driver.generate(answer, folder / "out", "memc compile spec.yaml")
    for name, texts in expect["files"].items():
        for text in texts:
            if isinstance(text, dict):
                assert text["not"] not in written[name]
            else:
                assert text in written[name], f"{name} lacks {text!r}"


@pytest.mark.parametrize(("spec", "expect"), list(cases()))
def test_case(spec: dict[str, Any], expect: dict[str, Any], tmp_path: Path) -> None:
    assert expect
    assert set(expect) <= KNOWN
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(spec, sort_keys=False), encoding="utf-8")
    if "error" in expect:
        with pytest.raises(MemcError) as caught:
            driver.answer(path)
        assert caught.value.exit_code is ExitCode.USAGE
        (diagnostic,) = caught.value.diagnostics
        assert diagnostic.code == expect["error"]["code"]
        assert diagnostic.where is not None
        assert diagnostic.where.field == expect["error"]["field"]
        assert diagnostic.where.line > 0
        for text in expect["error"].get("text", []):
            assert text.lower() in str(diagnostic).lower()
        return
    answer = driver.answer(path)
    check_plan(answer, expect)
    check_refusal(answer, expect)
    check_figures(answer, expect)
    shown = report(answer)
    for text in expect.get("says", []):
        assert text.lower() in shown, text
    for text in expect.get("never_says", []):
        assert text.lower() not in shown, text
    check_files(answer, tmp_path, expect)
