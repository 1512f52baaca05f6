"""`memc check`: are generated folders current, unedited and complete."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from memc.checking import FORMATS, check_paths, exit_code_of, formatted


@click.command("check")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--format", "form", type=click.Choice(list(FORMATS)), default="text", show_default=True, help="How to print it."
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
def command(paths: tuple[Path, ...], form: str, as_json: bool) -> None:
    """Compare every folder that memc wrote, at or below PATHS, with what its spec yields now. Nothing is written.

    Finds stale, hand-edited, left-over and missing files and says what changed: spec fields, facts, library versions,
    and the ledger lines that this moved. Exits 4 when anything is stale or edited; a measurement that does not belong
    to the plan is a warning.
    """
    reports = check_paths(paths)
    click.echo(formatted(reports, "json" if as_json else form))
    sys.exit(exit_code_of(reports))
