"""The reference of every command, read from the command line itself, with examples from docs/commands.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import yaml
from memc.cli import app

from pages.text import fenced, heading, table

ENTRIES = Path(__file__).resolve().parents[2] / "docs" / "commands.yaml"


def command_names() -> tuple[str, ...]:
    """Returns the names of all commands, sorted."""
    return tuple(app.list_commands(click.Context(app)))


def command_entries() -> dict[str, dict[str, Any]]:
    """Returns what docs/commands.yaml says: command → its examples and the exit codes that it can end with."""
    document: dict[str, dict[str, Any]] = yaml.safe_load(ENTRIES.read_text(encoding="utf-8"))
    return document


def commands_section() -> str:
    """Returns one section for each command."""
    entries = command_entries()
    return "\n".join(_section(name, entries.get(name, {})) for name in command_names())


def command_table() -> str:
    """Returns the commands with the first sentence of each."""
    rows = []
    for name in command_names():
        command = _command(name)
        rows.append([f"`memc {name}`", command.get_short_help_str(limit=120)])
    return table(["command", "what it does"], rows)


def _command(name: str) -> click.Command:
    command = app.get_command(click.Context(app), name)
    assert command is not None
    return command


def _section(name: str, entry: dict[str, Any]) -> str:
    command = _command(name)
    context = click.Context(command, info_name=f"memc {name}", help_option_names=["-h", "--help"])
    usage = command.get_usage(context).removeprefix("Usage: ")
    parts = [heading(2, f"memc {name} {{ #{name} }}"), fenced(usage), f"{command.help or ''}\n"]
    options = [_option(option, context) for option in command.params if isinstance(option, click.Option)]
    if options:
        parts.append(table(["option", "value", "default", "what it does"], options))
    if entry.get("examples"):
        lines = [f"$ {example['run']}" for example in entry["examples"]]
        parts += ["Examples:\n", fenced("\n".join(lines), "console")]
    codes = table(["exit code", "when"], [[code, when] for code, when in sorted(entry.get("exits", {}).items())])
    return "\n".join([*parts, codes])


def _option(option: click.Option, context: click.Context) -> list[object]:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    value = "" if option.is_flag or option.count else f"`{option.make_metavar(context)}`"
    default = option.to_info_dict().get("default")
    shown = f"`{default}`" if isinstance(default, str | int | float) and not option.is_flag else ""
    return [names, value, shown, option.help or ""]
