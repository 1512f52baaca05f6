"""The switch that leaves a user's own figures out, which several commands have."""

from __future__ import annotations

from typing import Any

import click


def _leave_out(context: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted:
        from memc.facts.calibration import planned_with

        context.with_resource(planned_with(None))


def no_calibration(command: Any) -> Any:
    """Returns a command with ``--no-calibration``: plans then use the catalogue's figures alone."""
    return click.option(
        "--no-calibration",
        is_flag=True,
        expose_value=False,
        callback=_leave_out,
        help="Plan with the catalogue's figures, not with those measured on your own cards (memc calibrate).",
    )(command)
