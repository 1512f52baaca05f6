"""Runs the commands that the documentation shows, in a folder that looks like a checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOT_RUN = re.compile(r"<!-- not run: (?P<reason>[^>]+?) -->")
EXITS = re.compile(r"<!-- exits (?P<code>\d+) -->")
_FENCE = re.compile(r"^```(?P<language>console|sh)[^\n]*\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Block:
    """One block of shell lines in a page.

    Attributes:
        commands: The lines as a person would type them, outputs left out.
        reason: Why a test does not run it; empty when it does.
        exit_code: What its last command exits with.
        line: Where the block begins in its page.
    """

    commands: tuple[str, ...]
    reason: str
    exit_code: int
    line: int


def shell_blocks(page: str) -> Iterator[Block]:
    """Yields the blocks marked `console` (lines after `$ `) or `sh` (every line) of a Markdown page.

    A comment right above a block says why it is not run (`not run: reason`) or how it ends (`exits 3`).
    """
    for match in _FENCE.finditer(page):
        above = page[: match.start()].rstrip().rpartition("\n")[2]
        not_run, exits = NOT_RUN.search(above), EXITS.search(above)
        body = match["body"]
        if match["language"] == "console":
            joined = body.replace("\n> ", "\n").splitlines()
            commands = tuple(line.removeprefix("$ ") for line in joined if line.startswith("$ "))
        else:
            commands = (body,)
        yield Block(
            commands=commands,
            reason=not_run["reason"] if not_run else "",
            exit_code=int(exits["code"]) if exits else 0,
            line=page[: match.start()].count("\n") + 1,
        )


def workspace(folder: Path) -> Path:
    """Returns `folder`, filled with the examples and the specs that pages show."""
    shutil.copytree(ROOT / "examples", folder / "examples", dirs_exist_ok=True)
    shutil.copytree(ROOT / "docs" / "specs", folder / "specs", dirs_exist_ok=True)
    return folder


def run_shell(commands: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Returns how bash ended with `commands` in `folder`; memc of this environment comes first on the path.

    Compiles trace nothing, so that what pages show does not depend on whether torch is installed.
    """
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "NO_COLOR": "1",
        "COLUMNS": "120",
        "LC_ALL": "C.UTF-8",
        "MEMC_CERTIFY": "0",
    }
    command = ["bash", "-euo", "pipefail", "-c", commands]
    return subprocess.run(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )


def output_of(command: str, folder: Path, exit_code: int = 0) -> str:
    """Returns what a command prints, spaces at line ends removed.

    Raises:
        RuntimeError: When it ends with another exit code.
    """
    done = run_shell(command, folder)
    if done.returncode != exit_code:
        raise RuntimeError(f"{command!r} exited {done.returncode}, not {exit_code}:\n{done.stdout}")
    return "\n".join(line.rstrip() for line in done.stdout.splitlines())
