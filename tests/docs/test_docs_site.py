"""The site and README: every shell line runs, every link resolves, the transcript is true, nothing is fetched."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from memc.ladder import LADDER

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from pages.commands import command_entries, command_names  # noqa: E402
from pages.fields import spec_fields  # noqa: E402
from pages.runs import run_shell, shell_blocks, workspace  # noqa: E402

import docs as generator  # noqa: E402

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
# Blocks that no test runs. Each gives its reason in a comment above it; a new one must be counted here.
NOT_RUN = {"README.md": 3, "docs/concepts/verify.md": 2, "docs/quickstart.md": 2}
MUST_RUN = {"README.md": 3, "docs/quickstart.md": 6}
# Words that the house does not use for these things, in headings.
OTHER_WORDS = re.compile(
    r"\b(config file|recomputation|bucket|strateg(y|ies)|passes|prediction|bs|mbs)\b", re.IGNORECASE
)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_shell_line_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    workspace(tmp_path)
    blocks = list(shell_blocks(page.read_text(encoding="utf-8")))
    skipped = [block for block in blocks if block.reason]
    assert len(skipped) == NOT_RUN.get(name(page), 0), [block.reason for block in skipped]
    assert len(blocks) - len(skipped) >= MUST_RUN.get(name(page), 0)
    folder = tmp_path
    for block in blocks:
        if block.reason:
            continue
        assert block.commands, f"{name(page)}:{block.line} holds no command"
        script = "\n".join([*block.commands, "pwd > /dev/fd/9" if block.exit_code == 0 else ""])
        where = tmp_path / ".where"
        done = run_shell(f"exec 9> {where}\n{script}", folder)
        assert done.returncode == block.exit_code, f"{name(page)}:{block.line}\n{script}\n{done.stdout[-3000:]}"
        if block.exit_code == 0:
            folder = Path(where.read_text(encoding="utf-8").strip())


def test_the_examples_of_every_command_run(tmp_path: Path) -> None:
    workspace(tmp_path)
    first = ["compile"]  # what it writes, others read
    entries = command_entries()
    for command in [*first, *(other for other in command_names() if other not in first)]:
        for example in entries[command]["examples"]:
            if "not_run" in example:
                assert example["not_run"]
                continue
            done = run_shell(example["run"], tmp_path)
            assert done.returncode == example.get("exits", 0), f"{example['run']}\n{done.stdout[-3000:]}"


def test_the_transcript_of_the_readme_is_what_the_command_prints() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert generator.with_transcript(readme) == readme, "run `make readme` and look at what changed"


def test_the_commands_of_the_readme_are_all_of_them() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = "\n".join(line for line in readme.splitlines() if line.startswith("| `memc "))
    assert set(re.findall(r"memc ([a-z]+)", rows)) == set(command_names())


def test_files_that_the_readme_links_exist() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (ROOT / target).exists(), f"{page.name} links {target}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_headings_use_the_words_of_the_house(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings
    assert [heading for heading in headings if OTHER_WORDS.search(heading)] == []


class Links(HTMLParser):
    """What a page refers to and which anchors it has."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attrs}
        self.anchors |= {values[key] for key in ("id", "name") if key in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in ("script", "link", "img", "iframe", "source"):
            self.fetched += [values[key] for key in ("src", "href") if key in values]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    generator.build(folder / "docs")
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    moved = settings.replace("docs_dir: build/docs", "docs_dir: docs").replace("site_dir: build/site", "site_dir: html")
    (folder / "mkdocs.yml").write_text(moved, encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "html"


def pages_of(site: Path) -> Iterator[tuple[Path, Any]]:
    return ((page, Links(page)) for page in sorted(site.rglob("*.html")) if page.name != "404.html")


def test_every_internal_link_resolves(site: Path) -> None:
    anchors = {page.resolve(): links.anchors for page, links in pages_of(site)}
    assert len(anchors) == len(PAGES) - 1
    broken = []
    for page, links in pages_of(site):
        for link in links.links:
            if "://" in link or link.startswith("mailto:"):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page.resolve()
            target = target / "index.html" if target.is_dir() else target
            if target not in anchors or (anchor and anchor not in anchors[target]):
                broken.append((page.name, link))
    assert broken == []


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page, links in pages_of(site):
        assert links.fetched
        assert [url for url in links.fetched if "//" in url] == [], page.name


def test_every_command_and_every_field_is_on_the_site(site: Path) -> None:
    commands = Links(site / "reference" / "commands.html").anchors
    assert set(command_names()) <= commands
    text = (site / "reference" / "spec.html").read_text(encoding="utf-8")
    assert [field for field in spec_fields() if f"<code>{field}</code>" not in text] == []


def test_no_generated_part_is_left_unfilled(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert "<!-- generated" not in text, page.name
        assert "<!-- output" not in text, page.name


def test_the_ladder_and_the_questions_name_what_the_code_has(tmp_path: Path) -> None:
    ladder = generator.expand("<!-- generated: rungs -->", tmp_path)
    rungs = {technique.rung for technique in LADDER}
    assert [line.split("|")[1].strip() for line in ladder.splitlines()[2:]] == [str(n) for n in (1, *sorted(rungs))]
    assert [t.name for t in LADDER if not t.name.startswith("accumulate-") and f"#{t.name})" not in ladder] == []
    unpriced = generator.expand("<!-- generated: unpriced -->", tmp_path)
    assert "`clip`" in unpriced
    assert "`mixtral`" not in unpriced
    assert "`t5`" not in unpriced


def test_a_page_that_asks_for_what_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        generator.expand("<!-- generated: nothing -->", tmp_path)
    with pytest.raises(RuntimeError, match="exited 2, not 0"):
        generator.expand("<!-- output: memc explain absent.yaml -->", tmp_path)
