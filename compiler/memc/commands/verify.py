"""`memc verify`: the emitted folder, run for a few steps on this machine's cards."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memc.errors import usage_error
from memc.units import format_gib
from memc.verify import DEVICES, Settings, Verification, text_lines, verify
from memc.verify.processes import termination_unwinds

if TYPE_CHECKING:
    from memc.escalation import Climb

REHEARSED_STEPS = 3


@click.command("verify")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--device", type=click.Choice(DEVICES), default="auto", show_default=True, help="cpu: try it without.")
@click.option("--phantom", is_flag=True, help="On cards that do not exist, as memc rehearse does; needs no GPU.")
@click.option("--steps", type=click.IntRange(1, 1000), help="Optimizer steps to run (default: 4, on a CPU 2).")
@click.option(
    "--settle",
    type=click.IntRange(0, 1000),
    default=Settings.settle_steps,
    show_default=True,
    metavar="STEPS",
    help="At most so many steps more, until reserved memory stops growing.",
)
@click.option("--timeout", type=click.FloatRange(1), default=900, show_default=True, help="Seconds before giving up.")
@click.option(
    "--synthetic",
    "--random-weights",
    "random_weights",
    is_flag=True,
    help="Build the model from its config; shapes alone decide memory. Neither weights nor data are needed.",
)
@click.option(
    "--resume/--no-resume",
    default=True,
    show_default=True,
    help="Go on from the checkpoint at the end.",
)
@click.option(
    "--snapshot",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Keep every rank's memory history there, and say what the peak was for.",
)
@click.option(
    "--escalate",
    is_flag=True,
    help="Where the plan does not fit the card, climb to the next one that the spec allows, until one does.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")
def command(
    folder: Path,
    device: str,
    phantom: bool,
    steps: int | None,
    settle: int,
    timeout: float,
    random_weights: bool,
    resume: bool,
    snapshot: Path | None,
    escalate: bool,
    as_json: bool,
) -> None:
    """Run the script in FOLDER for a few steps with the longest batch and compare with the ledger.

    Every rank runs: load, first step, steady state, evaluation, checkpoint, and going on from it. Of a plan for several
    nodes, make the same call on each node at the same time.
    """
    if phantom and (device != "auto" or random_weights):
        raise usage_error(
            "verify-phantom",
            "--phantom plays the planned card and builds weights from the config",
            hint="leave --device and --synthetic out, or leave --phantom out",
        )
    from memc.diagnose import attribution
    from memc.document import record_document
    from memc.escalation import climb, next_rungs, rung_lines

    settings = Settings(
        device=device,
        steps=steps,
        settle_steps=settle,
        timeout_seconds=timeout,
        random_weights=random_weights,
        resume=resume,
        snapshots=snapshot,
        read_snapshot=attribution,
    )

    def run(place: Path) -> Verification:
        if not phantom:
            return verify(place, settings=settings, on_line=lambda line: click.echo(line, err=True))
        from memc.rehearse import rehearse

        played = REHEARSED_STEPS if steps is None else steps
        on_line = partial(click.echo, err=True)
        found = rehearse(
            place,
            steps=played,
            timeout_seconds=timeout,
            snapshots=snapshot,
            read_snapshot=attribution,
            on_line=on_line,
        )
        return found.verification

    with termination_unwinds():
        climbed = climb(folder, run, lambda line: click.echo(line, err=True)) if escalate else None
        outcome = run(folder) if climbed is None else climbed.outcome
    cuts = next_rungs(folder, outcome) if climbed is None else ()
    if as_json:
        document = outcome.document() | {"next": [record_document(cut) for cut in cuts]}
        document |= {} if climbed is None else {"escalation": climbed.document()}
        click.echo(json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False))
    else:
        for line in (*text_lines(outcome), *rung_lines(cuts), *_climb_lines(folder, climbed)):
            click.echo(line)
    sys.exit(outcome.exit_code)


def _climb_lines(folder: Path, climbed: Climb | None) -> list[str]:
    """Returns every plan that was measured, and what became of the folder."""
    if climbed is None or (len(climbed.attempts) < 2 and not climbed.stopped):
        return []
    lines = [""]
    for attempt in climbed.attempts:
        measured = (
            f"not {attempt.grade}"
            if attempt.measured_bytes is None
            else f"{attempt.grade} {format_gib(attempt.measured_bytes)}"
        )
        verdict = "fits" if attempt.fits else "does not fit" if attempt.over_memory else "failed"
        names = ", ".join(attempt.techniques) or "as asked"
        promised = format_gib(attempt.promised_bytes)
        lines.append(f"tried: rung {attempt.rung}, {names}: promised {promised}, {measured}, {verdict}")
    if climbed.written:
        lines.append(f"written: {folder} holds the plan that fits; its lock says what is kept free and why")
    if climbed.stopped:
        lines.append(f"stopped: {climbed.stopped}; {folder} is as it was")
    return lines
