"""memc check: what it finds, what it says changed, in every format; and what it makes of broken locks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from inprocess import SMALL, Ended, command_runner
from memc import driver
from memc.checking import check_folder, check_paths, exit_code_of
from memc.checking.edits import key_edits, unified_diff
from memc.errors import ExitCode
from memc.verify.lock import digest_of_files

ROOT = Path(__file__).parents[2]


@pytest.fixture
def memc(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """Runs commands in this process, in a folder of its own that holds one compiled spec."""
    monkeypatch.chdir(tmp_path)

    run = command_runner(capsys)

    Path("spec.yaml").write_text(SMALL)
    assert run("compile", "spec.yaml").code == 0
    return run


def replace_in(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def found(done: Ended) -> list[dict[str, Any]]:
    document = json.loads(done.out)
    assert document["schema"] == "memc/check/1"
    assert document["exit_code"] == done.code
    return [finding for folder in document["folders"] for finding in folder["findings"]]


def codes(done: Ended) -> set[str]:
    return {finding["code"] for finding in found(done)}


def test_a_current_folder_passes_and_nothing_is_written(memc: Callable[..., Ended]) -> None:
    before = {path: path.read_bytes() for path in Path("out").iterdir()}
    assert memc("check", ".") == Ended(0, "1 folder checked, all current\n", "")
    assert {path: path.read_bytes() for path in Path("out").iterdir()} == before


def test_a_key_edited_by_hand_is_named_with_both_values_and_its_line(memc: Callable[..., Ended]) -> None:
    replace_in(Path("out/peft_config.json"), '"r": 32', '"r": 64')
    done = memc("check", "out")
    assert done.code == ExitCode.STALE
    line = Path("out/peft_config.json").read_text().splitlines().index('  "r": 64,') + 1
    assert (
        f"error[edited]: peft_config.json was edited by hand: r is 64, memc writes 32 (out/peft_config.json:{line})"
        in done.out
    )
    assert '-  "r": 64,\n+  "r": 32,\n' in done.out
    (finding,) = found(memc("check", "--json", "out"))
    assert (finding["code"], finding["line"]) == ("edited", line)


def test_a_constant_of_the_script_edited_by_hand_is_named(memc: Callable[..., Ended]) -> None:
    replace_in(Path("out/train.py"), "\nMICRO_BATCH_SIZE = 8", "\nMICRO_BATCH_SIZE = 4")
    (finding,) = (item for item in found(memc("check", "--json", "out")) if item["code"] == "edited")
    assert finding["message"] == "train.py was edited by hand: MICRO_BATCH_SIZE is 4, memc writes 8"
    assert Path("out/train.py").read_text().splitlines()[finding["line"] - 1] == "MICRO_BATCH_SIZE = 4"


def test_a_changed_spec_field_is_named_with_the_ledger_lines_that_it_moved(memc: Callable[..., Ended]) -> None:
    before = json.loads(Path("out/memc.lock").read_text())
    replace_in(Path("spec.yaml"), "max_length: 256", "max_length: 512")
    done = memc("check", "--json", ".")
    assert done.code == ExitCode.STALE
    notes = [finding for finding in found(done) if finding["code"] == "spec-changed"]
    assert [(note["message"], note["path"], note["line"]) for note in notes] == [
        ("spec field data.max_length: 256 -> 512", "spec.yaml", 2)
    ]
    (folder,) = json.loads(done.out)["folders"]
    moved = {(line["resource"], line["name"]): line for line in folder["changes"]["lines"]}
    sizes = {entry["name"]: entry["bytes"] for entry in before["ledger"]["gpu"]["entries"]}
    assert moved["gpu", "layer-activations"]["before_bytes"] == sizes["layer-activations"]
    assert memc("compile", "spec.yaml").code == 0
    after = json.loads(Path("out/memc.lock").read_text())["ledger"]["gpu"]["entries"]
    (grown,) = (entry["bytes"] for entry in after if entry["name"] == "layer-activations")
    assert moved["gpu", "layer-activations"]["after_bytes"] == grown > sizes["layer-activations"]
    assert ("gpu", "base-weights") not in moved
    changes = [abs(line["after_bytes"] - line["before_bytes"]) for line in folder["changes"]["lines"]]
    assert changes == sorted(changes, reverse=True)
    assert {"stale", "peak-moved", "ledger-line-moved"} <= codes(done)
    assert "fact-changed" not in codes(done)


def test_a_folder_that_is_stale_and_edited_is_told_to_be_both(memc: Callable[..., Ended]) -> None:
    replace_in(Path("spec.yaml"), "epochs: 1", "epochs: 2")
    replace_in(Path("out/train.py"), "\nSEED = 42", "\nSEED = 7")
    done = memc("check", "out")
    assert "SEED is 7, memc writes 42" in done.out
    assert "its inputs changed too" in done.out
    assert "spec field training.epochs: 1.0 -> 2.0" in done.out


@pytest.fixture
def other_memc(tmp_path: Path) -> Path:
    """A second memc, installed beside: the same code with a tree of facts of its own."""
    home = tmp_path / "other memc"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "compiler" / "memc", home / "memc", ignore=ignore)
    shutil.copytree(ROOT / "specs", home / "memc" / "specs", ignore=ignore)
    shutil.copytree(ROOT / "templates", home / "memc" / "templates", ignore=ignore)
    return home


def run_other(home: Path, *arguments: str) -> Ended:
    environment = os.environ | {"PYTHONPATH": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "memc", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return Ended(done.returncode, done.stdout, done.stderr)


def test_a_changed_library_fact_is_named_with_the_ledger_line_that_it_moved(
    memc: Callable[..., Ended], other_memc: Path
) -> None:
    assert run_other(other_memc, "check", ".").code == 0
    replace_in(other_memc / "memc/specs/libraries/cublas.yaml", "value: 8519680", "value: 12713984")
    done = run_other(other_memc, "check", "--json", ".")
    assert done.code == ExitCode.STALE, done.err
    messages = [finding["message"] for finding in found(done) if finding["code"] == "fact-changed"]
    assert messages == ["fact cublas.workspace_bytes: 8519680 -> 12713984"]
    (folder,) = (folder for folder in json.loads(done.out)["folders"] if folder["folder"] == "out")
    moved = {line["name"]: line["after_bytes"] - line["before_bytes"] for line in folder["changes"]["lines"]}
    assert moved["cublas-workspaces"] == 2 * (12713984 - 8519680)
    assert folder["changes"]["spec"] == []
    shown = run_other(other_memc, "check", ".").out
    assert "gpu workspace cublas-workspaces: 16.2 MiB -> 24.2 MiB" in shown
    assert "gpu required: " in shown


def test_diff_names_a_changed_fact_and_a_changed_field_with_the_lines_they_moved(
    memc: Callable[..., Ended], other_memc: Path
) -> None:
    replace_in(other_memc / "memc/specs/libraries/cublas.yaml", "value: 8519680", "value: 12713984")
    assert run_other(other_memc, "compile", "spec.yaml", "-o", "bumped").code == 0
    shown = memc("diff", "out", "bumped").out
    assert "cublas.workspace_bytes" in shown
    assert "8519680" in shown
    assert "12713984" in shown
    assert "cublas-workspaces" in shown
    replace_in(Path("spec.yaml"), "max_length: 256", "max_length: 512")
    assert memc("compile", "spec.yaml", "-o", "longer").code == 0
    shown = memc("diff", "out", "longer").out
    assert "data.max_length" in shown
    assert "layer-activations" in shown
    assert "cublas.workspace_bytes" not in shown


def test_a_changed_library_version_and_memc_version_are_named(memc: Callable[..., Ended], other_memc: Path) -> None:
    replace_in(other_memc / "memc/specs/libraries/stack.yaml", "value: 1.16.0", "value: 1.17.0")
    done = run_other(other_memc, "check", ".")
    assert "note[version-changed]: library version stack.trl: 1.16.0 -> 1.17.0" in done.out
    init = other_memc / "memc/__init__.py"
    init.write_text(init.read_text().replace('__version__ = "', '__version__ = "9'))
    done = run_other(other_memc, "check", ".")
    assert done.code == ExitCode.STALE
    assert "note[memc-changed]: memc 0" in done.out
    assert "wrote this folder, this is 9" in done.out


def test_changed_rules_of_memc_are_told_from_changed_inputs(memc: Callable[..., Ended], other_memc: Path) -> None:
    template = other_memc / "memc/templates/launch/launch.sh.j2"
    template.write_text(template.read_text() + "# one more line\n")
    done = run_other(other_memc, "check", ".")
    assert done.code == ExitCode.STALE
    assert "spec and facts are the same: memc's rules or templates changed" in done.out
    assert "+# one more line\n" in done.out


def test_missing_left_over_and_foreign_files(memc: Callable[..., Ended]) -> None:
    Path("out/launch.sh").unlink()
    done = memc("check", "--json", "out")
    assert [(f["code"], f["path"]) for f in found(done)] == [("missing", "out/launch.sh")]
    memc("compile", "spec.yaml")
    Path("out/ds_config.json").write_text("{}\n")
    assert memc("check", "out").code == 0, "a file that is no business of memc"
    replace_in(Path("spec.yaml"), "count: 1", "count: 2")
    replace_in(Path("spec.yaml"), "method: lora", "method: full\npin: {zero_stage: 2}")
    listed = {finding["path"]: finding["code"] for finding in found(memc("check", "--json", "out"))}
    assert listed["out/ds_config.json"] == "foreign"
    assert listed["out/peft_config.json"] == "left-over"
    assert memc("compile", "spec.yaml", "--force").code == 0
    done = memc("check", "--json", "out")
    assert [(f["code"], f["path"]) for f in found(done)] == [("left-over", "out/peft_config.json")]
    Path("out/peft_config.json").unlink()
    assert memc("compile", "spec.yaml").code == 0
    assert memc("check", "out").code == 0


def test_symbolic_links_and_folders_in_place_of_files_are_not_followed(
    memc: Callable[..., Ended], tmp_path: Path
) -> None:
    secret = tmp_path / "elsewhere"
    Path("out/launch.sh").rename(secret)
    Path("out/launch.sh").symlink_to(secret)
    Path("out/train.py").unlink()
    Path("out/train.py").mkdir()
    done = memc("check", "--json", "out")
    assert {(f["code"], f["path"]) for f in found(done)} == {
        ("generated-file-replaced", "out/launch.sh"),
        ("generated-file-replaced", "out/train.py"),
    }


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_an_unreadable_file_is_a_finding_and_the_rest_is_still_checked(memc: Callable[..., Ended]) -> None:
    Path("out/launch.sh").chmod(0)
    replace_in(Path("out/train.py"), "\nSEED = 42", "\nSEED = 7")
    assert codes(memc("check", "--json", "out")) == {"unreadable", "edited"}


def test_an_unreadable_lock_is_a_finding(memc: Callable[..., Ended]) -> None:
    Path("out/memc.lock").unlink()
    Path("out/memc.lock").symlink_to("nowhere")
    assert memc("check", "out").code == ExitCode.USAGE
    Path("out/memc.lock").unlink()
    Path("out/memc.lock").mkdir()
    done = memc("check", "out")
    assert (done.code, "lock-unreadable" in done.out) == (ExitCode.USAGE, True)
    Path("out/memc.lock").rmdir()
    os.mkfifo("out/memc.lock")
    assert "is no regular file" in memc("check", "out").out, "and nobody waits for a writer"


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        (b"", "lock-malformed", "is not JSON"),
        (b"{", "lock-malformed", "is not JSON"),
        (b"\xff\xfe\x00", "lock-malformed", "is not JSON"),
        (b"[" * 200_000, "lock-malformed", "is not JSON"),
        (b"[]", "lock-malformed", "names no schema"),
        (b'{"schema": 3}', "lock-malformed", "names no schema"),
        (b"<<<<<<< ours\n{}\n=======\n{}\n>>>>>>> theirs\n", "lock-malformed", "marks of a merge conflict"),
        (b'{"schema": "memc/lock/0"}', "lock-foreign", "is of schema 'memc/lock/0'"),
        (b'{"schema": "memc/lock/99", "files": 3}', "lock-foreign", "is of schema 'memc/lock/99'"),
        (b'{"schema": "memc/lock/1"}', "lock-malformed", "holds no usable spec, facts, files"),
    ],
)
def test_a_broken_lock_is_told_for_what_it_is(
    memc: Callable[..., Ended], content: bytes, code: str, words: str
) -> None:
    Path("out/memc.lock").write_bytes(content)
    done = memc("check", "out")
    assert done.code == ExitCode.STALE
    assert f"error[{code}]" in done.out
    assert words in done.out
    assert memc("diff", "out", "spec.yaml").code == ExitCode.STALE


@pytest.mark.parametrize(
    "path",
    [
        ("memc",),
        ("spec", "resolved"),
        ("spec", "digest"),
        ("facts",),
        ("files",),
        ("plan", "settings"),
        ("ledger", "gpu"),
        ("ledger", "gpu", "entries"),
        ("ledger", "gpu", "required_bytes"),
        ("clock",),
        ("hardware",),
        ("model",),
        ("budget",),
    ],
)
@pytest.mark.parametrize("value", [None, 3, "text", [1], {"a": 1}])
def test_no_value_in_a_lock_crashes_the_check(memc: Callable[..., Ended], path: tuple[str, ...], value: Any) -> None:
    lock = json.loads(Path("out/memc.lock").read_text())
    owner = lock
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = value
    Path("out/memc.lock").write_text(json.dumps(lock))
    assert memc("check", "out").code == ExitCode.STALE
    assert memc("diff", "out", "spec.yaml").code in (ExitCode.OK, ExitCode.STALE)


def test_a_lock_written_before_facts_were_recorded_says_so(memc: Callable[..., Ended]) -> None:
    lock = json.loads(Path("out/memc.lock").read_text())
    del lock["digest"]
    lock["facts"] = {key: value for key, value in lock["facts"].items() if key.endswith((".params", ".checked"))}
    Path("out/memc.lock").write_text(json.dumps(lock, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
    done = memc("check", "out")
    assert done.code == ExitCode.STALE
    assert "the lock was written by a memc that did not record its facts" in done.out
    assert "fact-changed" not in done.out
    assert memc("compile", "spec.yaml").code == 0
    assert memc("check", "out").code == 0


def test_an_edited_lock_is_told_from_a_stale_one(memc: Callable[..., Ended]) -> None:
    replace_in(Path("out/memc.lock"), '"seed": 42', '"seed": 7')
    done = memc("check", "out")
    assert "memc.lock was edited by hand: its own digest differs" in done.out
    memc("compile", "spec.yaml")
    lock = json.loads(Path("out/memc.lock").read_text())
    Path("out/memc.lock").write_text(json.dumps(lock))
    assert "laid out by another program" in memc("check", "out").out


def test_line_endings_alone_are_told(memc: Callable[..., Ended]) -> None:
    script = Path("out/launch.sh")
    script.write_bytes(script.read_bytes().replace(b"\n", b"\r\n"))
    assert "launch.sh differs in its line endings alone" in memc("check", "out").out


def test_a_spec_that_is_gone_invalid_or_does_not_fit(memc: Callable[..., Ended]) -> None:
    text = Path("spec.yaml").read_text()
    Path("spec.yaml").write_text(text.replace("method: lora", "methud: lora"))
    done = memc("check", "out")
    assert (done.code, "spec-unknown-key" in done.out) == (ExitCode.USAGE, True)
    Path("spec.yaml").write_text(text + "memory: {target: 100MiB}\n")
    done = memc("check", "out")
    assert (done.code, "error[does-not-fit]" in done.out) == (ExitCode.DOES_NOT_FIT, True)
    replace_in(Path("out/train.py"), "\nSEED = 42", "\nSEED = 7")
    assert memc("check", "out").code == ExitCode.STALE, "edits are found without the spec"
    Path("spec.yaml").unlink()
    assert codes(memc("check", "--json", "out")) == {"spec-gone", "edited"}


def test_paths_that_are_not_there_or_hold_nothing(memc: Callable[..., Ended]) -> None:
    Path("empty").mkdir()
    done = memc("check", "nowhere", "empty", "spec.yaml", "out")
    assert done.code == ExitCode.USAGE
    assert "there is no nowhere" in done.err
    assert "no memc.lock lies in or below empty" in done.err
    assert "no memc.lock lies in or below spec.yaml" in done.err


def test_a_tree_is_searched_and_each_folder_is_checked_once(memc: Callable[..., Ended]) -> None:
    for name in ("a b/c", "ünï", ".hidden", "node_modules"):
        folder = Path(name)
        folder.mkdir(parents=True)
        (folder / "spec.yaml").write_text(SMALL)
        assert memc("compile", f"{name}/spec.yaml").code == 0
    Path("link").symlink_to("a b")
    reports = check_paths([Path(), Path("a b"), Path("out/train.py"), Path("link")])
    assert [report.folder for report in reports] == [Path("a b/c/out"), Path("out"), Path("ünï/out")]
    assert exit_code_of(reports) == 0
    replace_in(Path("a b/c/out/train.py"), "\nSEED = 42", "\nSEED = 7")
    done = memc("check", ".")
    assert "a b/c/out: not current" in done.out
    assert done.out.endswith("3 folders checked, 1 not current\n")
    assert memc("check", "link").code == ExitCode.STALE


def test_two_folders_of_one_spec_are_both_checked(memc: Callable[..., Ended]) -> None:
    assert memc("compile", "spec.yaml", "-o", "second").code == 0
    assert memc("check", ".").out == "2 folders checked, all current\n"
    replace_in(Path("spec.yaml"), "epochs: 1", "epochs: 2")
    assert memc("check", ".").out.count("spec field training.epochs") == 2


MEASUREMENT: dict[str, Any] = {
    "device": "cuda",
    "versions": {"torch": "2.13.0+cu130", "transformers": "5.24.0"},
    "ranks": [{"rank": 0, "device_name": "Tesla T4"}],
}


def measured(change: dict[str, Any]) -> None:
    lock = json.loads(Path("out/memc.lock").read_text())
    lock["measurements"] = [MEASUREMENT | change]
    Path("out/memc.lock").write_text(json.dumps(lock, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def test_a_measurement_of_the_plan_is_no_finding(memc: Callable[..., Ended]) -> None:
    measured({})
    assert memc("check", "out") == Ended(0, "1 folder checked, all current\n", "")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"versions": {"torch": "2.12.1"}}, "torch 2.12.1 where 2.13.0 is planned for"),
        ({"ranks": [{"device_name": "NVIDIA A100-SXM4-40GB"}]}, "a NVIDIA A100-SXM4-40GB where a"),
        ({"ranks": [{"device_name": "Abacus 9"}]}, "a Abacus 9 where a"),
    ],
)
def test_a_measurement_of_another_machine_is_a_warning(
    memc: Callable[..., Ended], change: dict[str, Any], words: str
) -> None:
    measured(change)
    done = memc("check", "out")
    assert done.code == 0
    assert "warning[measurement-of-another-machine]: measurement 1 was made with " in done.out
    assert words in done.out


def test_a_measurement_of_another_plan_is_a_warning(memc: Callable[..., Ended]) -> None:
    measured({})
    replace_in(Path("spec.yaml"), "max_length: 256", "max_length: 512")
    assert "measurement-of-another-plan" in codes(memc("check", "--json", "out"))


@pytest.mark.parametrize("junk", [3, [3], [{"versions": 3, "ranks": 4}], [{"ranks": [1, {"device_name": 2}]}]])
def test_garbled_measurements_do_not_crash_the_check(memc: Callable[..., Ended], junk: Any) -> None:
    lock = json.loads(Path("out/memc.lock").read_text())
    lock["measurements"] = junk
    Path("out/memc.lock").write_text(json.dumps(lock, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
    assert memc("check", "out").code in (ExitCode.OK, ExitCode.STALE)


def test_github_annotations_cannot_be_broken_out_of(memc: Callable[..., Ended]) -> None:
    Path("a,b:c%").mkdir()
    Path("a,b:c%/spec.yaml").write_text(SMALL)
    memc("compile", "a,b:c%/spec.yaml")
    replace_in(Path("a,b:c%/out/train.py"), "\nSEED = 42", '\nSEED = "x\x0c::error::y"')
    done = memc("check", "--format", "github", "a,b:c%")
    assert done.code == ExitCode.STALE
    commands = [line for line in done.out.splitlines() if line.startswith("::")]
    (annotation,) = commands
    properties, _, message = annotation.removeprefix("::error ").partition("::")
    values = dict(part.split("=", 1) for part in properties.split(","))
    line = next(n for n, text in enumerate(Path("a,b:c%/out/train.py").read_text().split("\n"), 1) if "SEED =" in text)
    assert values == {"file": "a%2Cb%3Ac%25/out/train.py", "line": str(line), "title": "memc edited"}
    assert "%0A" in message


def test_sarif_holds_what_code_scanning_needs(memc: Callable[..., Ended]) -> None:
    """Field by field after the SARIF 2.1.0 standard: required properties, closed vocabularies, indices, URIs."""
    Path("a b").mkdir()
    Path("a b/spec.yaml").write_text(SMALL)
    memc("compile", "a b/spec.yaml")
    replace_in(Path("a b/out/train.py"), "\nSEED = 42", "\nSEED = 7")
    replace_in(Path("spec.yaml"), "epochs: 1", "epochs: 2")
    done = memc("check", "--format", "sarif", ".")
    assert done.code == ExitCode.STALE
    log = json.loads(done.out)
    assert log["version"] == "2.1.0"
    assert log["$schema"].endswith("/sarif-schema-2.1.0.json")
    (run,) = log["runs"]
    assert set(run) == {"tool", "results", "columnKind"}
    assert run["columnKind"] in ("utf16CodeUnits", "unicodeCodePoints")
    tool = run["tool"]["driver"]
    assert tool["name"] == "memc"
    rules = tool["rules"]
    assert len({rule["id"] for rule in rules}) == len(rules)
    assert all(rule["shortDescription"]["text"] for rule in rules)
    uris = set()
    for result in run["results"]:
        assert result["level"] in ("none", "note", "warning", "error")
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["message"]["text"]
        (location,) = result["locations"]
        place = location["physicalLocation"]
        uris.add(place["artifactLocation"]["uri"])
        assert place.get("region", {"startLine": 1})["startLine"] >= 1
    assert "a%20b/out/train.py" in uris
    assert "spec.yaml" in uris
    elsewhere = memc("check", "--format", "sarif", str(Path("a b").resolve()))
    assert "a%20b/out/train.py" in elsewhere.out, "a path below the current folder is relative, however it was named"
    Path("c").mkdir()
    os.chdir("c")
    outside = json.loads(memc("check", "--format", "sarif", "../a b").out)["runs"][0]["results"][0]
    assert outside["locations"][0]["physicalLocation"]["artifactLocation"]["uri"].startswith("file:///")


def test_sarif_of_nothing_found_is_a_run_without_results(memc: Callable[..., Ended]) -> None:
    done = memc("check", "--format", "sarif", ".")
    assert done.code == 0
    assert json.loads(done.out)["runs"][0]["results"] == []


def test_compile_check_prints_the_same_diff(memc: Callable[..., Ended]) -> None:
    replace_in(Path("out/peft_config.json"), '"r": 32', '"r": 64')
    done = memc("compile", "spec.yaml", "--check")
    assert done.code == ExitCode.STALE
    assert done.out == check_folder(Path("out")).findings[0].diff
    assert memc("compile", "spec.yaml", "--check", "--json").out.startswith("{")


def test_many_folders_are_checked_as_few_are(memc: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough folders for more than one process, where there is more than one core."""
    monkeypatch.setattr("memc.checking.check._FOLDERS_PER_WORKER", 2)
    for index in range(6):
        assert memc("compile", "spec.yaml", "-o", f"many/{index}").code == 0
    replace_in(Path("many/3/train.py"), "\nSEED = 42", "\nSEED = 7")
    reports = check_paths([Path("many")])
    assert [report.folder.name for report in reports] == list("012345")
    assert [report.current for report in reports] == [True, True, True, False, True, True]


def test_the_lock_records_what_was_read_and_the_same_input_gives_the_same_bytes(memc: Callable[..., Ended]) -> None:
    first = Path("out/memc.lock").read_bytes()
    facts = json.loads(first)["facts"]
    assert facts["stack.torch"] == "2.13.0"
    assert facts["cublas.workspace_bytes"] == "8519680"
    assert "deepspeed" not in {key.removeprefix("stack.") for key in facts if key.startswith("stack.")}
    assert any(key.startswith("gpus.t4.achieved_flops_per_second.") for key in facts)
    assert any(key.endswith(".blocks.0.linears.q_proj") for key in facts)
    again = driver.generate(
        driver.answer(Path("spec.yaml")), Path("out"), driver.compile_command(Path("spec.yaml"), Path("out"))
    )
    assert again["memc.lock"].encode() == first


def test_a_data_file_that_grew_is_named(memc: Callable[..., Ended]) -> None:
    Path("data").mkdir()
    Path("data/train.jsonl").write_text('{"text": "a"}\n' * 40)
    replace_in(Path("spec.yaml"), ", samples: 175", "")
    memc("compile", "spec.yaml")
    Path("data/train.jsonl").write_text('{"text": "a"}\n' * 80)
    assert "fact data.samples: 40 -> 80" in memc("check", "out").out


def test_key_edits_are_found_by_document_and_by_line() -> None:
    edits = key_edits("x.json", b'{"a": {"b": 1, "c": [1, 2]}, "d": true}', '{"a": {"b": 2, "c": [1]}, "e": true}')
    assert [str(edit) for edit in edits] == [
        "a.b is 1, memc writes 2",
        "a.c is [1, 2], memc writes [1]",
        "d is true, memc writes nothing",
        "e is nothing, memc writes true",
    ]
    edits = key_edits("x.py", b"A = 1\nB = 2\nprint()\n", "A = 1\nB = 3  # why\nprint()\n")
    assert [(edit.key, edit.found, edit.written, edit.line) for edit in edits] == [("B", "2", "3  # why", 2)]
    assert key_edits("x.json", b"{", "{}") == []
    assert key_edits("x.yaml", b"a: [", "a: 1") == []


def test_unified_diffs_apply_with_patch_even_without_a_last_line_break(tmp_path: Path) -> None:
    if shutil.which("patch") is None:
        pytest.skip("needs patch")
    path = tmp_path / "f"
    path.write_text("a\nb")
    diff = unified_diff(Path("f"), path.read_bytes(), "a\nc\n")
    done = subprocess.run(["patch", "-p0", str(path)], input=diff, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout
    assert path.read_text() == "a\nc\n"


def test_a_measurement_of_other_files_is_a_warning(memc: Callable[..., Ended]) -> None:
    lock = json.loads(Path("out/memc.lock").read_text())
    measured({"files_digest": digest_of_files(lock["files"])})
    assert memc("check", "out").out == "1 folder checked, all current\n"
    measured({"files_digest": digest_of_files(lock["files"] | {"train.py": "0" * 64})})
    done = memc("check", "out")
    assert done.code == 0
    assert "warning[measurement-of-other-files]: measurement 1 was made before" in done.out
