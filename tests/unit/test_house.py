"""The house: what ships, what is imported, what the README promises, and that no code knows a card or a model."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from memc.errors import ExitCode

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "compiler" / "memc").rglob("*.py"))
EXAMPLES = sorted((ROOT / "examples").glob("*/spec.yaml"))
FRAMEWORKS = ("torch", "transformers", "peft", "accelerate", "deepspeed", "trl", "bitsandbytes", "datasets", "numpy")
FORBIDDEN_MODULE_NAMES = {"utils", "helpers", "manager", "handler", "process", "data", "info"}

COMPILE = """
import json, sys
from memc.cli import main
try:
    code = main(["compile", sys.argv[1], "-o", sys.argv[2]])
except SystemExit as stop:
    code = stop.code
print(json.dumps({"code": code, "modules": sorted({name.partition(".")[0] for name in sys.modules})}))
"""


@pytest.mark.skipif(not EXAMPLES, reason="no example is checked in yet")
@pytest.mark.parametrize("spec", EXAMPLES, ids=[spec.parent.name for spec in EXAMPLES])
def test_compiling_imports_no_framework(spec: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMPILE, str(spec), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["code"] or 0) in (ExitCode.OK, ExitCode.DOES_NOT_FIT)
    assert [name for name in FRAMEWORKS if name in result["modules"]] == []
    assert "memc" in result["modules"]


def test_no_code_knows_a_gpu_or_a_model_by_name() -> None:
    """Names live in specs/; a docstring, and `examples=` of a spec field, may give one as an example."""
    gpus = {path.stem for path in (ROOT / "specs" / "gpus").glob("*.yaml")}
    models = {path.stem for path in (ROOT / "specs" / "models").glob("*.yaml")}
    assert len(gpus) > 50
    assert len(models) > 100
    known = {name.lower() for name in gpus | models}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value!r}"
        for path in SOURCES
        for node in strings_that_decide(ast.parse(path.read_text(encoding="utf-8")))
        if node.value.strip().lower().replace("/", "--") in known or node.value.strip().lower() in known
    ]
    assert found == []


def strings_that_decide(tree: ast.Module) -> list[ast.Constant]:
    """Returns all string constants but docstrings and the examples of fields."""
    shown = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "examples":
            shown |= {id(inner) for inner in ast.walk(node.value)}
    strings = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [node for node in strings if id(node) not in shown]


def test_module_names_say_what_is_in_them() -> None:
    assert [path.stem for path in SOURCES if path.stem in FORBIDDEN_MODULE_NAMES] == []


def test_diagnostic_codes_are_kebab_case() -> None:
    codes = [
        (path.name, node.value.value)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.keyword) and node.arg == "code" and isinstance(node.value, ast.Constant)
    ]
    assert codes
    assert [code for code in codes if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", str(code[1]))] == []


def test_only_the_command_line_prints() -> None:
    allowed = {ROOT / "compiler/memc/cli.py", *(ROOT / "compiler/memc/cli").glob("*.py")}
    printing = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        if path not in allowed
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert printing == []


@pytest.mark.slow
def test_the_wheel_holds_code_templates_and_specs(tmp_path: Path) -> None:
    """Built from a copy of what git would carry, so that nothing is written into the work tree."""
    source = tmp_path / "source"
    for folder in ("compiler", "templates", "specs"):
        copy_tree(ROOT / folder, source / folder)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("memc/")}
        metadata = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        requirements = archive.read(metadata).decode()
        licences = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
    assert held == expected_in_wheel()
    assert "Provides-Extra: train" in requirements
    assert licences


def copy_tree(source: Path, target: Path) -> None:
    for path in source.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            (target / path.relative_to(source)).write_bytes(path.read_bytes())


def expected_in_wheel() -> set[str]:
    expected = {"memc/py.typed"}
    for folder, package, patterns in (
        ("compiler/memc", "memc", ("*.py", "*.c", "*.cpp")),
        ("templates", "memc/templates", ("*.py", "*.j2", "*.css", "*.js", "*.md", "*.txt")),
        ("specs", "memc/specs", ("*.py", "*.yaml")),
    ):
        for pattern in patterns:
            for path in (ROOT / folder).rglob(pattern):
                expected.add(f"{package}/{path.relative_to(ROOT / folder).as_posix()}")
    return expected


def test_the_commands_of_the_readme_are_make_targets() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    promised = set(re.findall(r"^make ([a-z-]+)", readme, flags=re.MULTILINE))
    assert {"demo", "test"} <= promised
    assert [target for target in promised if not re.search(rf"^{target}:", makefile, flags=re.MULTILINE)] == []


def test_the_machine_check_is_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert script.read_text(encoding="utf-8").rstrip().endswith("exec make test")


def test_the_known_good_versions_are_inside_the_declared_ranges() -> None:
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    requirements = [Requirement(text) for group in groups for text in group]
    pins = {}
    for line in (ROOT / "requirements" / "dev.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, pinned = line.partition("==")
            pins[canonical(name)] = pinned
    missing = [r.name for r in requirements if canonical(r.name) not in pins]
    outside = [str(r) for r in requirements if not r.specifier.contains(pins.get(canonical(r.name), "0"))]
    assert missing == []
    assert outside == []


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
