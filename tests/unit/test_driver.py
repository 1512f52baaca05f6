"""The output folder: what is created, kept, refused, and what survives a write that fails."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from memc import driver
from memc.config import LossHead
from memc.driver import LOCK_NAME, Change, Written
from memc.errors import ExitCode, MemcError
from memc.plan import Plan

SMALL = """\
model: HuggingFaceTB/SmolLM2-135M-Instruct
data: {train: data/train.jsonl, max_length: 256, samples: 175, mean_tokens: 120}
method: lora
training: {epochs: 1, global_batch_size: 8}
hardware: {gpu: t4, count: 1, host_memory: 16GiB}
"""
SHARDED = SMALL.replace("count: 1", "count: 2").replace("method: lora", "method: lora\npin: {zero_stage: 2}")


def spec_at(path: Path, text: str = SMALL) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def texts(spec: Path, folder: Path) -> dict[str, str]:
    return driver.generate(driver.answer(spec), folder, driver.compile_command(spec, folder))


def compiled(spec: Path, folder: Path, *, force: bool = False) -> Written:
    (outcome,) = driver.write({folder: texts(spec, folder)}, force=force, keep=[spec])
    return outcome


def snapshot(root: Path) -> dict[str, bytes]:
    """Returns the content of every file below a folder, so that a test can say that nothing moved."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    return spec_at(tmp_path / "spec.yaml")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def test_a_new_folder_is_created_and_the_second_compile_finds_it_current(spec: Path, out: Path) -> None:
    first = compiled(spec, out)
    assert set(first.changes.values()) == {Change.CREATE}
    assert set(first.changes) == {path.name for path in out.iterdir()}
    before = snapshot(out)
    times = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    second = compiled(spec, out)
    assert second.current
    assert snapshot(out) == before
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == times


def test_the_launcher_may_be_run_and_nothing_else(spec: Path, out: Path) -> None:
    compiled(spec, out)
    assert [path.name for path in sorted(out.iterdir()) if path.stat().st_mode & 0o111] == ["launch.sh"]


def test_the_lock_records_the_digest_of_every_other_file(spec: Path, out: Path) -> None:
    compiled(spec, out)
    lock = json.loads((out / LOCK_NAME).read_text(encoding="utf-8"))
    assert set(lock["files"]) == {path.name for path in out.iterdir()} - {LOCK_NAME}
    assert lock["spec"]["path"] == "../spec.yaml"
    assert lock["command"] == "memc compile spec.yaml -o out"


def test_output_does_not_depend_on_the_working_directory(
    spec: Path, out: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec.write_text(SMALL.replace(", samples: 175", ""), encoding="utf-8")
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "data").mkdir(parents=True)
    (elsewhere / "data" / "train.jsonl").write_text('{"text": "x"}\n' * 9, encoding="utf-8")
    absolute = texts(spec, out)
    monkeypatch.chdir(tmp_path)
    assert texts(Path("spec.yaml"), Path("out")) == absolute
    monkeypatch.chdir(elsewhere)
    assert texts(Path("../spec.yaml"), Path("../out")) == absolute


def test_a_file_beside_the_spec_counts_for_more_than_data_samples(spec: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"text": "a"}\n' * 40, encoding="utf-8")
    plan = driver.answer(spec).result
    assert isinstance(plan, Plan)
    assert plan.total_steps == 5  # 40 samples, 8 in a step
    assert "data.samples says 175, but data/train.jsonl beside the spec holds 40" in " ".join(plan.warnings)
    assert plan.facts["data.samples"] == "40"
    assert plan.run.save_steps <= plan.total_steps


def test_samples_are_counted_beside_the_spec(spec: Path, tmp_path: Path) -> None:
    spec.write_text(SMALL.replace(", samples: 175", ""), encoding="utf-8")
    assert driver.count_samples(driver.load_spec(spec)) is None
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n{"a": 3}', encoding="utf-8")
    assert driver.count_samples(driver.load_spec(spec)) == 3


def test_a_data_path_that_no_file_system_takes_leaves_the_amount_unknown(spec: Path) -> None:
    spec.write_text(SMALL.replace(", samples: 175", "").replace("train.jsonl", "x" * 300 + ".jsonl"), encoding="utf-8")
    assert driver.count_samples(driver.load_spec(spec)) is None


def test_a_model_of_another_objective_has_a_plan_and_no_files(tmp_path: Path) -> None:
    path = spec_at(tmp_path / "t5.yaml", SMALL.replace("HuggingFaceTB/SmolLM2-135M-Instruct", "google-t5/t5-small"))
    solved = driver.answer(path)
    assert isinstance(solved.result, Plan)
    assert solved.result.config.loss is LossHead.PLAIN
    with pytest.raises(MemcError) as caught:
        driver.generate(solved, tmp_path / "out", "memc compile t5.yaml -o out")
    problem = caught.value.diagnostics[0]
    assert problem.code == "objective-not-emitted"
    assert "google-t5/t5-small (t5) is trained as seq2seq lm" in problem.message
    assert problem.where is not None
    assert (problem.where.line, problem.where.field) == (1, "model")


def test_a_changed_spec_updates_only_what_it_changes(spec: Path, out: Path) -> None:
    compiled(spec, out)
    spec.write_text(SMALL.replace("epochs: 1", "epochs: 2"), encoding="utf-8")
    changes = compiled(spec, out).changes
    assert changes["train.py"] is Change.UPDATE
    assert changes[LOCK_NAME] is Change.UPDATE
    assert changes["requirements.txt"] is Change.IDENTICAL


def test_a_hand_edited_file_stops_the_compile_before_anything_is_written(spec: Path, out: Path) -> None:
    compiled(spec, out)
    (out / "train.py").write_text("mine\n", encoding="utf-8")
    spec.write_text(SMALL.replace("epochs: 1", "epochs: 2"), encoding="utf-8")
    before = snapshot(out)
    with pytest.raises(MemcError) as caught:
        compiled(spec, out)
    assert caught.value.exit_code is ExitCode.STALE
    assert [item.code for item in caught.value.diagnostics] == ["would-overwrite"]
    assert "train.py was edited by hand" in str(caught.value)
    assert "--force" in str(caught.value)
    assert snapshot(out) == before


def test_force_overwrites_what_was_edited(spec: Path, out: Path) -> None:
    compiled(spec, out)
    before = snapshot(out)
    (out / "train.py").write_text("mine\n", encoding="utf-8")
    assert compiled(spec, out, force=True).changes["train.py"] is Change.EDITED
    assert snapshot(out) == before


def test_a_file_that_memc_never_wrote_is_not_overwritten(spec: Path, out: Path) -> None:
    out.mkdir()
    (out / "train.py").write_text("somebody's\n", encoding="utf-8")
    with pytest.raises(MemcError) as caught:
        compiled(spec, out)
    assert caught.value.exit_code is ExitCode.STALE
    assert "was not written by memc" in str(caught.value)
    assert snapshot(out) == {"train.py": b"somebody's\n"}
    compiled(spec, out, force=True)
    assert (out / "train.py").read_text(encoding="utf-8") != "somebody's\n"


@pytest.mark.parametrize("content", ["not json", "[]", '{"schema": "other/1"}', '{"schema": 3}', "\ud800"])
def test_a_lock_of_something_else_is_foreign(spec: Path, out: Path, content: str) -> None:
    out.mkdir()
    (out / LOCK_NAME).write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(MemcError) as caught:
        compiled(spec, out)
    assert caught.value.exit_code is ExitCode.STALE
    assert LOCK_NAME in str(caught.value)


def test_other_files_of_the_folder_are_left_alone(spec: Path, out: Path) -> None:
    out.mkdir()
    (out / "notes.txt").write_text("mine", encoding="utf-8")
    assert "notes.txt" not in compiled(spec, out).changes
    assert (out / "notes.txt").read_text(encoding="utf-8") == "mine"


def test_a_file_that_the_spec_no_longer_yields_is_reported_until_it_is_gone(spec: Path, out: Path) -> None:
    spec.write_text(SHARDED, encoding="utf-8")
    compiled(spec, out)
    assert (out / "ds_config.json").is_file()
    spec.write_text(SMALL, encoding="utf-8")
    for _ in range(2):
        assert compiled(spec, out).changes["ds_config.json"] is Change.LEFT_OVER
        assert (out / "ds_config.json").is_file()
    (stale,) = driver.stale([driver.compare(texts(spec, out), out)])
    assert "ds_config.json" in stale.message
    assert "delete" in stale.hint
    (out / "ds_config.json").unlink()
    assert "ds_config.json" not in compiled(spec, out).changes
    assert compiled(spec, out).current
    fresh = out.parent / "fresh"
    assert set(snapshot(out)) == set(texts(spec, fresh))


def test_going_back_to_an_earlier_spec_needs_no_force(spec: Path, out: Path) -> None:
    for text in (SHARDED, SMALL, SHARDED.replace("global_batch_size: 8", "global_batch_size: 16")):
        spec.write_text(text, encoding="utf-8")
        compiled(spec, out)
    assert compiled(spec, out).current


def test_a_left_over_file_that_was_edited_is_not_overwritten_when_it_is_wanted_again(spec: Path, out: Path) -> None:
    for text in (SHARDED, SMALL):
        spec.write_text(text, encoding="utf-8")
        compiled(spec, out)
    (out / "ds_config.json").write_text("{}", encoding="utf-8")
    spec.write_text(SHARDED, encoding="utf-8")
    with pytest.raises(MemcError, match=r"ds_config\.json was edited by hand"):
        compiled(spec, out)


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_in_the_place_of_a_file_stops_before_the_first_write(spec: Path, out: Path, force: bool) -> None:
    (out / "train.py").mkdir(parents=True)
    with pytest.raises(MemcError, match=r"train\.py is a folder there") as caught:
        compiled(spec, out, force=force)
    assert caught.value.exit_code is ExitCode.USAGE
    assert [path.name for path in out.iterdir()] == ["train.py"]


def test_a_write_that_fails_midway_leaves_every_file_as_it_was(
    spec: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(spec, out)
    before = snapshot(out)
    spec.write_text(SMALL.replace("epochs: 1", "epochs: 2"), encoding="utf-8")
    made = 0
    mkstemp = driver.tempfile.mkstemp

    def full_after_one(prefix: str, dir: Path) -> tuple[int, str]:
        nonlocal made
        made += 1
        if made > 1:
            raise OSError(28, "No space left on device")
        return mkstemp(prefix=prefix, dir=dir)

    monkeypatch.setattr(driver.tempfile, "mkstemp", full_after_one)
    with pytest.raises(MemcError, match="No space left on device") as caught:
        compiled(spec, out)
    assert caught.value.diagnostics[0].code == "cannot-write"
    assert made == 2
    assert snapshot(out) == before


def test_a_compile_that_was_cut_off_while_renaming_can_be_run_again(
    spec: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(spec, out)
    spec.write_text(SMALL.replace("epochs: 1", "epochs: 2").replace("lora", "full"), encoding="utf-8")
    wanted = {name: text.encode() for name, text in texts(spec, out).items()}
    replace, renamed = Path.replace, []

    def cut_off(self: Path, target: Path) -> Path:
        if renamed:
            raise KeyboardInterrupt
        renamed.append(target.name)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", cut_off)
    with pytest.raises(KeyboardInterrupt):
        compiled(spec, out)
    monkeypatch.undo()
    assert renamed != [LOCK_NAME]
    assert not list(out.glob(".*"))
    compiled(spec, out)
    assert wanted.items() - {(LOCK_NAME, wanted[LOCK_NAME])} <= snapshot(out).items()


def test_an_output_folder_behind_a_link_is_followed(spec: Path, tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "out").symlink_to(real)
    compiled(spec, tmp_path / "out")
    assert (real / "train.py").is_file()
    assert (tmp_path / "out").is_symlink()


def test_a_link_in_the_place_of_a_file_is_never_written_through(spec: Path, out: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim.py"
    victim.write_text("precious\n", encoding="utf-8")
    out.mkdir()
    (out / "train.py").symlink_to(victim)
    with pytest.raises(MemcError) as caught:
        compiled(spec, out)
    assert caught.value.exit_code is ExitCode.STALE
    compiled(spec, out, force=True)
    assert victim.read_text(encoding="utf-8") == "precious\n"
    assert not (out / "train.py").is_symlink()


def test_a_link_that_names_itself_is_no_crash(spec: Path, out: Path) -> None:
    out.mkdir()
    (out / "train.py").symlink_to("train.py")
    with pytest.raises(MemcError) as caught:
        compiled(spec, out)
    assert caught.value.exit_code is ExitCode.STALE


def test_a_file_in_the_place_of_the_folder_is_refused(spec: Path, out: Path) -> None:
    out.write_text("a file", encoding="utf-8")
    for folder in (out, out / "deeper"):
        with pytest.raises(MemcError) as caught:
            compiled(spec, folder)
        assert caught.value.exit_code is ExitCode.USAGE
        assert caught.value.diagnostics[0].code == "cannot-write"
    assert out.read_text(encoding="utf-8") == "a file"


@pytest.mark.parametrize("name", ["train.py", LOCK_NAME, "PLAN.md"])
def test_a_spec_is_never_overwritten_by_its_own_output(tmp_path: Path, name: str) -> None:
    spec = spec_at(tmp_path / "out" / name)
    with pytest.raises(MemcError, match="is the spec itself"):
        compiled(spec, tmp_path / "out", force=True)
    assert snapshot(tmp_path / "out") == {name: SMALL.encode()}


def test_a_spec_may_lie_in_its_own_output_folder(tmp_path: Path) -> None:
    spec = spec_at(tmp_path / "out" / "spec.yaml")
    compiled(spec, tmp_path / "out")
    assert spec.read_text(encoding="utf-8") == SMALL
    assert driver.spec_path_of(tmp_path / "out").samefile(spec)
    assert compiled(spec, tmp_path / "out").current


@pytest.mark.parametrize(
    "name", ["a b.yaml", "-o.yaml", "$(touch x).yaml", "q'uo\"te.yaml", "模型.yaml", "nl\n.yaml", "spec"]
)
def test_odd_names_of_a_spec_come_back_from_the_lock(tmp_path: Path, name: str) -> None:
    spec = spec_at(tmp_path / "in" / name)
    compiled(spec, tmp_path / "out")
    assert driver.spec_path_of(tmp_path / "out").samefile(spec)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a_name_that_is_no_text_is_refused_in_words(tmp_path: Path) -> None:
    spec = spec_at(tmp_path / os.fsdecode(b"\xff.yaml"))
    with pytest.raises(MemcError, match="not UTF-8"):
        compiled(spec, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def with_measurement(out: Path) -> list[object]:
    lock = json.loads((out / LOCK_NAME).read_text(encoding="utf-8"))
    lock["measurements"] = [{"peak_reserved_bytes": 123}]
    (out / LOCK_NAME).write_text(json.dumps(lock), encoding="utf-8")
    return list(lock["measurements"])


def measurements(out: Path) -> list[object]:
    return list(json.loads((out / LOCK_NAME).read_text(encoding="utf-8"))["measurements"])


def test_measurements_stay_while_the_plan_does(spec: Path, out: Path) -> None:
    compiled(spec, out)
    kept = with_measurement(out)
    spec.write_text(SMALL.replace("epochs: 1", "epochs: 2"), encoding="utf-8")
    compiled(spec, out)
    assert measurements(out) == kept


@pytest.mark.parametrize(
    ("old", "new"),
    [("max_length: 256", "max_length: 512"), ("gpu: t4", "gpu: rtx-4090"), ("135M-Instruct", "360M-Instruct")],
)
def test_measurements_of_another_plan_are_dropped(spec: Path, out: Path, old: str, new: str) -> None:
    compiled(spec, out)
    with_measurement(out)
    spec.write_text(SMALL.replace(old, new), encoding="utf-8")
    compiled(spec, out)
    assert measurements(out) == []


def test_several_folders_are_written_together_or_not_at_all(tmp_path: Path) -> None:
    first, second = spec_at(tmp_path / "a.yaml"), spec_at(tmp_path / "b.yaml", SHARDED)
    folders = {tmp_path / "out" / "a": first, tmp_path / "out" / "b": second}
    (tmp_path / "out" / "b").mkdir(parents=True)
    (tmp_path / "out" / "b" / "train.py").write_text("mine", encoding="utf-8")
    with pytest.raises(MemcError):
        driver.write({folder: texts(spec, folder) for folder, spec in folders.items()})
    assert snapshot(tmp_path / "out") == {"b/train.py": b"mine"}


def test_errors_of_all_specs_are_told_together(tmp_path: Path) -> None:
    bad = spec_at(tmp_path / "bad.yaml", SMALL.replace("t4", "t44"))
    worse = spec_at(tmp_path / "worse.yaml", SMALL.replace("lora", "lorra").replace("epochs", "epoch"))
    with pytest.raises(MemcError) as caught:
        driver.answers([bad, spec_at(tmp_path / "good.yaml"), worse])
    assert caught.value.exit_code is ExitCode.USAGE
    files = [Path(item.where.file).name for item in caught.value.diagnostics if item.where]
    assert files == ["bad.yaml", "worse.yaml", "worse.yaml"]


def test_an_unknown_card_and_an_unknown_model_are_told_together(tmp_path: Path) -> None:
    spec = spec_at(tmp_path / "s.yaml", SMALL.replace("t4", "rtx4900").replace("SmolLM2-135M", "SmolLM2-136M"))
    with pytest.raises(MemcError) as caught:
        driver.answer(spec)
    assert [item.code for item in caught.value.diagnostics] == ["model-unknown", "gpu-unknown"]
    assert [str(item.where).split(" · ")[1] for item in caught.value.diagnostics] == ["model", "hardware.gpu"]
    assert "rtx-4090" in str(caught.value)


def test_a_folder_without_lock_is_no_plan(tmp_path: Path) -> None:
    with pytest.raises(MemcError, match=r"holds no memc\.lock"):
        driver.spec_path_of(tmp_path)


@pytest.mark.parametrize("named", ["gone.yaml", "", None, 3])
def test_a_lock_whose_spec_is_gone_says_so(spec: Path, out: Path, named: object) -> None:
    compiled(spec, out)
    lock = json.loads((out / LOCK_NAME).read_text(encoding="utf-8"))
    lock["spec"] = {"path": named} if named != 3 else named
    (out / LOCK_NAME).write_text(json.dumps(lock), encoding="utf-8")
    with pytest.raises(MemcError, match="which is not there"):
        driver.spec_path_of(out)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("data/train.csv", "a .csv file"),
        ("train.jsonl.gz", "a .gz file"),
        ("tatsu-lab/alpaca", "it looks like a dataset of the Hugging Face hub"),
        ("org/set-v1.5", "it looks like a dataset of the Hugging Face hub"),
        ("data/", "it is a folder"),
        ("there", "it is a folder"),
        ("away", "its name has no suffix"),
        ("rows.xlsx", "its name ends in .xlsx"),
    ],
)
@pytest.mark.parametrize("field", ["train", "eval"])
def test_data_that_the_script_cannot_read_are_not_compiled(tmp_path: Path, field: str, name: str, what: str) -> None:
    (tmp_path / "there").mkdir()
    both = {"train": "data/train.jsonl"} | {field: name}
    named = ", ".join(f"{key}: {value}" for key, value in both.items())
    spec = spec_at(tmp_path / "spec.yaml", SMALL.replace("train: data/train.jsonl", named))
    with pytest.raises(MemcError) as caught:
        texts(spec, tmp_path / "out")
    (found,) = caught.value.diagnostics
    assert found.code == "data-not-readable"
    assert f"{name} is no file that train.py can read: {what}" in found.message
    assert f"data.{field}" in str(found.where)


@pytest.mark.parametrize("name", ["rows", "a.JSONL", "b.json", "c.parquet", "d.ndjson"])
def test_data_that_the_script_can_read_are_compiled(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"text": "a"}\n')
    assert texts(spec_at(tmp_path / "spec.yaml", SMALL.replace("data/train.jsonl", name)), tmp_path / "out")


def test_what_only_can_be_priced_is_not_rendered(tmp_path: Path) -> None:
    nothing = spec_at(tmp_path / "nothing.yaml", SMALL.replace("train: data/train.jsonl, ", ""))
    with pytest.raises(MemcError) as caught:
        texts(nothing, tmp_path / "out")
    assert caught.value.diagnostics[0].code == "no-training-file"
    older = spec_at(tmp_path / "older.yaml", SMALL.replace("count: 1", "count: 2") + "pin: {fsdp_version: 1}\n")
    with pytest.raises(MemcError) as caught:
        texts(older, tmp_path / "out")
    (problem,) = caught.value.diagnostics
    assert problem.code == "fsdp1-not-written"
    assert problem.where is not None
    assert problem.where.field == "pin.fsdp_version"
    assert not (tmp_path / "out").exists()
