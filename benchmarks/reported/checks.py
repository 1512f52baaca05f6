"""Every type of check that reports make, evaluated against memc's answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import yaml
from memc import driver
from memc.advise import Desk, Quantity, solve_for
from memc.config import Engine, LossHead
from memc.ladder import LADDER
from memc.ledger.entries import Account, Moment, Phase
from memc.ledger.parts import MOMENTS, Part
from memc.plan import Infeasible, Plan
from memc.units import GIB

from reported.answers import Answers, Asked, ask
from reported.changes import changes_method, inputs_meant, techniques_meant, weight
from reported.figures import entries_called, gpu_figure, host_figure
from reported.linting import given, lint_text, remarks_on, said, weights_of
from reported.reading import releases
from reported.room import with_files
from reported.runs import TESTS, shown_by
from reported.wordedits import edited_by_words


class Finding(StrEnum):
    """What became of a check."""

    PASSED = "passed"
    FAILED = "failed"
    WAITS = "waits"


@dataclass(frozen=True)
class Outcome:
    """A check with what became of it and why."""

    finding: Finding
    detail: str


def _verdict(passed: bool, detail: str) -> Outcome:
    return Outcome(Finding.PASSED if passed else Finding.FAILED, detail)


def _waits(reason: str) -> Outcome:
    return Outcome(Finding.WAITS, reason)


def evaluate(check: Mapping[str, Any], answers: Answers) -> Outcome:
    """Returns what becomes of one check.

    A check waits when memc cannot be asked yet: its type or its words are unknown, or the sketch has no spec.
    """
    kind = str(check.get("type", ""))
    if kind not in _CHECKS:
        return _waits(f"checks of type {kind!r} are not evaluated")
    if kind in _LINT:
        return _CHECKS[kind](check, answers)
    if answers.reading.stands_in and kind not in _OF_ANY_RUN:
        return _waits(f"the sketch names no {' and no '.join(answers.reading.stands_in)}")
    if answers.asked is None or answers.open is None or _rests_on_what_waits(check, answers):
        return _waits("; ".join(answers.reading.waits) or "there is no spec")
    if "objective-not-emitted" in answers.asked.error:
        return _waits("memc writes the training of causal language models only")
    return _CHECKS[kind](check, answers)


def _rests_on_what_waits(check: Mapping[str, Any], answers: Answers) -> bool:
    """Whether a check is about something that the sketch has and a spec has no place for."""
    said = " ".join(str(value) for key, value in check.items() if key not in ("type", "disagree")).lower()
    about = {
        "modules_to_save": r"modules_to_save|trainable|lm_head|embed",
        "new_tokens": r"token",
        "image": r"pixel|image|visual",
    }
    waiting = " ".join(answers.reading.waits)
    return any(word in waiting and re.search(pattern, said) for word, pattern in about.items())


def verdict(text: str, answers: Answers) -> Outcome:
    """Returns whether memc's verdict is the one that a report expects, from the words that it begins with.

    What is said of a run "as requested" is asked of it with everything pinned; a plain "fits" holds when it fits so, or
    with what memc is free to choose.
    """
    asked, free, said = answers.asked, answers.open, text.lower()
    sketch = answers.report.get("spec") or {}
    if said.startswith(("error", "verify error")) and sketch.get("artifacts"):
        return _lint_verdict(said, answers)
    if answers.reading.stands_in:
        return _waits(f"the sketch names no {' and no '.join(answers.reading.stands_in)}")
    if asked is not None and "objective-not-emitted" in asked.error:
        return _waits("memc writes the training of causal language models only")
    if asked is None or free is None or answers.reading.waits:
        return _waits("; ".join(answers.reading.waits) or "there is no spec")
    if len(sketch.get("libs") or {}) > len(releases(sketch)):
        return _waits("the sketch names libraries that have no place in a spec")
    if re.search(r"\b(refused|lowered|changed)\b", said):
        return _given_up(said, answers)
    reported = re.match(r"(\w+) phase (?:is )?(?:reported|listed|shown|priced|counted)\b", said)
    if reported is not None and reported[1] in [phase.value for phase in Phase]:
        row = re.search(rf"\b{reported[1]} (<- peak )?\d", asked.text) is not None
        counted = _has_phase({"phase": reported[1]}, answers)
        return counted if row or counted.finding is Finding.WAITS else _verdict(False, f"no row of {reported[1]}")
    alone = re.match(r"(.+?) alone (does_not_fit|does not fit|fits)\b", said)
    if alone is not None:
        return _alone(alone[1], alone[2] == "fits", asked, free)
    as_requested = asked.plan is not None and not asked.plan.techniques
    shown = f"as asked: {_fits(asked)}; choice left open: {_fits(free)}"
    if re.match(r"(does_not_fit|does not fit)\b.*\bor\b.*tight|tight", said):
        warnings = asked.plan.warnings if asked.plan is not None else ()
        tight = any(re.search(r"headroom|tight|nearly full", warning) for warning in warnings)
        return _verdict(not as_requested or tight, shown)
    if said.startswith("fits in steady state"):
        return _steady(said, asked, free)
    if re.match(r"does_not_fit|does not fit|refuse", said):
        return _verdict(not as_requested, shown)
    if said.startswith("fits"):
        return _verdict(asked.plan is not None or free.plan is not None, shown)
    return _waits(f"nothing is known to be meant by {text!r}")


def _steady(said: str, asked: Asked, free: Asked) -> Outcome:
    """Returns whether something fits in every phase but the load, and where that binds, whether memc says so."""
    if asked.plan is not None and free.plan is not None:
        return _verdict(True, f"as asked: {_fits(asked)}; choice left open: {_fits(free)}")
    least: list[tuple[int, str]] = []
    binding: list[Phase] = []
    for one in (asked, free):
        if one.machine is None or not isinstance(one.result, Infeasible):
            continue
        binding.append(_binding_phase(one.result))
        budget = one.machine.question.budget.gpu_bytes
        for candidate in one.machine.space().candidates():
            running = _running_bytes(candidate.price.parts)
            if running <= budget:
                least.append((running, ", ".join(item.name for item in candidate.techniques) or "as asked"))
    if not binding:
        return _waits(asked.error or free.error)
    named = "load" not in said or all(phase is Phase.LOAD for phase in binding)
    shown = (
        f"{min(least)[0] / GIB:.2f} GiB while it runs with {min(least)[1]}" if least else "nothing fits while it runs"
    )
    return _verdict(bool(least) and named, f"{shown}; binding phase: {', '.join(sorted(set(binding)))}")


def _running_bytes(parts: Sequence[Part]) -> int:
    """Returns what one card needs in every phase but the load."""
    moments = [at for at, moment in enumerate(MOMENTS) if moment is not Moment.LOAD]
    return max(sum(part.gpu[at] for part in parts) for at in moments) + sum(part.gpu_outside for part in parts)


def _given_up(said: str, answers: Answers) -> Outcome:
    """Returns whether memc refuses a setting that the report asks for, or plans another value and says so."""
    asked, free, reading = answers.asked, answers.open, answers.reading.asked
    assert asked is not None
    assert free is not None
    pins = (reading or {}).get("pin", {})
    named = next((name for name in pins if name.replace("_", " ") in said or name in said), None)
    if named is None:
        return _waits(f"no setting is known to be meant by {said!r}")
    if asked.answer is None:
        return _verdict(f"pin.{named}" in asked.error, f"refused: {asked.error.splitlines()[0]}")
    plan = free.plan or asked.plan
    if plan is None or not hasattr(plan.config, named):
        return _waits(f"pin.{named} is no setting of a plan")
    value = str(getattr(plan.config, named))
    return _verdict(value != str(pins[named]), f"{named} asked: {pins[named]}; planned: {value}")


def _alone(words: str, fits: bool, asked: Asked, free: Asked) -> Outcome:
    """Returns whether the run as asked fits with one technique and nothing else; where not, a plan has to use more."""
    machine = asked.machine
    meant = techniques_meant(words)
    exact = {name for name in meant if name.replace("-", "") in words.replace("-", "").split()} or meant
    if machine is None or not exact:
        return _waits(f"no technique is known to be meant by {words!r}")
    question, needs = machine.question, []
    for technique in (technique for technique in LADDER if technique.name in exact):
        if technique.why_not(question.asked, question.situation) is None:
            config = technique.apply(question.asked, question.situation)
            needs.append((machine.estimator.price(config).gpu_required_bytes, technique.name))
    if not needs:
        return _waits(f"{', '.join(sorted(exact))} does not apply to the run as it was asked for")
    least, name = min(needs)
    does = least <= question.budget.gpu_bytes
    used = free.plan.techniques if free.plan is not None else ()
    more = does or bool(set(used) - {name})
    detail = (
        f"{name} alone needs {least / GIB:.2f} of {question.budget.gpu_bytes / GIB:.2f} GiB; plan: {', '.join(used)}"
    )
    return _verdict(does == fits and more, detail)


def _lint_verdict(said: str, answers: Answers) -> Outcome:
    """Returns whether the lint finds what is as severe as a report expects."""
    remarks, reason = lint_text(answers)
    if reason:
        return _waits(reason)
    severe = [item for item in remarks if item.weight in weights_of(said)]
    return _verdict(bool(severe), f"lint: {', '.join(sorted({item.code for item in severe})) or 'nothing'}")


def _fits(asked: Asked) -> str:
    if asked.plan is not None:
        return f"fits with {', '.join(asked.plan.techniques)}" if asked.plan.techniques else "fits"
    return "refused" if asked.result is None else "does not fit"


def _ledger_range(check: Mapping[str, Any], answers: Answers) -> Outcome:
    return _range(check, gpu_figure(answers, str(check["item"])), answers)


def _host_range(check: Mapping[str, Any], answers: Answers) -> Outcome:
    return _range(check, host_figure(answers, str(check["item"])), answers)


def _range(check: Mapping[str, Any], size: int | None, answers: Answers) -> Outcome:
    item, (low, high) = str(check["item"]), check["gib"]
    if size is None:
        assert answers.asked is not None
        return _waits(f"no figure is called {item!r}" + (f"; {answers.asked.error}" if answers.asked.error else ""))
    return _verdict(float(low) <= size / GIB <= float(high), f"{item} {size / GIB:.2f} GiB, wanted {low} to {high}")


def _has_phase(check: Mapping[str, Any], answers: Answers) -> Outcome:
    assert answers.asked is not None
    ledger = answers.asked.ledger
    if ledger is None:
        return _waits(answers.asked.error)
    phase = Phase(str(check["phase"]).lower().replace("eval", "evaluate").replace("evaluateuate", "evaluate"))
    size = ledger.gpu.by_phase()[phase] + ledger.host.by_phase()[phase]
    return _verdict(size > 0, f"phase {phase}: {size / GIB:.2f} GiB on GPU and host")


def _has_item(check: Mapping[str, Any], answers: Answers) -> Outcome:
    return _item(check, answers, host=False)


def _host_has_item(check: Mapping[str, Any], answers: Answers) -> Outcome:
    return _item(check, answers, host=True)


def _item(check: Mapping[str, Any], answers: Answers, *, host: bool) -> Outcome:
    names: list[str] = []
    for asked in (answers.asked, answers.open):
        ledger = None if asked is None else asked.ledger
        result = None if asked is None else asked.result
        bills = [] if ledger is None else [ledger]
        if result is not None:
            bills.append(result.closest_ledger if isinstance(result, Infeasible) else result.ledger)
        for bill in bills:
            found = entries_called(bill.host if host else bill.gpu, str(check["item"]))
            if found is None:
                return _waits(f"no entry is known to be meant by {check['item']!r}")
            names += [entry.name for entry in found]
    return _verdict(bool(names), ", ".join(dict.fromkeys(names)) or f"no entry is meant by {check['item']!r}")


def _dominant(check: Mapping[str, Any], answers: Answers) -> Outcome:
    asked = answers.asked
    assert asked is not None
    if asked.ledger is None:
        return _waits(asked.error)
    gpu, item = asked.ledger.gpu, str(check["item"]).lower()
    if item in [account.value for account in Account]:
        accounts = gpu.by_account()
        largest = max(accounts, key=lambda account: accounts[account])
        return _verdict(largest.value == item, f"largest account at the peak: {largest}")
    alive = [entry for entry in gpu.entries if gpu.binding_moment in entry.moments]
    top = max(alive, key=lambda entry: entry.bytes)
    meant = entries_called(gpu, item) or []
    return _verdict(top in meant, f"largest entry at the peak: {top.name}, {top.bytes / GIB:.2f} GiB")


def _sufficient(check: Mapping[str, Any], answers: Answers) -> Outcome:
    """Any listed change must be what memc does, or offers; and nothing heavier may be done."""
    listed = [str(words) for words in check["any_of"]]
    asked, free = answers.asked, answers.open
    assert asked is not None
    assert free is not None
    plan = free.plan
    meant = {name for words in listed for name in techniques_meant(words)}
    inputs = [pattern for words in listed for pattern in inputs_meant(words)]
    offered = [
        item.input
        for result in (asked.result, free.result)
        if isinstance(result, Infeasible)
        for item in result.relaxations
    ]
    by_input = [name for name in offered if any(re.fullmatch(pattern, name) for pattern in inputs)]
    used = _changes(asked, plan) if plan is not None else set()
    heaviest = max(map(weight, meant), default=0)
    heavier = sorted(name for name in used if meant and weight(name) > heaviest and not _free_of_charge(name))
    detail = (
        f"plan: {', '.join(sorted(used)) or ('as asked' if plan else 'none')}; offered: {', '.join(offered) or '-'}"
    )
    if not meant and not inputs:
        return _waits(f"no technique or field is known to be meant by {listed}")
    if plan is not None and heavier:
        return _verdict(False, f"heavier than what is listed: {', '.join(heavier)}; {detail}")
    suffices = bool(used & meant) or bool(by_input) or (plan is not None and bool(meant) and not used)
    return _verdict(suffices, detail)


def _changes(asked: Asked, plan: Plan) -> set[str]:
    """Returns the techniques of a plan, and what else it does that the run as it was asked for did not."""
    used = set(plan.techniques)
    machine = asked.machine
    if machine is not None and machine.question.asked.loss is LossHead.PLAIN and plan.config.loss is LossHead.CHUNKED:
        used.add("chunked-loss")
    return used


def _free_of_charge(name: str) -> bool:
    """Whether a technique only spreads or splits what one step does anyway, so that it is never the heavier one."""
    return weight(name) <= 5 or (name.startswith(("zero-", "fsdp")) and not changes_method(name))


def _diagnostic(check: Mapping[str, Any], answers: Answers) -> Outcome:
    text = answers.text
    missing = [str(words) for words in check["mentions"] if str(words).lower() not in text]
    return _verdict(not missing, f"not said: {', '.join(missing)}" if missing else "all said")


def _refuse(check: Mapping[str, Any], answers: Answers) -> Outcome:
    asked = answers.asked
    assert asked is not None
    if "mentions" not in check:
        return _refused_when(str(check.get("when", "")), answers)
    if asked.plan is not None:
        return _verdict(False, "the run as it was asked for has a plan")
    missing = [str(words) for words in check["mentions"] if str(words).lower() not in asked.text]
    return _verdict(not missing, f"refused; not said: {', '.join(missing)}" if missing else "refused, all said")


def _refused_when(when: str, answers: Answers) -> Outcome:
    """Returns whether memc refuses the run under a condition, which is read as pins that are set to meet it.

    Only a run that is refused for one of these pins counts.
    """
    spec, asked = answers.reading.asked, answers.asked
    assert spec is not None
    assert asked is not None
    meant = [_pins_meant(part) for part in re.split(r"\s+and\s+|\s*&+\s*", when.strip())]
    if not when or not all(meant):
        return _waits(f"the condition {when!r} is no spec")
    pins = {name: value for part in meant for name, value in part.items()}
    other = ask({**spec, "pin": {**spec["pin"], **pins}}, asked.path.parent / "when")
    shown = ", ".join(f"{name}: {value}" for name, value in pins.items())
    if other.answer is not None:
        return _verdict(False, f"{shown}: {_fits(other)}")
    by_these = any(f"pin.{name}" in other.error for name in pins)
    return _verdict(by_these, f"{shown}: {other.error.splitlines()[0]}")


_PIN_WORDS: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"hpz", {"zero_stage": 3, "hybrid_sharding": True}),
    (r"hybrid", {"hybrid_sharding": True}),
    (r"fsdp", {"engine": "fsdp"}),
    (r"offload_optimizer|optimizer offload", {"offload_optimizer": "cpu"}),
    (r"offload", {"offload_optimizer": "cpu", "offload_param": "cpu"}),
    (r"8-?bit", {"optimizer": "adamw_8bit"}),
)


def _pins_meant(words: str) -> dict[str, Any]:
    """Returns the pins that make a condition true; empty when none are known."""
    text = words.lower()
    stage = re.search(r"(?:zero|stage)\D*([0-3])\b", text)
    if stage is not None and "hpz" not in text:
        return {"zero_stage": int(stage.group(1))}
    return next((pins for pattern, pins in _PIN_WORDS if re.search(pattern, text)), {})


def _must_not(check: Mapping[str, Any], answers: Answers) -> Outcome:
    what = str(check["what"]).lower()
    asked, free = answers.asked, answers.open
    assert asked is not None
    assert free is not None
    results = [result for result in (asked.result, free.result) if result is not None]
    offered = [item.input for result in results if isinstance(result, Infeasible) for item in result.relaxations]
    used = set(free.plan.techniques) if free.plan is not None else set()
    if re.search(r"data-parallel|more gpus|adding.*gpus|add.*gpus", what):
        found = [name for name in offered if name.startswith(("hardware.count", "hardware.nodes"))]
        return _verdict(not found, f"offered: {', '.join(offered) or '-'}")
    if "load" in what and "batch" in what:
        binding = [_binding_phase(result) for result in results]
        smaller = "pin.micro_batch_size" in offered or any(name.startswith("accumulate-") for name in used)
        return _verdict(not (Phase.LOAD in binding and smaller), f"binding phases: {', '.join(binding)}")
    barred = techniques_meant(what)
    if "shard" in what or "zero" in what or "fsdp" in what:
        barred |= {"zero-1", "zero-2", "zero-3", "fsdp", "zero-3-hybrid", "fsdp-hybrid"}
    if not barred:
        return _waits(f"nothing is known to be meant by {what!r}")
    found = sorted(used & barred)
    return _verdict(not found, f"plan: {', '.join(sorted(used)) or 'as asked'}")


def _binding_phase(result: Any) -> Phase:
    ledger = result.closest_ledger if isinstance(result, Infeasible) else result.ledger
    phase: Phase = ledger.gpu.binding_phase
    return phase


def _rung(check: Mapping[str, Any], answers: Answers) -> Outcome:
    value = str(check["value"]).lower()
    asked, free = answers.asked, answers.open
    assert asked is not None
    assert free is not None
    if "no extra rung" in value or "as asked" in value or "beyond requested" in value:
        plan = asked.plan
        used = ", ".join(plan.techniques) if plan else "no plan"
        return _verdict(plan is not None and not plan.techniques, f"plan of the run as asked: {used or 'as asked'}")
    plan = free.plan
    if plan is None:
        return _verdict(False, "there is no plan")
    wanted, _, barred = value.partition("not ")
    names = _sharding_names(plan.config)
    detail = f"plan: {', '.join(plan.techniques) or 'as asked'}"
    if "flat" in barred:
        flat = plan.config.nodes > 1 and ("zero3" in names or "fsdp" in names) and "hybrid" not in names
        return _verdict(not flat, detail)
    plainly = re.sub(r"[^a-z0-9]+", " ", wanted.replace("zero-", "zero")).split()
    unwanted = re.sub(r"[^a-z0-9]+", " ", barred.replace("zero-", "zero")).split()
    known = {"ddp", "single", "zero1", "zero2", "zero3", "fsdp", "hybrid", "lora", "qlora", "full"}
    good, bad = known & set(plainly), known & set(unwanted)
    if not good and not bad:
        return _by_techniques(value, wanted, barred, plan)
    return _verdict((not good or bool(names & good)) and not names & bad, detail)


def _by_techniques(value: str, wanted: str, barred: str, plan: Plan) -> Outcome:
    """Returns whether a plan uses one of the techniques that are meant, and none that are ruled out."""
    meant, ruled_out, used = techniques_meant(wanted), techniques_meant(barred), set(plan.techniques)
    if not meant and not ruled_out:
        return _waits(f"no rung is known to be meant by {value!r}")
    shown = ", ".join(plan.techniques) or "as asked"
    return _verdict((not meant or bool(used & meant)) and not used & ruled_out, f"plan: {shown}")


def _sharding_names(config: Any) -> set[str]:
    names = {config.engine.value, config.method.value}
    if config.zero is not None:
        names |= {f"zero{config.zero.stage}"} | ({"hybrid"} if config.zero.hpz_partition > 1 else set())
    if config.fsdp is not None and config.fsdp.hybrid:
        names.add("hybrid")
    return names


def _binding(check: Mapping[str, Any], answers: Answers) -> Outcome:
    value = str(check["value"]).lower()
    wanted = next((name for name in ("host", "nvme", "time", "gpu") if name in value), "gpu")
    asked = answers.asked
    assert asked is not None
    result = asked.result
    if isinstance(result, Infeasible):
        return _verdict(str(result.binding) == wanted, f"binding: {result.binding}")
    if result is None:
        return _waits(asked.error)
    tight = wanted == "host" and any("host memory is tight" in warning for warning in result.warnings)
    return _verdict(tight, "there is a plan" + (", and it is told that host memory is tight" if tight else ""))


def _margin(check: Mapping[str, Any], answers: Answers) -> Outcome:
    asked = answers.asked
    assert asked is not None
    result = asked.result
    if result is None:
        return _waits(asked.error)
    if isinstance(result, Infeasible):
        return _verdict(True, f"does not fit: {result.shortfall_bytes / GIB:.2f} GiB short")
    spare = 1 - result.ledger.gpu.required_bytes / result.budget.capacity_bytes
    warned = any(re.search(r"headroom|tight|margin|spill", warning) for warning in result.warnings)
    below = float(check["below_percent"]) / 100
    return _verdict(
        spare >= below or warned, f"{spare:.1%} of the card is free; {'warned' if warned else 'not warned'}"
    )


def _invariant(check: Mapping[str, Any], answers: Answers) -> Outcome:
    counts = [int(number) for number in re.findall(r"\d+", str(check["what"]))]
    asked, spec = answers.asked, answers.reading.asked
    assert asked is not None
    assert spec is not None
    if "activation" not in str(check["what"]).lower() or len(counts) < 2:
        return _waits(f"nothing is known to be meant by {check['what']!r}")
    sizes = []
    for count in counts:
        batch = {**spec["training"], "global_batch_size": count}
        changed = {**spec, "hardware": {**spec["hardware"], "count": count}, "training": batch}
        other = ask(changed, asked.path.parent / f"cards-{count}")
        if other.ledger is None:
            return _waits(other.error)
        sizes.append(
            max(other.ledger.gpu.by_account(moment)[Account.ACTIVATIONS] for moment in other.ledger.gpu.by_moment)
        )
    return _verdict(
        len(set(sizes)) == 1, f"activations on {counts} cards: {[round(size / GIB, 2) for size in sizes]} GiB"
    )


def _report_has(check: Mapping[str, Any], answers: Answers) -> Outcome:
    what, text = str(check["what"]).lower(), answers.text
    if "assumption" in what:
        wanted = [word for word in ("attention", "quantisation") if word in what]
        shown = {"attention": ("sdpa", "eager", "flash"), "quantisation": ("nf4", "4-bit", "qlora")}
        missing = [word for word in wanted if not any(sign in text for sign in shown[word])]
        return _verdict(not missing, f"not said: {', '.join(missing)}" if missing else "all said")
    if "min_gpus" in what or "max_seq" in what or "maximum length" in what:
        return _inverse(answers)
    return _waits(f"nothing is known to be meant by {what!r}")


def _inverse(answers: Answers) -> Outcome:
    """Returns whether `memc solve` says how few cards carry the length, and how long the cards carry."""
    assert answers.asked is not None
    if answers.asked.answer is None:
        return _waits(answers.asked.error)
    loaded = answers.asked.answer.loaded
    gpu, model = driver.facts_of(loaded)
    desk = Desk(loaded, model, gpu, loaded.spec.data.samples)
    cards, length = solve_for(desk, Quantity.COUNT), solve_for(desk, Quantity.MAX_LENGTH)
    said = [item.answer.value if item.answer is not None else None for item in (cards, length)]
    return _verdict(None not in said, f"memc solve: count {said[0]}, max_length {said[1]}")


def _emit_has(check: Mapping[str, Any], answers: Answers) -> Outcome:
    return _emitted([str(check["key"])], check, answers)


def _emit_any_of(check: Mapping[str, Any], answers: Answers) -> Outcome:
    return _emitted([str(key) for key in check["keys"]], check, answers)


def _written(answers: Answers) -> dict[str, dict[str, str]]:
    """Returns the files of the run as asked, and of the plan with the choice left open, where there are any.

    Where neither has a plan: those of the run with the change that memc offers.
    """
    both = {"as asked": answers.asked, "choice left open": answers.open}
    found = {whose: asked.files for whose, asked in both.items() if asked is not None and asked.files}
    room = None if found else with_files(answers)
    return found if room is None else {room[0]: room[1].files}


def _is_text(written: Mapping[str, dict[str, str]]) -> bool:
    """Whether the files are those of a model of text that stands in for another one."""
    return any(", of " in whose for whose in written)


def _files(answers: Answers) -> tuple[dict[str, str], str]:
    """Returns the files of the run as asked, else of the plan with the choice left open; and which they are."""
    return next(((files, whose) for whose, files in _written(answers).items()), ({}, ""))


def _emitted(keys: list[str], check: Mapping[str, Any], answers: Answers) -> Outcome:
    written = _written(answers)
    if not written or (_is_text(written) and re.search(r"pixel|image|visual", " ".join(keys).lower())):
        return _waits("there is no plan, so nothing is written")
    for whose, files in written.items():
        found = [key for key in keys if _holds(files, str(check.get("file", "")), key, check.get("value"))]
        if found:
            return _verdict(True, f"{whose}: {', '.join(found)}")
    return _verdict(False, f"none of {', '.join(keys)}")


def _holds(files: Mapping[str, str], file: str, key: str, value: Any) -> bool:
    """Whether generated files hold a setting: by dotted key in JSON and YAML, else by its words in the text."""
    name = _identifier(key)
    stated = re.search(r"(?:contains|:|==|=)\s*([\w.-]+)\s*$", key)
    wanted = value if value is not None else (stated.group(1) if stated else None)
    for path, text in files.items():
        if file and not _is_file(path, file):
            continue
        if path == "requirements.txt":
            if _requires(text, key):
                return True
            continue
        document: Any = None
        if path.endswith(".json"):
            document = json.loads(text)
        elif path.endswith((".yaml", ".yml")):
            document = yaml.safe_load(text)
        if isinstance(document, Mapping):
            reached, actual = _reach(document, name)
            if reached and (wanted is None or _equal(actual, wanted)):
                return True
        last = name.rsplit(".", 1)[-1]
        places = [match.end() for match in re.finditer(rf"\b{re.escape(last)}\b", text)]
        if places and (wanted is None or any(_near(_resolved(text, end), wanted) for end in places)):
            return True
    return False


def _identifier(key: str) -> str:
    """Returns the name in a key that may be wrapped in words: the first that looks like one of code."""
    words = re.findall(r"[A-Za-z][\w.]*", key)
    return next((word for word in words if "_" in word or "." in word), words[0] if words else key)


def _resolved(text: str, end: int) -> str:
    """Returns what follows a key; where that is a constant of the script, what the constant stands for."""
    after = text[end : end + 80]
    named = re.match(r"['\"]?\s*[=:,]\s*([A-Z][A-Z0-9_]+)\b", after)
    value = named and re.search(rf"^{named.group(1)}\s*=\s*(.+)$", text, flags=re.MULTILINE)
    return f"={value.group(1)}" if value else after


def _requires(text: str, key: str) -> bool:
    """Whether requirements name a version that is at least what ``library>=version`` asks."""
    wanted = re.fullmatch(r"([\w-]+)\s*(?:>=|==)\s*([\d.]+)", key.strip())
    if wanted is None:
        return re.search(rf"^{re.escape(key.strip())}", text, flags=re.MULTILINE) is not None
    named = re.search(rf"^{re.escape(wanted.group(1))}\s*[=>]=\s*([\d.]+)", text, flags=re.MULTILINE)
    return named is not None and _version(named.group(1)) >= _version(wanted.group(2))


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part)


def _is_file(path: str, words: str) -> bool:
    words = words.lower()
    kinds = {
        "accelerate": "accelerate.yaml",
        "ds_config": "ds_config.json",
        "adapter": "peft_config.json|train.py",
        "peft": "peft_config.json",
        "requirements": "requirements.txt",
        "train": "train.py",
        "launch": "launch.sh",
        "quant": "train.py",
    }
    found = [pattern for word, pattern in kinds.items() if word in words]
    return any(path in pattern.split("|") for pattern in found) if found else True


def _reach(document: Any, dotted: str) -> tuple[bool, Any]:
    for step in dotted.split("."):
        if not isinstance(document, Mapping) or step not in document:
            return False, None
        document = document[step]
    return True, document


def _equal(actual: Any, wanted: Any) -> bool:
    if isinstance(actual, list):
        return any(_equal(item, wanted) for item in actual)
    return str(actual).lower() == str(wanted).lower()


def _near(text: str, wanted: Any) -> bool:
    """Whether a value stands right after a key; ``<= other`` asks that some value stands there."""
    if isinstance(wanted, str) and wanted.startswith("<"):
        return bool(re.match(r"['\"]?\s*[=:,]", text))
    words = {"true": "true", "false": "false"}.get(str(wanted).lower(), str(wanted).lower())
    return bool(re.match(rf"['\"]?\s*[=:,)]*\s*['\"]?{re.escape(words)}\b", text.lower()))


def _emit_not(check: Mapping[str, Any], answers: Answers) -> Outcome:
    written = _written(answers)
    if not written:
        return _waits("there is no plan, so nothing is written")
    file, found = str(check.get("file", "")), []
    for whose, files in written.items():
        for key in map(str, check["keys"]):
            name, _, value = key.partition(":")
            if _holds(files, file, name, value.strip() or None):
                found.append(f"{key} ({whose})")
    return _verdict(not found, f"holds {', '.join(found)}" if found else "holds none of them")


def _emit_at_least(check: Mapping[str, Any], answers: Answers) -> Outcome:
    """Returns whether a number in a file is large enough, in the first files that have it."""
    written, key = _written(answers), str(check["key"])
    room = None if answers.asked is not None and answers.asked.files else with_files(answers)
    for whose, files in [*written.items(), *([(room[0], room[1].files)] if room is not None else [])]:
        for path, text in files.items():
            reached, actual = _reach(json.loads(text), key) if path.endswith(".json") else (False, None)
            if reached and isinstance(actual, int | float):
                return _verdict(actual >= float(check["value"]), f"{whose}: {key} is {actual:g}")
    if not written:
        return _waits("there is no plan, so nothing is written")
    return _verdict(False, f"{', '.join(written)}: not written")


def _emit_order(check: Mapping[str, Any], answers: Answers) -> Outcome:
    files, whose = _files(answers)
    script = files.get("train.py", "")
    if not script:
        return _waits("there is no plan, so nothing is written")
    first, second = (re.split(r"[(\s]", str(check[side]))[0] for side in ("before", "after"))
    first = {"TrainingArguments": r"(TrainingArguments|SFTConfig|training_arguments)\("}.get(
        first, re.escape(first) + r"\("
    )
    places = [re.search(pattern, script) for pattern in (first, re.escape(second) + r"\(")]
    if not all(places):
        return _verdict(False, f"{whose}: not both are in train.py")
    calls = _calls_in_order(script, first, re.escape(second) + r"\(")
    return _verdict(calls, f"{whose}: {'in that order' if calls else 'in the other order'}")


def _calls_in_order(script: str, first: str, second: str) -> bool:
    """Whether `main` reaches the first call before the second, by the order of the functions it calls."""
    bodies = dict(re.findall(r"^def (\w+)\(.*?\n((?:    .*\n|\n)+)", script, flags=re.MULTILINE))

    def position(pattern: str, body: str, depth: int = 0) -> list[int] | None:
        for match in re.finditer(rf"{pattern}|\b(\w+)\(", body):
            if re.match(pattern, match.group()):
                return [match.start()]
            called = match.group(match.lastindex) if match.lastindex else ""
            if called in bodies and depth < 4:
                inner = position(pattern, bodies[called], depth + 1)
                if inner is not None:
                    return [match.start(), *inner]
        return None

    main = bodies.get("main", script)
    one, two = position(first, main), position(second, main)
    return one is not None and two is not None and one < two


def _consistent(check: Mapping[str, Any], answers: Answers) -> Outcome:
    files, whose = _files(answers)
    if not files:
        return _waits("there is no plan, so nothing is written")
    if "precision" not in str(check["what"]).lower():
        return _waits(f"nothing is known to be meant by {check['what']!r}")
    said = set()
    if "ds_config.json" in files:
        document = json.loads(files["ds_config.json"])
        said |= {name for name in ("bf16", "fp16") if document.get(name, {}).get("enabled") is True}
    mixed = yaml.safe_load(files.get("accelerate.yaml", "{}")).get("mixed_precision")
    said |= {mixed} if mixed in ("bf16", "fp16") else set()
    said |= {name for name in ("bf16", "fp16") if re.search(rf"\b{name}\b['\"]?\s*[=:]\s*True", files["train.py"])}
    return _verdict(len(said) <= 1, f"{whose}: {', '.join(sorted(said)) or 'no 16-bit type'}")


def _time_reports(check: Mapping[str, Any], answers: Answers) -> Outcome:
    assert answers.open is not None
    plan = answers.open.plan
    if plan is None:
        return _waits("there is no plan, so there is no time")
    if not re.search(r"traffic|communication|inter-node", str(check["what"]).lower()):
        return _waits(f"nothing is known to be meant by {check['what']!r}")
    return _verdict("communication" in answers.open.text, f"{plan.clock.communication_seconds:.2f} s of communication")


def _time_uses(check: Mapping[str, Any], answers: Answers) -> Outcome:
    """Whether collectives are timed by all parameters and products by the active ones."""
    asked = answers.asked
    assert asked is not None
    machine = asked.machine
    if machine is None:
        return _waits(asked.error)
    counts = machine.estimator.counts(machine.question.asked)
    time = machine.time(machine.question.asked)
    needed = 2 * counts.total / 1e13  # gathered at more than any link carries
    uses = time.communication_seconds > 0 or machine.question.asked.engine in (Engine.SINGLE, Engine.DDP)
    return _verdict(
        uses, f"{time.communication_seconds:.2f} s of communication for {counts.total / 1e9:.1f}B ({needed:.2g})"
    )


def _alternative(check: Mapping[str, Any], answers: Answers) -> Outcome:
    assert answers.open is not None
    plan, value = answers.open.plan, str(check["value"]).lower()
    if plan is None:
        return _verdict(False, "there is no plan with the choice left open")
    names = _sharding_names(plan.config)
    wanted = {
        name for name in ("fsdp", "qlora", "lora", "zero1", "zero2", "zero3", "ddp") if re.search(rf"\b{name}\b", value)
    }
    return _verdict(wanted <= names, f"plan: {', '.join(sorted(names))}")


def _uses(check: Mapping[str, Any], answers: Answers) -> Outcome:
    if check["item"] != "visual_tokens":
        return _waits(f"{check['item']} has no place in a spec")
    machines = [item.machine for item in (answers.asked, answers.open) if item is not None]
    said = " ".join(" ".join(machine.question.assumptions) for machine in machines if machine is not None)
    stated = [int(text.replace(",", "")) for text in re.findall(r"images take ([0-9,]+) tokens", said)]
    right = int(check["value"]) in stated
    return _verdict(right, f"a sample's images take {', '.join(str(value) for value in dict.fromkeys(stated))} tokens")


def _runs(check: Mapping[str, Any], _answers: Answers) -> Outcome:
    """Returns how the end-to-end tests ended that show what a report asks of a run, where they have been run."""
    what = str(check.get("what", ""))
    shown = shown_by(what)
    if shown is None:
        return _waits(f"only a run can show it: {what}")
    names = f"{TESTS}: {', '.join(shown.tests)}"
    if shown.passed is None:
        return _waits(f"shown by {names}; make e2e runs them and keeps how they ended")
    return _verdict(shown.passed, f"{'shown by' if shown.passed else 'failed:'} {names}")


def _lint_says(check: Mapping[str, Any], answers: Answers) -> Outcome:
    """Returns whether the lint says what a report wants said of its files, or of memc's own after an edit."""
    severity = str(check.get("severity", "error"))
    if "mutation" in check:
        return _lint_of_edit(str(check["mutation"]), severity, answers)
    remarks, reason = lint_text(answers)
    if reason:
        return _waits(reason)
    severe = [item for item in remarks if item.weight in weights_of(severity)]
    missing = [str(words) for words in check["mentions"] if str(words).lower() not in said(severe)]
    codes = ", ".join(sorted({item.code for item in severe})) or "nothing"
    return _verdict(not missing, f"{codes}" + (f"; not said: {', '.join(missing)}" if missing else ""))


def _lint_of_edit(words: str, severity: str, answers: Answers) -> Outcome:
    """Returns whether the lint finds an edit of the files that memc wrote, and found nothing before."""
    if answers.asked is None or answers.open is None:
        return _waits("; ".join(answers.reading.waits) or "there is no spec")
    files, whose = _files(answers)
    if not files:
        return _waits("there is no plan, so nothing is written")
    edited = edited_by_words({name: text for name, text in files.items() if name != "memc.lock"}, words)
    if edited is None:
        return _waits(f"the edit {words!r} is not understood, or has no place in the files")
    changed, name = edited
    own = {name: text for name, text in files.items() if name != "memc.lock"}
    before = {(item.code, item.message) for item in remarks_on(own, answers.folder / "own", given(answers))}
    after = remarks_on(changed, answers.folder / "edited", given(answers))
    new = [item for item in after if (item.code, item.message) not in before and item.weight in weights_of(severity)]
    codes = ", ".join(sorted({item.code for item in new})) or "nothing new"
    return _verdict(any(name.lower() in said([item]) for item in new), f"{whose}, {words}: {codes}")


def _suggests(check: Mapping[str, Any], answers: Answers) -> Outcome:
    """Returns whether the lint names the new word in the same breath as the old one."""
    remarks, reason = lint_text(answers)
    if reason:
        return _waits(reason)
    missing = [
        f"{old} -> {new}"
        for old, new in check["pairs"].items()
        if not any(str(old).lower() in said([item]) and str(new).lower() in said([item]) for item in remarks)
    ]
    return _verdict(not missing, f"not suggested: {', '.join(missing)}" if missing else "all suggested")


_OF_ANY_RUN = ("emit_has", "emit_any_of", "emit_not", "emit_order", "consistent")
_LINT = ("verify_error", "verify_flags", "suggests", "smoke", "post_run_check")
_CHECKS: dict[str, Callable[[Mapping[str, Any], Answers], Outcome]] = {
    "ledger_range": _ledger_range,
    "host_ledger_range": _host_range,
    "ledger_has_phase": _has_phase,
    "ledger_has_item": _has_item,
    "host_ledger_has_item": _host_has_item,
    "ledger_dominant": _dominant,
    "ledger_uses": _uses,
    "smallest_sufficient_change": _sufficient,
    "diagnostic": _diagnostic,
    "refuse": _refuse,
    "must_not": _must_not,
    "rung": _rung,
    "binding_resource": _binding,
    "margin_warning": _margin,
    "invariant": _invariant,
    "report_has": _report_has,
    "emit_has": _emit_has,
    "emit_any_of": _emit_any_of,
    "emit_not": _emit_not,
    "emit_at_least": _emit_at_least,
    "emit_order": _emit_order,
    "consistent": _consistent,
    "time_reports": _time_reports,
    "time_uses": _time_uses,
    "compile_alternative": _alternative,
    "smoke": _runs,
    "post_run_check": _runs,
    "verify_error": _lint_says,
    "verify_flags": _lint_says,
    "suggests": _suggests,
}
