"""`memc calibrate`: measurements of many runs become figures that later plans use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from memc.commands.completion import complete_gpu


@click.command("calibrate")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="File of figures (default: measured.yaml of your user)."
)
@click.option("--gpu", metavar="KEY", shell_complete=complete_gpu, help="Take measurements of this card alone.")
@click.option("--any-version", is_flag=True, help="Take measurements of other releases of torch than planned with.")
@click.option("--keep-outliers", is_flag=True, help="Take values that are far from all others.")
@click.option("--dry-run", is_flag=True, help="Print the figures and write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")
def command(
    paths: tuple[Path, ...],
    output: Path | None,
    gpu: str | None,
    any_version: bool,
    keep_outliers: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Collect what runs measured, at or below PATHS, into figures that later plans on those cards use.

    PATHS are folders that memc verify ran in, collections of measurements and files of memc probe. Figures are merged
    with those that are there: context, reserve over allocated, and rates, each with its median, spread and count.
    """
    from datetime import UTC, datetime

    from memc.calibration import Limits, collect, document_of, text_lines
    from memc.errors import usage_error
    from memc.facts import load_gpu
    from memc.facts.measured import SWITCH, user_path, write_measured

    path = output or user_path()
    if path is None:
        raise usage_error(
            "calibrate-switched-off",
            f"{SWITCH} is off, so there is no file for your own figures",
            hint=f"name one with --output, or unset {SWITCH}",
        )
    limits = Limits(
        card=load_gpu(gpu).key if gpu is not None else "", any_version=any_version, keep_outliers=keep_outliers
    )
    collected = collect(paths, path, limits)
    document = document_of(collected, datetime.now(UTC).date().isoformat())
    if not dry_run:
        write_measured(document, path, "Figures measured on a user's own cards: memc plans with them (memc calibrate).")
    if as_json:
        left_out = [{"place": item.place, "reason": item.reason} for item in collected.left_out]
        said: dict[str, Any] = {**document, "path": str(path), "written": not dry_run, "left_out": left_out}
        click.echo(json.dumps(said, indent=2, sort_keys=True, ensure_ascii=False))
        return
    for line in text_lines(collected):
        click.echo(line)
    click.echo(f"{'would be written to' if dry_run else 'written to'} {path}")
