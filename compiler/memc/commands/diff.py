"""`memc diff`: two plans beside each other."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

import memc
from memc.comparison import Comparison, Side, compare_locks, comparison_lines, read_sides

SCHEMA = "memc/diff/1"


@click.command("diff")
@click.argument("before")
@click.argument("after")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")
def command(before: str, after: str, as_json: bool) -> None:
    """Show which ledger lines move from BEFORE to AFTER, which settings change and whether that touches numerics.

    Each is a folder that memc wrote, a spec, or a git revision of one: `memc diff HEAD~1 out/`,
    `memc diff main:examples/x/out out/`. Exits 0 whether or not they differ.
    """
    first, second = read_sides(before, after)
    found = compare_locks(first.lock, second.lock)
    if as_json:
        click.echo(json.dumps(_document(first, second, found), indent=2, sort_keys=True, ensure_ascii=False))
        return
    for sign, side in (("-", first), ("+", second)):
        note = "" if side.fits else "; DOES NOT FIT, compared by the nearest configuration"
        click.echo(f"{sign} {side.name} (memc {side.lock['memc']}, spec {side.lock['spec'].get('name')}{note})")
    for line in comparison_lines(found):
        click.echo(line)


def _document(first: Side, second: Side, found: Comparison) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "memc": memc.__version__,
        "before": {"name": first.name, "memc": first.lock["memc"], "fits": first.fits},
        "after": {"name": second.name, "memc": second.lock["memc"], "fits": second.fits},
        "changes": comparison_document(found),
    }


def comparison_document(found: Comparison) -> dict[str, Any]:
    """Returns a comparison as plain values; sizes are integers in bytes, times are seconds."""
    document = asdict(found)
    for line, move in zip(document["lines"], found.lines, strict=True):
        line["change_bytes"] = move.change_bytes
    for setting in document["settings"]:
        setting["touch"] = setting["touch"].value
    return document
