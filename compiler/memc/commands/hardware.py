"""`memc hardware`: every card of the catalogue, priced for one spec."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from memc.commands.calibration import no_calibration
from memc.errors import ExitCode

_MOST_GPUS = 1024


def _counts(_context: click.Context, _option: click.Parameter, text: str) -> tuple[int, ...]:
    """Returns the counts that ``1,2,4,8`` names."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and 1 <= int(word) <= _MOST_GPUS for word in words):
        raise click.BadParameter(f"{text!r} is no list of whole numbers from 1 to {_MOST_GPUS}, like 1,2,4,8")
    return tuple(sorted({int(word) for word in words}))


def _amounts(_context: click.Context, _option: click.Parameter, texts: Sequence[str]) -> dict[str, float]:
    """Returns amounts by card as it was written; the empty name stands for no card in particular."""
    found: dict[str, float] = {}
    for text in texts:
        card, _, amount = text.rpartition("=")
        try:
            value = float(amount.strip().removeprefix("$"))
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            raise click.BadParameter(f"{text!r} is no amount of money; write for example 2.5 or CARD=2.5")
        found[card.strip()] = value
    return found


@click.command("hardware")
@click.argument("spec", type=click.Path(path_type=Path))
@click.option("--counts", default="1,2,4,8", show_default=True, callback=_counts, help="GPUs in one node.")
@click.option(
    "--gpu-hour-price",
    multiple=True,
    callback=_amounts,
    metavar="[CARD=]USD",
    help="One hour of one GPU: of CARD, else of the spec's own card; the catalogue's when not given. 0 when owned.",
)
@click.option(
    "--upgrade-cost",
    multiple=True,
    callback=_amounts,
    metavar="[CARD=]USD",
    help="Price of one GPU to buy: of CARD, else of any. Nothing when not given: cards are rented by the hour.",
)
@click.option("--engineer-hour", type=click.FloatRange(0), help="US dollars for one hour of who makes runs fit.")
@click.option("--debug-hours", type=click.FloatRange(0), help="Hours that making the spec's own plan fit costs.")
@click.option(
    "--deadline-cost", type=click.FloatRange(0), default=0.0, help="US dollars that missing time.budget costs."
)
@no_calibration
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")
def command(
    spec: Path,
    counts: tuple[int, ...],
    gpu_hour_price: dict[str, float],
    upgrade_cost: dict[str, float],
    engineer_hour: float | None,
    debug_hours: float | None,
    deadline_cost: float,
    as_json: bool,
) -> None:
    """Price SPEC on every card of the catalogue, and say what an upgrade from its own card is worth.

    An upgrade's price stands against the time of the run that it saves, the debugging that it avoids and the deadline
    that it keeps. Exits 3 when no card of the catalogue has a plan.
    """
    from memc import driver
    from memc.advise import Costs, Desk, survey, survey_document, survey_lines
    from memc.facts import load_gpu
    from memc.spec import load_spec

    loaded = load_spec(driver.spec_path_of(spec))
    gpu, model = driver.facts_of(loaded)
    costs = Costs(
        gpu_hour={load_gpu(card).key if card else gpu.key: usd for card, usd in gpu_hour_price.items()},
        upgrade={load_gpu(card).key: usd for card, usd in upgrade_cost.items() if card},
        any_upgrade=upgrade_cost.get("", 0.0),
        engineer_hour=engineer_hour,
        debug_hours=debug_hours,
        deadline=deadline_cost,
    )
    found = survey(Desk(loaded, model, gpu, driver.count_samples(loaded)), counts, costs)
    if as_json:
        click.echo(json.dumps(survey_document(found, loaded), indent=2, sort_keys=True, ensure_ascii=False))
    else:
        for line in survey_lines(found):
            click.echo(line)
    sys.exit(ExitCode.OK if any(row.plan is not None for row in found.rows) else ExitCode.DOES_NOT_FIT)
