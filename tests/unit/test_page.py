"""The HTML report as text: what it carries, what it escapes, what its policy allows. Browsers are in tests/browser."""

from __future__ import annotations

import ast
import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner
from memc import driver
from memc.cli import app
from memc.page import report_page
from memc.page.build import script_json
from memc.page.bundle import packed_modules, stripped
from memc.plan import Plan
from memc.resources import sources_root, templates_root
from memc.verdict import plan_verdict
from planspecs import spec_text

NASTY = "</script><script>alert(1)</script>\"'&<!--\u2028"


class Page(HTMLParser):
    """Elements and scripts of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self.words: list[str] = []
        self._open = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._open = dict(attrs).get("id") or tag
            self.scripts[self._open] = ""

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open:
            self.scripts[self._open] += data
        else:
            self.words.append(data)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[driver.Answer, str]:
    path = tmp_path_factory.mktemp("page") / "spec.yaml"
    path.write_text(spec_text(), encoding="utf-8")
    answer = driver.answer(path)
    return answer, report_page(answer.result, answer.loaded.spec)


def test_the_page_is_whole_and_asks_for_nothing(written: tuple[driver.Answer, str]) -> None:
    page = Page(written[1])
    assert not [
        tag for tag, attributes in page.tags if "src" in attributes or tag in ("link", "img", "iframe", "object")
    ]
    assert all(not (attributes.get("href") or "#").startswith(("http", "//")) for _, attributes in page.tags)
    assert len(written[1].encode()) < 600_000


def test_the_policy_names_exactly_this_script_and_this_style(written: tuple[driver.Answer, str]) -> None:
    page = Page(written[1])
    (policy,) = (a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'; ")
    assert "unsafe-inline" not in policy
    for name in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(page.scripts[name].encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy


def test_the_page_says_what_the_plan_says(written: tuple[driver.Answer, str]) -> None:
    plan = written[0].result
    assert isinstance(plan, Plan)
    text = " ".join(" ".join(Page(written[1]).words).split())
    for line in plan_verdict(plan):
        assert line in text
    for warning in plan.warnings:
        assert warning in text
    for entry in plan.ledger.gpu.entries:
        assert f"{entry.bytes:,}" in text
        assert entry.formula in text
        assert entry.source in text
    for step in plan.trail:
        assert step.reason in text


def test_the_same_spec_gives_the_same_page(written: tuple[driver.Answer, str]) -> None:
    answer, html = written
    assert report_page(answer.result, answer.loaded.spec) == html


def test_text_in_a_script_cannot_leave_it() -> None:
    text = script_json({"key": NASTY})
    assert not re.search(r"[<>&\u2028]", text)
    assert json.loads(text) == {"key": NASTY}


def test_names_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "<b onclick=x>&\"'.yaml"
    path.write_text(spec_text(), encoding="utf-8")
    answer = driver.answer(path)
    html = report_page(answer.result, answer.loaded.spec)
    assert "<b onclick" not in html
    assert path.name in "".join(Page(html).words)


def test_what_the_page_runs_is_the_source_without_its_comments() -> None:
    packed = packed_modules({"question": "QUESTION = {}\n"})
    modules = json.loads(gzip.decompress(base64.b64decode(packed)))
    for package in ("ledger", "clock", "ladder"):
        for file in sources_root().joinpath(package).iterdir():
            if file.name.endswith(".py"):
                name = f"memc.{package}" if file.name == "__init__.py" else f"memc.{package}.{file.name[:-3]}"
                assert modules[name][1] == stripped(file.read_text(encoding="utf-8"))
                assert types_at_run_time(file.read_text(encoding="utf-8")) == set(), file.name
    for name, module in modules.items():
        for node in ast.walk(ast.parse(module[1])):
            if not isinstance(node, ast.ImportFrom) or node.module == "browser":
                continue
            assert node.module in modules, f"{name} imports {node.module}, which a page does not carry"
            given = names_of(modules, node.module)
            lacking = [alias.name for alias in node.names if alias.name not in given]
            assert lacking == [], f"{name} wants {lacking} of {node.module}: add them to templates/report/modules"


def types_at_run_time(source: str) -> set[str]:
    """Returns the names of imports that a page leaves out, as only annotations need them, and that code still uses."""
    given = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module in ("collections.abc", "typing")
        for alias in node.names
    }
    used = {node.id for node in ast.walk(ast.parse(stripped(source))) if isinstance(node, ast.Name)}
    return given & used


def names_of(modules: dict[str, list[str]], module: str) -> set[str]:
    """Returns what can be imported from a module of a page: its top-level names and its submodules."""
    names = {name.rpartition(".")[2] for name in modules if name.rpartition(".")[0] == module}
    for node in ast.parse(modules[module][1]).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def test_only_what_people_and_checkers_read_is_stripped() -> None:
    source = '''"""Says."""
from __future__ import annotations
from collections.abc import Iterable
class A:
    """Says."""
    x: int = 1
    def f(self, y: int | None = None) -> set[int]:
        """Says."""
        z: list[int] = [y or 0]
        return {1, *z}
'''
    expected = """class A:
    x: 0 = 1

    def f(self, y=None):
        z = [y or 0]
        return frozenset((1, *z))"""
    assert stripped(source) == expected


def test_the_command_writes_the_page_and_spares_the_spec(tmp_path: Path) -> None:
    spec, html = tmp_path / "spec.yaml", tmp_path / "report.html"
    spec.write_text(spec_text(), encoding="utf-8")
    done = CliRunner().invoke(app, ["explain", str(spec), "--html", str(html)])
    assert done.exit_code == 0, done.output
    assert html.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert done.stdout == ""
    assert "created:" in done.stderr
    refused = CliRunner().invoke(app, ["explain", str(spec), "--html", str(spec)])
    assert "in-the-way" in str(refused.exception)
    assert spec.read_text(encoding="utf-8") == spec_text()


def test_every_vendored_script_has_version_licence_and_source() -> None:
    vendor = templates_root().joinpath("report", "vendor")
    readme = vendor.joinpath("README.md").read_text(encoding="utf-8")
    scripts = [file for file in vendor.iterdir() if file.name.endswith(".js")]
    assert len(scripts) == 2
    for script in scripts:
        (row,) = (line for line in readme.splitlines() if f"`{script.name}`" in line)
        version = [cell.strip() for cell in row.split("|")][3]
        (licence,) = re.findall(r"`([^`]*LICENSE[^`]*)`", row)
        assert "Copyright (c)" in vendor.joinpath(licence).read_text(encoding="utf-8")
        told = script.read_text(encoding="utf-8")
        assert version in told or f"[{version.replace('.', ',')}" in told.replace(" ", ""), script.name
