"""`memc probe`: what this machine achieves, as a file of figures."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command("probe")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Write a file that hardware.file of a spec names."
)
@click.option(
    "--seconds", type=click.FloatRange(1, 3600), default=60, show_default=True, help="How long measuring may take."
)
@click.option(
    "--disk",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Folder on the drive to measure (default: the current one); a file in it is written and removed.",
)
@click.option("--only", default="", metavar="PARTS", help="Parts to measure, with commas; --only list prints them.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")
def command(output: Path | None, seconds: float, disk: Path, only: str, as_json: bool) -> None:
    """Measure what this machine achieves: products by shape and type, memory, PCIe, all-reduce, optimizers, the drive.

    Works without a GPU too: what needs one is said to be absent. The file that --output writes is what hardware.file
    of a spec names; memc calibrate adds it to your own figures. Needs torch.
    """
    from datetime import UTC, datetime

    from memc.facts.measured import write_measured
    from memc.probing import probe, text_lines
    from memc.probing.parts import PARTS

    if only == "list":
        for part in PARTS:
            click.echo(f"{part.name}: {', '.join(part.figures)}")
        return
    parts = [name.strip() for name in only.split(",") if name.strip()]
    found = probe(seconds=seconds, folder=disk, parts=parts, on_line=lambda line: click.echo(line, err=True))
    document = found.document(datetime.now(UTC).date().isoformat())
    if output is not None:
        write_measured(document, output, "What a machine achieves, for hardware.file of a spec. Written by memc probe.")
    if as_json:
        click.echo(json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False))
        return
    for line in text_lines(found):
        click.echo(line)
    if output is not None:
        click.echo(f"written to {output}")
