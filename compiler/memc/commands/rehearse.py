"""`memc rehearse`: the emitted folder, run as it is on cards that do not exist."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from memc.commands.completion import complete_gpu
from memc.errors import usage_error
from memc.units import parse_bytes


@click.command("rehearse")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--gpu", metavar="KEY", shell_complete=complete_gpu, help="Play another card; the lock is left as it is.")
@click.option("--memory", metavar="SIZE", help="Play a card with so much memory, such as 7.5GiB; the lock is left.")
@click.option("--ranks", default="0,last", show_default=True, help="Ranks to play, one after the other; middle is one.")
@click.option("--steps", type=click.IntRange(1, 1000), default=3, show_default=True, help="Optimizer steps to run.")
@click.option(
    "--timeout", type=click.FloatRange(1), default=900, show_default=True, metavar="SECONDS", help="Limit for one rank."
)
@click.option(
    "--snapshot",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Keep every rank's memory history there, and say what the peak was for.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")
def command(
    folder: Path,
    gpu: str | None,
    memory: str | None,
    ranks: str,
    steps: int,
    timeout: float,
    snapshot: Path | None,
    as_json: bool,
) -> None:
    """Run the script in FOLDER on phantom cards and compare what torch's allocator counts with the ledger.

    The CUDA build of torch and the other libraries run for real, without a GPU; kernels do nothing. Linux on x86-64.
    """
    from memc.diagnose import attribution
    from memc.document import record_document
    from memc.escalation import next_rungs, rung_lines
    from memc.rehearse import rehearse
    from memc.verify import text_lines

    found = rehearse(
        folder,
        gpu=gpu,
        memory_bytes=None if memory is None else _size(memory),
        ranks=tuple(part.strip() for part in ranks.split(",")),
        steps=steps,
        timeout_seconds=timeout,
        snapshots=snapshot,
        read_snapshot=attribution,
        on_line=lambda line: click.echo(line, err=True),
    )
    outcome = found.verification
    cuts = next_rungs(folder, outcome)
    if as_json:
        document = outcome.document() | {"unmodelled": list(found.unmodelled)}
        document |= {"next": [record_document(cut) for cut in cuts]}
        click.echo(json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False))
    else:
        for line in (*text_lines(outcome), *rung_lines(cuts)):
            click.echo(line)
        if found.unmodelled:
            click.echo(f"\nnot modelled, answered with success: {', '.join(found.unmodelled)}")
    sys.exit(outcome.exit_code)


def _size(text: str) -> int:
    """Returns a size on the command line in bytes.

    Raises:
        MemcError: When it is none.
    """
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise usage_error("rehearse-memory", str(error)) from error
