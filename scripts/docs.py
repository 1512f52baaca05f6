"""Builds the pages of the site: hand-written Markdown, generated parts filled in; keeps README's transcript true.

A line `<!-- generated: NAME -->` in a page stands for a section of `SECTIONS`; `<!-- output: COMMAND -->` stands for
what the command prints in a copy of the examples (`<!-- output 3: COMMAND -->` when it exits 3).
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from pages.accuracy import accuracy_section, catalogue_section
from pages.card import card_section
from pages.catalogue import gpu_table, model_table, unpriced_sentence
from pages.codes import codes_section
from pages.commands import command_table, commands_section
from pages.evidence import evidence_table
from pages.fields import fields_section
from pages.lint import lint_section
from pages.memory import memory_section
from pages.rehearsals import rehearsals_section
from pages.runs import output_of, workspace
from pages.techniques import ladder_section, rungs_section
from pages.text import fenced
from pages.times import times_section

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs"
README = ROOT / "README.md"
SECTIONS: dict[str, Callable[[], str]] = {
    "accuracy": accuracy_section,
    "accuracy-card": card_section,
    "accuracy-catalogue": catalogue_section,
    "accuracy-memory": memory_section,
    "accuracy-rehearsals": rehearsals_section,
    "accuracy-time": times_section,
    "codes": codes_section,
    "command-table": command_table,
    "commands": commands_section,
    "evidence": evidence_table,
    "fields": fields_section,
    "gpus": gpu_table,
    "ladder": ladder_section,
    "lint": lint_section,
    "models": model_table,
    "rungs": rungs_section,
    "unpriced": unpriced_sentence,
}
TRANSCRIPT_COMMAND = "memc explain examples/7b-lora-24gb/spec.yaml"
_GENERATED = re.compile(r"^<!-- generated: (?P<name>\S+) -->$", re.MULTILINE)
_OUTPUT = re.compile(r"^<!-- output(?: (?P<code>\d+))?: (?P<command>.+?) -->$", re.MULTILINE)
_TRANSCRIPT = re.compile(r"(?<=<!-- transcript -->\n)```console\n.*?^```\n", re.MULTILINE | re.DOTALL)


def expand(page: str, folder: Path) -> str:
    """Returns a page with its generated parts; `folder` is where its commands run.

    Raises:
        KeyError: When it asks for a section that does not exist.
        RuntimeError: When a command does not end as the page says.
    """
    page = _GENERATED.sub(lambda match: SECTIONS[match["name"]](), page)
    return _OUTPUT.sub(lambda match: _shown(match["command"], folder, int(match["code"] or 0)), page)


def _shown(command: str, folder: Path, exit_code: int = 0) -> str:
    return fenced(f"$ {command}\n{output_of(command, folder, exit_code)}", "console")


def build(output: Path) -> None:
    """Writes every page of the site to `output`, which is emptied first."""
    shutil.rmtree(output, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = workspace(Path(scratch))
        for source in sorted(PAGES.rglob("*.md")):
            target = output / source.relative_to(PAGES)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(expand(source.read_text(encoding="utf-8"), folder), encoding="utf-8")


def with_transcript(readme: str) -> str:
    """Returns README with its transcript as the command prints it now."""
    with tempfile.TemporaryDirectory() as scratch:
        shown = _shown(TRANSCRIPT_COMMAND, workspace(Path(scratch)))
    text, count = _TRANSCRIPT.subn(lambda _: shown, readme)
    if count != 1:
        raise RuntimeError("README.md must hold one console block below the comment `transcript`")
    return text


def main() -> int:
    """Returns 0; builds the pages into a folder, or rewrites README's transcript."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", nargs="?", type=Path, default=ROOT / "build" / "docs", help="folder of the pages")
    parser.add_argument("--readme", action="store_true", help="rewrite the transcript in README.md and stop")
    options = parser.parse_args()
    if options.readme:
        README.write_text(with_transcript(README.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        build(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
