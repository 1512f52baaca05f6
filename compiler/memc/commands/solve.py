"""`memc solve`: the inverse question."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from memc.commands.calibration import no_calibration
from memc.errors import ExitCode

_QUANTITIES = ("max_length", "micro_batch_size", "model", "gpu", "count")


@click.command("solve")
@click.argument("spec", type=click.Path(path_type=Path))
@click.argument("quantity", type=click.Choice(_QUANTITIES))
@no_calibration
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")
def command(spec: Path, quantity: str, as_json: bool) -> None:
    """Find the longest sequence, the largest micro-batch or model, the cheapest card or the fewest cards for SPEC.

    Everything else stays as SPEC (a spec file or a folder that memc wrote) asks it. Exits 3 when nothing fits.
    """
    from memc import driver
    from memc.advise import Desk, Quantity, solution_document, solution_lines, solve_for
    from memc.spec import load_spec

    loaded = load_spec(driver.spec_path_of(spec))
    gpu, model = driver.facts_of(loaded)
    solution = solve_for(Desk(loaded, model, gpu, driver.count_samples(loaded)), Quantity(quantity))
    if as_json:
        click.echo(json.dumps(solution_document(solution, loaded), indent=2, sort_keys=True, ensure_ascii=False))
    else:
        for line in solution_lines(solution):
            click.echo(line)
    sys.exit(ExitCode.OK if solution.answer is not None else ExitCode.DOES_NOT_FIT)
