"""memc diff: folders, specs and git revisions; what moves, and whether that touches numerics."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from inprocess import SMALL, Ended, command_runner
from memc import driver
from memc.comparison.compare import compare_locks
from memc.comparison.fidelity import DIMENSION_SETTINGS, SETTING_TOUCH, Touch, touch_of
from memc.config import Engine, LossHead, Method, Offload, Reference, Task, TrainingConfig
from memc.document import settings_document
from memc.errors import ExitCode
from memc.facts import load_gpu, load_model
from memc.ladder import LADDER, Fidelity, Situation
from memc.ladder.engines import under_deepspeed, under_fsdp
from memc.ledger import ledger_facts
from memc.plan import Plan, RunSettings
from memc.solver.resolve import resolve
from memc.spec import load_spec


@pytest.fixture
def memc(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    monkeypatch.chdir(tmp_path)

    return command_runner(capsys)


def spec(name: str, **changes: str) -> str:
    text = SMALL
    for before, after in changes.items():
        before = before.replace("__", ": ")
        assert before in text
        text = text.replace(before, after)
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)
    return name


def git(*arguments: str, folder: str = ".") -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture
def repository(memc: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """A repository with a compiled folder in two commits, in a folder with a space."""
    Path("my repo").mkdir()
    monkeypatch.chdir("my repo")
    git("init", "--quiet", "--initial-branch", "main")
    spec("a b/spec.yaml")
    assert memc("compile", "a b/spec.yaml").code == 0
    git("add", "--all")
    git("commit", "--quiet", "--message", "one")
    spec("a b/spec.yaml", max_length__256="max_length: 512")
    assert memc("compile", "a b/spec.yaml").code == 0
    git("commit", "--quiet", "--all", "--message", "two")
    return memc


def changes(done: Ended) -> dict[str, Any]:
    assert done.code == 0, done.err
    document: dict[str, Any] = json.loads(done.out)
    assert document["schema"] == "memc/diff/1"
    found: dict[str, Any] = document["changes"]
    return found


def test_two_folders_of_the_same_spec_do_not_differ(memc: Callable[..., Ended]) -> None:
    spec("spec.yaml")
    for folder in ("one", "two"):
        assert memc("compile", "spec.yaml", "-o", folder).code == 0
    done = memc("diff", "one", "two")
    assert done.code == 0
    assert done.out.splitlines()[0].startswith("- one (memc ")
    assert done.out.endswith("\n\nno difference\n")
    found = changes(memc("diff", "--json", "one", "two"))
    assert [found[part] for part in ("spec", "facts", "versions", "settings", "lines", "memc")] == [[]] * 5 + [None]


def test_a_changed_spec_moves_lines_settings_time_and_money(memc: Callable[..., Ended]) -> None:
    spec("a.yaml")
    spec("b.yaml", max_length__256="max_length: 512", epochs__1="epochs: 2")
    found = changes(memc("diff", "--json", "a.yaml", "b.yaml"))
    assert [(c["key"], c["before"], c["after"]) for c in found["spec"]] == [
        ("data.max_length", 256, 512),
        ("training.epochs", 1.0, 2.0),
    ]
    assert {c["key"]: c["touch"] for c in found["settings"]}["max_length"] == "changes numerics"
    sizes = [abs(line["change_bytes"]) for line in found["lines"]]
    assert sizes == sorted(sizes, reverse=True)
    assert all(line["change_bytes"] == line["after_bytes"] - line["before_bytes"] != 0 for line in found["lines"])
    clock = {reading["key"]: reading for reading in found["clock"]}
    assert clock["total_seconds"]["after"] > clock["total_seconds"]["before"]
    shown = memc("diff", "a.yaml", "b.yaml").out
    assert "time of the run: " in shown
    assert "money: $" in shown
    assert "  max_length: 256 -> 512  [changes numerics]" in shown
    assert "  run.epochs: 1.0 -> 2.0  [changes numerics]" in shown
    assert "  spec field training.epochs: 1.0 -> 2.0" in shown


def test_the_lines_that_move_account_for_the_peak(memc: Callable[..., Ended]) -> None:
    """Lines outside the allocator and those alive at one common moment add up to what the peak moves by."""
    spec("a.yaml")
    spec("b.yaml", method__lora="method: full")
    found = changes(memc("diff", "--json", "a.yaml", "b.yaml"))
    (peak,) = (reading for reading in found["peaks"] if reading["key"] == "gpu.required_bytes")
    for path, key in (("a.yaml", "before"), ("b.yaml", "after")):
        result = driver.answer(Path(path)).result
        assert isinstance(result, Plan)
        assert peak[key] == result.ledger.gpu.required_bytes
    marked = {line["name"] for line in found["lines"] if line["at_peak"] and line["resource"] == "gpu"}
    result = driver.answer(Path("b.yaml")).result
    assert isinstance(result, Plan)
    bill = result.ledger.gpu
    alive = {e.name for e in bill.entries if bill.binding_moment in e.moments or not e.in_allocator}
    assert alive & {line["name"] for line in found["lines"]} <= marked


def test_memory_only_changes_are_told_from_numeric_ones(memc: Callable[..., Ended]) -> None:
    spec("a.yaml", method__lora="method: lora\npin: {micro_batch_size: 8, activation_checkpointing: 0}")
    spec("b.yaml", method__lora="method: lora\npin: {micro_batch_size: 2, activation_checkpointing: 1}")
    found = changes(memc("diff", "--json", "a.yaml", "b.yaml"))
    touched = {change["key"]: change["touch"] for change in found["settings"]}
    assert touched["micro_batch_size"] == touched["checkpoint_every"] == "only memory"
    assert set(touched.values()) == {"only memory"}


def test_a_spec_that_does_not_fit_is_compared_by_its_nearest_configuration(memc: Callable[..., Ended]) -> None:
    spec("a.yaml")
    spec("b.yaml", method__lora="method: lora\nmemory: {target: 100MiB}")
    done = memc("diff", "a.yaml", "b.yaml")
    assert done.code == 0
    assert "DOES NOT FIT" in done.out.splitlines()[1]


def test_a_revision_is_read_without_touching_the_work_tree(repository: Callable[..., Ended]) -> None:
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file() and ".git" not in path.parts}
    head = git("rev-parse", "HEAD")
    for arguments in (
        ("HEAD~1", "a b/out"),
        ("main~1", "a b/out/memc.lock"),
        ("HEAD~1:a b/out", "a b/out"),
        ("HEAD~1:./a b/out", "HEAD:a b/out/memc.lock"),
        ("HEAD~1:a b/spec.yaml", "a b/spec.yaml"),
        ("HEAD~1", "a b/spec.yaml"),
    ):
        found = changes(repository("diff", "--json", *arguments))
        assert [(c["key"], c["before"], c["after"]) for c in found["spec"]] == [("data.max_length", 256, 512)]
        assert found["lines"]
    assert before == {
        path: path.read_bytes() for path in Path().rglob("*") if path.is_file() and ".git" not in path.parts
    }
    assert (git("rev-parse", "HEAD"), git("status", "--porcelain")) == (head, "")
    shown = repository("diff", "HEAD~1", "a b/out").out.splitlines()
    assert shown[0].startswith("- HEAD~1:a b/out (memc ")
    assert shown[1].startswith("+ a b/out (memc ")


def test_a_revision_is_read_from_below_and_from_outside(
    repository: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir("a b")
    assert changes(repository("diff", "--json", "HEAD~1", "out"))["spec"]
    assert changes(repository("diff", "--json", "HEAD~1:./out", "out"))["spec"]
    assert changes(repository("diff", "--json", "HEAD~1:a b/out", "out"))["spec"]
    monkeypatch.chdir(tmp_path)
    assert changes(repository("diff", "--json", "HEAD~1", "my repo/a b/out"))["spec"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("nosuch", "a b/out"), "revision-unknown", "has no revision 'nosuch'"),
        (("HEAD~9:a b/out", "a b/out"), "revision-unknown", "has no revision 'HEAD~9'"),
        ((":a b/out", "a b/out"), "revision-unknown", "has no revision ''"),
        (("--", "--upload-pack=x", "a b/out"), "revision-unknown", "has no revision '--upload-pack=x'"),
        (("HEAD:nosuch", "a b/out"), "not-in-revision", "HEAD has no nosuch"),
        (("HEAD:a b", "a b/out"), "not-in-revision", "HEAD:a b holds no memc.lock"),
        (("HEAD:../../x", "a b/out"), "outside-repository", "lies outside the repository"),
        (("HEAD", "HEAD~1"), "revision-without-path", "does not say of what"),
        (("HEAD:blob", "a b/out"), "not-in-revision", "is not UTF-8 text"),
    ],
)
def test_what_a_revision_lacks_is_named(
    repository: Callable[..., Ended], arguments: tuple[str, ...], code: str, words: str
) -> None:
    Path("blob").write_bytes(b"\xff\xfe")
    git("add", "blob")
    git("commit", "--quiet", "--message", "three")
    done = repository("diff", *arguments)
    assert done.code == ExitCode.USAGE
    assert f"error[{code}]" in done.err
    assert words in done.err


def test_a_symbolic_link_in_a_revision_is_not_followed(repository: Callable[..., Ended]) -> None:
    Path("linked").mkdir()
    Path("linked/memc.lock").symlink_to("../a b/out/memc.lock")
    git("add", "linked")
    git("commit", "--quiet", "--message", "three")
    done = repository("diff", "HEAD:linked", "a b/out")
    assert (done.code, "HEAD:linked/memc.lock is not JSON" in done.err) == (ExitCode.STALE, True)


def test_outside_of_a_repository(memc: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    spec("spec.yaml")
    memc("compile", "spec.yaml")
    done = memc("diff", "HEAD~1", "out")
    assert (done.code, "error[not-a-repository]" in done.err) == (ExitCode.USAGE, True)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    done = memc("diff", "HEAD~1", "out")
    assert (done.code, "error[git-missing]" in done.err) == (ExitCode.USAGE, True)


def test_a_folder_without_a_lock(memc: Callable[..., Ended]) -> None:
    Path("empty").mkdir()
    spec("spec.yaml")
    done = memc("diff", "empty", "spec.yaml")
    assert (done.code, "error[no-lock]" in done.err) == (ExitCode.USAGE, True)


def plan_of(tmp_path: Path, text: str = SMALL) -> Plan:
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    result = driver.answer(path).result
    assert isinstance(result, Plan)
    return result


def test_every_setting_says_what_it_touches(tmp_path: Path) -> None:
    settings = {key.partition(".")[0] for key in settings_document(plan_of(tmp_path).config)}
    run = {f"run.{item.name}" for item in fields(RunSettings)}
    named = {key if key in run else key.partition(".")[0] for key in SETTING_TOUCH}
    assert settings | run == named
    assert touch_of("nosuch", 1, 2) is Touch.UNKNOWN


def test_optimizers_of_one_algorithm_do_not_touch_numerics() -> None:
    assert touch_of("optimizer", "adamw_torch", "adamw_torch_fused") is Touch.MEMORY
    assert touch_of("optimizer", "adamw_8bit", "paged_adamw_8bit") is Touch.MEMORY
    assert touch_of("optimizer", "adamw_torch_fused", "adamw_8bit") is Touch.NUMERICS
    assert touch_of("lora.rank", 8, 16) is Touch.NUMERICS
    assert touch_of("zero.stage", 2, 3) is Touch.MEMORY


APPLICABLE = [technique for technique in LADDER if technique.name != "fp8"]  # which stands for its reason alone


@pytest.mark.parametrize("technique", APPLICABLE, ids=[technique.name for technique in APPLICABLE])
def test_what_a_technique_changes_touches_what_the_ladder_says(technique: Any, tmp_path: Path) -> None:
    """Every technique, applied: the settings it changes carry its fidelity in the table of settings."""
    before, situation = applicable(technique, tmp_path)
    after = technique.apply(before, situation)
    old, new = dotted(settings_document(before)), dotted(settings_document(after))
    changed = {key for key in old.keys() & new.keys() if old[key] != new[key] and None not in (old[key], new[key])}
    assert changed & set(DIMENSION_SETTINGS[technique.dimension])
    touches = {key: touch_of(key, old[key], new[key]) for key in changed}
    if technique.fidelity is Fidelity.NUMERICS:
        assert Touch.NUMERICS in touches.values()
    else:
        assert set(touches.values()) == {Touch.MEMORY}


def dotted(document: dict[str, Any]) -> dict[str, Any]:
    """Returns settings by dotted name: those of a section that is there, one by one."""
    found: dict[str, Any] = {}
    for key, value in document.items():
        found |= {f"{key}.{name}": item for name, item in value.items()} if isinstance(value, dict) else {key: value}
    return found


def applicable(technique: Any, tmp_path: Path) -> tuple[TrainingConfig, Situation]:
    """Returns a configuration that the technique applies to, and its situation."""
    path = tmp_path / "spec.yaml"
    text = SMALL.replace("count: 1", "count: 2, nvme: 2TB").replace("gpu: t4", "gpu: l4")
    text = text.replace("method: lora", "method: [full, lora, qlora]")
    path.write_text(text.replace("global_batch_size: 8", "global_batch_size: 2048"))
    loaded = load_spec(path)
    gpu, model = load_gpu("l4"), load_model(loaded.spec.model, base_dir=tmp_path)
    question = resolve(loaded, model, gpu, ledger_facts(gpu), 175)
    divisor = technique.name.removeprefix("accumulate-").removesuffix("x")
    plain = replace(
        question.asked,
        method=Method.FULL,
        lora=None,
        loss=LossHead.PLAIN,
        engine=Engine.DDP,
        zero=None,
        micro_batch_size=int(divisor) if divisor.isdecimal() else 1024,
        gradient_accumulation_steps=1,
        max_length=256,
    )
    situation = question.situation
    zero3 = under_deepspeed(plain, replace(situation.zero, stage=3))
    bases = (
        plain,
        replace(plain, checkpoint_every=1),
        replace(plain, method=Method.LORA, lora=situation.lora),
        zero3,
        replace(zero3, zero=replace(situation.zero, stage=3, offload_optimizer=Offload.CPU)),
        under_fsdp(plain, situation.fsdp),
        under_fsdp(replace(plain, gpus_per_node=8), situation.fsdp),
        replace(plain, nodes=2),
        replace(plain, task=Task.DPO, reference=Reference.MODEL),
    )
    return next(base for base in bases if technique.why_not(base, situation) is None), situation


def test_lines_of_one_name_are_added_and_locks_of_unknown_sections_compare(tmp_path: Path) -> None:
    spec_path = tmp_path / "spec.yaml"
    spec_path.write_text(SMALL)
    answer = driver.answer(spec_path)
    lock = json.loads(driver.generate(answer, tmp_path / "out", "x")["memc.lock"])
    twice = json.loads(json.dumps(lock))
    entries = twice["ledger"]["gpu"]["entries"]
    entries.append(dict(entries[0]))
    del twice["run"]
    found = compare_locks(lock, twice)
    (move,) = found.lines
    assert (move.name, move.change_bytes) == (entries[0]["name"], entries[0]["bytes"])
    assert all(change.after is None for change in found.settings)


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [("gpu", "rtx-3090", "card t4 -> rtx-3090: "), ("model", "Qwen/Qwen2.5-0.5B", "model HuggingFaceTB/")],
)
def test_another_card_or_model_is_one_line_with_the_figures_that_differ(
    memc: Callable[..., Ended], field: str, value: str, line: str
) -> None:
    Path("one.yaml").write_text(SMALL, encoding="utf-8")
    old = {"gpu": "t4", "model": "HuggingFaceTB/SmolLM2-135M-Instruct"}[field]
    Path("two.yaml").write_text(SMALL.replace(old, value), encoding="utf-8")
    done = memc("diff", "one.yaml", "two.yaml")
    led = done.out.partition("what led to it:")[2].strip().splitlines()
    swap = next(text.strip() for text in led if text.strip().startswith(line))
    assert 0 < swap.count(" -> ") - 1 <= 6
    assert len(led) <= 6
    assert all(len(text) < 400 for text in led)
