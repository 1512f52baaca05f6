"""`memc check`: are generated folders current, and do files that memc never wrote agree with each other."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from memc.checking import FORMATS, check_paths, exit_code_of, formatted
from memc.lint import Given
from memc.spec import load_spec

_PINNED = re.compile(r"\s*([A-Za-z][\w.-]*)\s*==\s*([0-9][\w.+!-]*)\s*")


@click.command("check")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--format", "form", type=click.Choice(list(FORMATS)), default="text", show_default=True, help="How to print it."
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@click.option(
    "--with", "versions", multiple=True, metavar="PACKAGE==VERSION", help="Lint for this version; repeatable."
)
@click.option("--gpu", metavar="NAME", help="Lint for this card.")
@click.option("--model", metavar="NAME", help="Lint for this model: a catalogue key or a folder with config.json.")
@click.option("--spec", "spec_path", type=click.Path(path_type=Path), help="Lint for the hardware and model of a spec.")
def command(
    paths: tuple[Path, ...],
    form: str,
    as_json: bool,
    versions: tuple[str, ...],
    gpu: str | None,
    model: str | None,
    spec_path: Path | None,
) -> None:
    """Compare every folder that memc wrote, at or below PATHS, with what its spec yields now. Nothing is written.

    Finds stale, hand-edited, left-over and missing files and says what changed: spec fields, facts, library versions,
    and the ledger lines that this moved. Other files are linted: DeepSpeed JSON, Accelerate YAML, PEFT and FSDP
    configs, trainer arguments, training scripts, launcher and Slurm scripts, requirements. Where they contradict each
    other, the versions or the hardware, both places and the edit are named. Exits 4 when anything is stale, edited or
    contradictory.
    """
    reports = check_paths(paths, _given(versions, gpu, model, spec_path))
    click.echo(formatted(reports, "json" if as_json else form))
    sys.exit(exit_code_of(reports))


def _given(versions: tuple[str, ...], gpu: str | None, model: str | None, spec_path: Path | None) -> Given:
    pinned = {}
    for text in versions:
        match = _PINNED.fullmatch(text)
        if match is None:
            raise click.BadParameter(f"{text!r} is not PACKAGE==VERSION", param_hint="--with")
        pinned[match[1].lower()] = match[2]
    if spec_path is None:
        return Given(versions=pinned, gpu=gpu, model=model)
    spec = load_spec(spec_path).spec
    hardware = spec.hardware
    return Given(
        versions=pinned, gpu=gpu or hardware.gpu, model=model or spec.model, gpus_per_node=hardware.count,
        nodes=hardware.nodes, told=spec_path.name,
    )  # fmt: skip
