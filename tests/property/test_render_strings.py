"""Strings of a spec come back exactly from every file and never become code, markup or a new line of a header."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from memc.config import Engine, Method, Precision, Task
from memc.plan import Plan
from memc.render import render
from memc.render.environment import to_comment, to_markdown, to_python, to_yaml
from planmaker import make_config, make_lora, make_plan, make_run

HOSTILE = (
    "'",
    '"',
    "'''",
    '"""\nimport os\nos.system("touch pwned")\n"""',
    "\\",
    "a\\",
    "\n",
    "a\nb",
    "a\r\nimport os",
    "\x0b\x0c\x1c\x85\u2028\u2029",
    "\x00",
    "$(touch pwned)",
    "`touch pwned`",
    "${HOME}",
    "; touch pwned;",
    "{{ 7 * 7 }}",
    "{% raw %}",
    "{# #}",
    "../../etc/passwd",
    "a b\tc",
    "- [x]: {y}, *z &w !t %u @v |q >r",
    "null",
    "yes",
    "1e3",
    "0x10",
    "~",
    "---\nevil: true",
    "# coding: rot13",
    "-*- coding: utf-7 -*-",
    "<script>alert(1)</script>",
    "-->",
    "| a | b |",
    "[link](javascript:alert)",
    "![image](x)",
    "</details>",
    "\u202egpj.exe",
    "\ud800",
    "ünïcode 模型 🤖",
    "",
)
text = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=40), st.lists(st.sampled_from(HOSTILE)).map("".join))


def plan_with(model: str, path: str, config_index: int = 0) -> Plan:
    configs = (
        make_config(),
        make_config(engine=Engine.DEEPSPEED, stage=3),
        make_config(task=Task.PRETRAIN, method=Method.FULL, engine=Engine.DDP),
        make_config(method=Method.QLORA, precision=Precision.FP16),
    )
    run = make_run(model=model, train_data=path, eval_data=path, output_dir=path)
    return make_plan(configs[config_index], run, name=path, warnings=(model,))


def without_strings(source: str) -> str:
    """Returns the shape of a Python file: its syntax tree with the values of constants blanked."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.dump(tree)


def constants_of(source: str) -> dict[str, object]:
    return {
        statement.targets[0].id: ast.literal_eval(statement.value)
        for statement in ast.parse(source).body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Name)
        and statement.targets[0].id != "HERE"
    }


@settings(max_examples=60, deadline=None)
@given(model=text, path=text, config_index=st.integers(0, 3))
def test_python_strings_come_back_exactly_and_the_code_stays_the_same(model: str, path: str, config_index: int) -> None:
    written = render(plan_with(model, path, config_index), spec_name=path, command=model)["train.py"]
    plain = render(plan_with("m", "p", config_index), spec_name="s", command="c")["train.py"]

    found = constants_of(written)
    assert found["MODEL"] == model
    assert [found[name] for name in ("TRAIN_FILE", "EVAL_FILE", "OUTPUT_DIR")] == [path] * 3
    assert without_strings(written) == without_strings(plain)
    assert written.encode("utf-8")


@settings(max_examples=40, deadline=None)
@given(model=text, targets=st.lists(text, min_size=1, max_size=4, unique=True))
def test_adapter_file_keeps_strings_exactly(model: str, targets: list[str]) -> None:
    config = make_config(lora=make_lora(target_modules=tuple(targets)))
    written = render(make_plan(config, make_run(model=model)), spec_name="s", command="c")["peft_config.json"]
    document = json.loads(written)
    assert document["base_model_name_or_path"] == model
    assert document["target_modules"] == targets


@settings(max_examples=40, deadline=None)
@given(name=text, command=text)
def test_headers_stay_comments(name: str, command: str) -> None:
    plan = make_plan(make_config(engine=Engine.DEEPSPEED))
    written = render(plan, spec_name=name, command=command)
    plain = render(plan, spec_name="s", command="c")
    for file in ("train.py", "launch.sh", "requirements.txt", "accelerate.yaml"):
        code = [line for line in written[file].split("\n") if not line.startswith("#")]
        assert code == [line for line in plain[file].split("\n") if not line.startswith("#")], file
        assert len(written[file].splitlines()) == len(plain[file].splitlines()), file
    assert yaml.safe_load(written["accelerate.yaml"]) == yaml.safe_load(plain["accelerate.yaml"])


@settings(max_examples=60, deadline=None)
@given(model=text, reason=text)
def test_plan_notes_show_strings_as_text_only(model: str, reason: str) -> None:
    markdown = MarkdownIt("commonmark").enable("table")
    kinds = {"link_open", "image", "html_inline", "code_inline", "heading_open", "html_block", "hr", "fence"}

    def marks(source: str) -> list[str]:
        tokens = [inner for token in markdown.parse(source) for inner in (token, *(token.children or ()))]
        return [token.type for token in tokens if token.type in kinds]

    written = render(
        make_plan(make_config(), make_run(model=model), warnings=(reason,)), spec_name=reason, command=model
    )
    plain = render(make_plan(make_config(), make_run(model="m"), warnings=("w",)), spec_name="s", command="c")
    assert marks(written["PLAN.md"]) == marks(plain["PLAN.md"])
    assert len(written["PLAN.md"].splitlines()) == len(plain["PLAN.md"].splitlines())


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
        max_leaves=10,
    )
)
def test_filters_read_back(value: object) -> None:
    assert ast.literal_eval(to_python(value)) == value
    if "ud800" not in ascii(value):  # YAML cannot hold half a character
        assert yaml.safe_load(to_yaml(value)) == value


@given(st.text())
def test_comments_and_markdown_are_one_line(value: str) -> None:
    assert len(f"# {to_comment(value)}".splitlines()) == 1
    assert len(f"x{to_markdown(value)}".splitlines()) == 1


@settings(max_examples=10, deadline=None)
@given(model=text, path=text, config_index=st.integers(0, 3))
def test_same_plan_same_bytes(model: str, path: str, config_index: int) -> None:
    first = render(plan_with(model, path, config_index), spec_name=path, command=model)
    second = render(plan_with(model, path, config_index), spec_name=path, command=model)
    assert first == second
    assert list(first) == sorted(first)
    for name, content in first.items():
        assert content.endswith("\n"), name
        assert "\r" not in content, name


@pytest.mark.parametrize("value", [Engine.DDP, object(), {1, 2}, b"x"])
def test_python_filter_refuses_what_would_not_read_back(value: object) -> None:
    with pytest.raises(TypeError, match="no plain Python literal"):
        to_python(value)


@pytest.mark.parametrize("folder_name", ["plain", "with space", "quote'\"dollar$(touch pwned)`x`"])
@pytest.mark.parametrize("engine", [Engine.SINGLE, Engine.DDP, Engine.DEEPSPEED])
def test_launcher_runs_from_anywhere_and_passes_arguments_on(tmp_path: Path, folder_name: str, engine: Engine) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    folder, start, programs = tmp_path / folder_name, tmp_path / "start here", tmp_path / "bin"
    for path in (folder, start, programs):
        path.mkdir()
    # Stands in for `accelerate`: writes what it was called with.
    (programs / "accelerate").write_text('#!/bin/sh\nprintf "%s\\n" "$DS_ACCELERATOR" "$ACCELERATE_USE_CPU" "$@"\n')
    (programs / "accelerate").chmod(0o755)
    written = render(
        make_plan(make_config(engine=engine)), spec_name="$(touch pwned)\ntouch pwned", command="`touch pwned`"
    )
    (folder / "launch.sh").write_text(written["launch.sh"])

    arguments = ["--device", "cpu", "--output-dir", "a b $(touch pwned)"]
    outcome = subprocess.run(
        [bash, str(folder / "launch.sh"), *arguments],
        cwd=start,
        env={"PATH": f"{programs}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    deepspeed_cpu, accelerate_cpu, *passed = outcome.stdout.splitlines()
    deepspeed = engine is Engine.DEEPSPEED
    assert (deepspeed_cpu, accelerate_cpu) == (("cpu", "") if deepspeed else ("", "true"))
    assert passed[:3] == ["launch", "--config_file", f"{folder}/accelerate.yaml"]
    assert ("--deepspeed_config_file" in passed) is deepspeed
    assert passed[-5:] == [f"{folder}/train.py", *arguments]
    assert not list(tmp_path.rglob("pwned"))
