"""The pre-commit hook and the GitHub Action, as their users run them."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from memc.cli import main

ROOT = Path(__file__).parents[2]
HOOKS = ROOT / ".pre-commit-hooks.yaml"
ACTION = ROOT / "action.yml"
SMALL = """\
model: HuggingFaceTB/SmolLM2-135M-Instruct
data: {train: data/train.jsonl, max_length: 256, samples: 175, mean_tokens: 120}
method: lora
hardware: {gpu: t4, count: 1}
"""
needs_pre_commit = pytest.mark.skipif(
    importlib.util.find_spec("pre_commit") is None, reason="pre-commit is not installed"
)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A git repository with one compiled folder below a folder with a space."""
    folder = tmp_path / "my repo"
    (folder / "a b").mkdir(parents=True)
    (folder / "a b" / "spec.yaml").write_text(SMALL)
    main_ended(["compile", str(folder / "a b" / "spec.yaml")])
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "--quiet", "--message", "one")
    return folder


def main_ended(arguments: list[str]) -> None:
    try:
        main(arguments)
    except SystemExit as stop:
        assert not stop.code


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True)


def edit(folder: Path) -> None:
    script = folder / "a b" / "out" / "train.py"
    script.write_text(script.read_text().replace("\nSEED = 42", "\nSEED = 7"))


def pre_commit(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PRE_COMMIT_HOME": str(folder.parent / "pre-commit"),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    command = [sys.executable, "-m", "pre_commit", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@needs_pre_commit
def test_the_hook_manifest_is_valid(tmp_path: Path) -> None:
    done = pre_commit(ROOT, "validate-manifest", str(HOOKS))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    (tmp_path / "hooks.yaml").write_text(HOOKS.read_text().replace("entry:", "enter:"))
    assert pre_commit(tmp_path, "validate-manifest", "hooks.yaml").returncode == 1


@needs_pre_commit
def test_pre_commit_runs_the_hook(repository: Path) -> None:
    """As a local hook, so that nothing is installed: everything else is as the manifest says."""
    (hook,) = yaml.safe_load(HOOKS.read_text())
    assert (hook["id"], hook["language"]) == ("memc-check", "python")
    local = {"repos": [{"repo": "local", "hooks": [hook | {"language": "system"}]}]}
    (repository / ".pre-commit-config.yaml").write_text(yaml.safe_dump(local))
    git(repository, "add", "--all")
    done = pre_commit(repository, "run", "--all-files")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"memc check\.+Passed", done.stdout)
    edit(repository)
    git(repository, "add", "--all")
    done = pre_commit(repository, "run")
    assert done.returncode == 1
    assert "- exit code: 4" in done.stdout
    assert "train.py was edited by hand: SEED is 7, memc writes 42" in done.stdout


def action() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(ACTION.read_text())
    return document


def test_the_action_has_what_composite_actions_need() -> None:
    document = action()
    assert set(document) <= {"name", "description", "author", "branding", "inputs", "outputs", "runs"}
    assert document["name"]
    assert document["description"]
    assert document["runs"]["using"] == "composite"
    for name, entry in document["inputs"].items():
        assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", name)
        assert entry["description"]
        assert isinstance(entry.get("default", ""), str)
    steps = document["runs"]["steps"]
    for step in steps:
        assert ("run" in step) != ("uses" in step)
        assert "run" not in step or step["shell"] == "bash"
        assert set(step) <= {"name", "id", "if", "shell", "env", "run", "uses", "with"}
    identifiers = {step["id"] for step in steps if "id" in step}
    for output in document["outputs"].values():
        (step, _) = re.findall(r"\$\{\{ steps\.([a-z]+)\.outputs\.([a-z-]+) \}\}", output["value"])[0]
        assert step in identifiers


def test_inputs_reach_scripts_as_variables_alone() -> None:
    """An expression inside a script would let an input write commands."""
    steps = [step for step in action()["runs"]["steps"] if "run" in step]
    assert [step["name"] for step in steps if "${{" in step["run"]] == []
    used = re.findall(r"inputs\.([a-z-]+)", ACTION.read_text())
    assert set(used) == set(action()["inputs"])


def run_step(step: dict[str, Any], folder: Path, values: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs a step's script as a runner does, its expressions replaced by `values`."""
    environment = dict(os.environ)
    for name, expression in step["env"].items():
        environment[name] = re.sub(r"\$\{\{ ([a-z_.-]+) \}\}", lambda match: values[match[1]], expression)
    environment["GITHUB_OUTPUT"] = values["output file"]
    script = folder.parent / "step.sh"
    script.write_text(step["run"])
    command = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", str(script)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def runner(tmp_path: Path) -> dict[str, str]:
    """What a runner puts for expressions; memc is this one, in an environment with a space in its path."""
    home = tmp_path / "runner temp" / "memc-venv" / "bin"
    home.mkdir(parents=True)
    (home / "memc").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m memc "$@"\n')
    (home / "memc").chmod(0o755)
    document = action()
    return {
        "runner.temp": str(tmp_path / "runner temp"),
        "github.action_path": str(ROOT),
        "output file": str(tmp_path / "output"),
        **{f"inputs.{name}": entry.get("default", "") for name, entry in document["inputs"].items()},
    }


def check_step() -> dict[str, Any]:
    (step,) = (step for step in action()["runs"]["steps"] if step.get("id") == "check")
    found: dict[str, Any] = step
    return found


def test_the_action_passes_and_fails_with_annotations(repository: Path, runner: dict[str, str]) -> None:
    done = run_step(check_step(), repository, runner)
    assert (done.returncode, done.stdout) == (0, "1 checked, 0 not current\n")
    assert Path(runner["output file"]).read_text() == "exit-code=0\n"
    edit(repository)
    done = run_step(check_step(), repository, runner)
    assert done.returncode == 4
    assert done.stdout.startswith("::error file=a b/out/train.py,line=")
    assert Path(runner["output file"]).read_text() == "exit-code=0\nexit-code=4\n"


def test_the_action_takes_several_paths_and_writes_a_file(repository: Path, runner: dict[str, str]) -> None:
    shutil.copytree(repository / "a b", repository / "c")
    values = runner | {"inputs.paths": "a b/out\n\nc\n", "inputs.format": "sarif", "inputs.output": "memc.sarif"}
    done = run_step(check_step(), repository, values)
    assert (done.returncode, done.stdout) == (0, "")
    assert '"version": "2.1.0"' in (repository / "memc.sarif").read_text()
    hostile = runner | {"inputs.paths": "$(touch pwned)\n`touch pwned`\n-h; touch pwned"}
    done = run_step(check_step(), repository, hostile)
    assert done.returncode == 2
    assert not (repository / "pwned").exists()


@pytest.mark.slow
def test_the_action_installs_its_own_checkout(repository: Path, runner: dict[str, str], tmp_path: Path) -> None:
    """Without an index: the environment borrows the packages of this one and builds memc from a copy of the sources."""
    source = tmp_path / "action"
    for name in ("compiler", "templates", "specs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    shutil.rmtree(Path(runner["runner.temp"]) / "memc-venv")
    (install,) = (step for step in action()["runs"]["steps"] if step["name"] == "Install memc")
    borrowed = next(path for path in sys.path if path.endswith("site-packages"))
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PYTHONPATH": borrowed}
    step = install | {"env": install["env"] | offline}
    done = run_step(step, repository, runner | {"github.action_path": str(source)})
    assert done.returncode == 0, done.stdout + done.stderr
    installed = Path(runner["runner.temp"]) / "memc-venv" / "lib"
    assert list(installed.glob("python*/site-packages/memc/checking/check.py"))
    check = check_step()
    done = run_step(check | {"env": check["env"] | {"PYTHONPATH": borrowed}}, repository, runner)
    assert (done.returncode, done.stdout) == (0, "1 checked, 0 not current\n"), done.stderr
