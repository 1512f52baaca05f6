"""The command line: options, printing, exit codes. Nothing else prints."""

from __future__ import annotations

import errno
import gc
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

# pydantic would look through every installed package for plugins of its own, which takes longer than reading a spec.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

import memc
from memc import commands
from memc.commands.calibration import no_calibration
from memc.commands.completion import complete_gpu, complete_model
from memc.errors import Diagnostic, ExitCode, MemcError, usage_error

if TYPE_CHECKING:
    from memc.driver import Answer, Written
    from memc.facts import GpuFacts

# A compile makes records, which end with it, and few cycles: looking for these takes a tenth of a cold start.
_GARBAGE_AFTER = (100_000, 20, 100)

_SPEC = click.argument("spec", type=click.Path(path_type=Path))
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")


class _ReaderLeftError(Exception):
    """Standard output was closed by who read it."""


class _Commands(click.Group):
    """The group of all commands; those of `memc.commands` are imported when they are asked for.

    click itself ends a broken pipe with exit code 1, which here means something else.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names of all commands, sorted."""
        return sorted({*super().list_commands(ctx), *commands.NAMES})

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes every command with its short help, which is there without the command's module."""
        names = self.list_commands(ctx)
        limit = formatter.width - 6 - max(map(len, names))
        own = {name: super(_Commands, self).get_command(ctx, name) for name in names}
        listed = {name: own[name] or click.Command(name, help=commands.NAMES[name]) for name in names}
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(limit)) for name, command in listed.items()])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns the command called `cmd_name`; None when there is none."""
        if cmd_name in commands.NAMES:
            found: click.Command = import_module(f"memc.commands.{cmd_name}").command
            return found
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        """Returns what the command returns; raises `_ReaderLeftError` when nobody reads its output any more."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise _ReaderLeftError from error


_REFUSALS = frozenset({errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.ENOSPC, errno.EPERM, errno.EROFS})
"""Errors of a system on whose disk there is no room, or no right to use it."""


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(memc.__version__, prog_name="memc", message="%(prog)s %(version)s")
def app() -> None:
    """Compile a short spec into launch files whose memory fits.

    Exit codes: 0 ok, 1 internal error, 2 usage or invalid spec, 3 does not fit, 4 generated files stale or edited by
    hand, 5 verification failed.
    """


@app.command("compile")
@click.argument("specs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Output folder (default: out/ beside the spec).")
@click.option("--check", is_flag=True, help="Compare with what is there instead of writing; exit 4 when it differs.")
@click.option("--force", is_flag=True, help="Overwrite files that were edited by hand.")
@click.option(
    "--certify/--no-certify",
    default=True,
    show_default=True,
    envvar="MEMC_CERTIFY",
    show_envvar=True,
    help="Trace the plan where torch is installed; never with --check.",
)
@click.option(
    "--certify-timeout",
    type=click.FloatRange(1),
    default=120,
    show_default=True,
    metavar="SECONDS",
    help="How long tracing one plan may take before it is written as estimated.",
)
@no_calibration
@_JSON
def compile_command(
    specs: tuple[Path, ...],
    output: Path | None,
    check: bool,
    force: bool,
    certify: bool,
    certify_timeout: float,
    as_json: bool,
) -> None:
    """Solve each SPEC and write its launch files.

    Where torch and transformers are installed, the plan's step is traced first, in a process of its own; a plan that
    does not fit as traced is not written. A trace from earlier that the folder's lock holds is used again.

    With several specs and -o, each gets a folder of its own under the output folder, named after the spec. Nothing is
    written unless every spec is valid and fits.
    """
    from memc import driver
    from memc.plan import Infeasible

    folders = [_folder(spec, output, len(specs)) for spec in specs]
    _require_distinct(folders)
    solved = driver.answers(specs, folders, certify_seconds=certify_timeout if certify and not check else 0)
    refused = [answer for answer in solved if isinstance(answer.result, Infeasible)]
    own = [note for answer, folder in zip(solved, folders, strict=True) for note in answer.measured_notes(folder)]
    outcomes: list[Written] = []
    files: dict[Path, dict[str, str]] = {}
    if not refused:
        files = {
            folder: driver.generate(answer, folder, driver.compile_command(spec, folder))
            for spec, folder, answer in zip(specs, folders, solved, strict=True)
        }
        if check:
            outcomes = [driver.compare(texts, folder) for folder, texts in files.items()]
        else:
            outcomes = driver.write(files, force=force, keep=specs)
    if as_json:
        documents = [answer.document() for answer in solved]
        _print_json(documents[0] if len(specs) == 1 else documents)
    else:
        for answer in refused:
            _print_report(answer)
    for outcome in outcomes:
        _say_written(outcome, check)
    for note in dict.fromkeys((*(note for answer in solved for note in answer.notes), *own)):
        click.echo(f"note: {note}", err=True)
    if refused:
        click.echo(f"nothing written: {_names(refused)} does not fit", err=True)
        sys.exit(ExitCode.DOES_NOT_FIT)
    if not as_json and not check:
        for spec, answer in zip(specs, solved, strict=True):
            if len(specs) > 1:
                click.echo(f"== {spec}")
            _print_verdict(answer)
    stale = driver.stale(outcomes) if check else []
    if stale:
        if not as_json:
            _print_diffs(outcomes, files)
        raise MemcError(tuple(stale), ExitCode.STALE)


@app.command()
@_SPEC
@_JSON
@no_calibration
@click.option("--resolved", is_flag=True, help="Print every field with its value and why it has it.")
@click.option("--html", type=click.Path(path_type=Path), help="Write a self-contained page with charts and sliders.")
def explain(spec: Path, as_json: bool, resolved: bool, html: Path | None) -> None:
    """Show the ledger, the ladder and the clock of SPEC (a spec file or a folder that memc wrote)."""
    from memc import driver
    from memc.plan import Plan

    answer = driver.answer(driver.spec_path_of(spec), folder=spec if spec.is_dir() else None)
    if resolved:
        from memc.commands.resolved import print_resolved

        print_resolved(answer, as_json)
    elif as_json:
        _print_json(answer.document())
    elif html is None:
        _print_report(answer)
    if html is not None:
        _write_page(answer, html)
    sys.exit(ExitCode.OK if isinstance(answer.result, Plan) else ExitCode.DOES_NOT_FIT)


@app.command()
@click.argument("name", required=False, shell_complete=complete_gpu)
@_JSON
def gpus(name: str | None, as_json: bool) -> None:
    """List the GPUs of the catalogue, or show one.

    A card whose capacity is unknown cannot be planned for; one that is not timed is planned, and its time is unknown.
    """
    from memc.facts import gpu_rows, load_gpu

    if name is not None:
        _print_record(load_gpu(name), as_json)
        return
    rows = [
        {
            "key": row.key,
            "name": row.name,
            "capacity_gib": None if row.facts.capacity_bytes is None else round(row.facts.capacity_bytes / 2**30, 2),
            "bf16": row.facts.bf16,
            "timed": _has_rates(row.facts),
            "usd_per_hour": row.facts.usd_per_hour,
        }
        for row in gpu_rows()
    ]
    _print_rows(rows, as_json)


def _has_rates(gpu: GpuFacts) -> bool:
    """Whether the catalogue knows enough of a card's speed to time a run on it."""
    from memc.clock import clock_facts
    from memc.config import Precision

    try:
        clock_facts(gpu, Precision.BF16 if gpu.bf16 else Precision.FP16, 1)
    except MemcError:
        return False
    return True


@app.command()
@click.argument("name", required=False, shell_complete=complete_model)
@_JSON
def models(name: str | None, as_json: bool) -> None:
    """List the models of the catalogue, or show one (a key, a folder or a config.json)."""
    from memc.facts import load_model, model_rows

    if name is not None:
        _print_record(load_model(name, base_dir=Path()), as_json)
        return
    rows = [
        {
            "key": row.key,
            "model_type": row.model_type,
            "params": row.params,
            "verified": row.verified,
            "priced": row.priced,
        }
        for row in model_rows()
    ]
    _print_rows(rows, as_json)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits with one of `ExitCode`.

    What no one foresaw ends in one line and exit code 1; with MEMC_TRACEBACK set in the environment, in a traceback.
    """
    gc.set_threshold(*_GARBAGE_AFTER)
    _escape_what_cannot_be_shown()
    try:
        app.main(args=None if arguments is None else list(arguments), prog_name="memc", standalone_mode=False)
    except MemcError as error:
        _fail(error.diagnostics, error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(ExitCode.USAGE)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except _ReaderLeftError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.OK)
    except Exception as error:
        if os.environ.get("MEMC_TRACEBACK"):
            raise
        refused = _refused(error)
        if refused is not None:
            _fail((refused,), ExitCode.USAGE)
        _fail((_unforeseen(error),), ExitCode.INTERNAL)
    finally:
        if arguments is None:  # the process ends here: looking for garbage once more would only delay it
            gc.freeze()


def _refused(error: Exception) -> Diagnostic | None:
    """Returns what to say when a disk is full, or may not be used; None for any other error."""
    without_place = isinstance(error, FileNotFoundError) and str(error.strerror).startswith("No usable temporary")
    if not isinstance(error, OSError) or not (error.errno in _REFUSALS or without_place):
        return None
    place = "" if error.filename is None else f"{error.filename}: "
    return Diagnostic(
        code="system-refuses",
        message=f"the system refuses: {place}{error.strerror or error}",
        hint="make room, or allow memc to read and write there; TMPDIR says where temporary files go, XDG_CACHE_HOME "
        "where caches lie",
    )


def _unforeseen(error: Exception) -> Diagnostic:
    text = " ".join(str(error).split()) or "no message"
    return Diagnostic(
        code="internal",
        message=f"memc {memc.__version__} stopped on an error of its own: {type(error).__name__}: {text[:300]}",
        hint="set MEMC_TRACEBACK=1, run the same command again, and report what it prints together with the spec",
    )


def _escape_what_cannot_be_shown() -> None:
    """Makes standard output and error write characters that their encoding lacks as escapes, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _folder(spec: Path, output: Path | None, specs: int) -> Path:
    """Returns where the files of a spec go."""
    if output is None:
        return spec.parent / "out"
    return output if specs == 1 else output / spec.stem


def _names(answers: list[Answer]) -> str:
    return ", ".join(answer.loaded.path.as_posix() for answer in answers)


def _require_distinct(folders: list[Path]) -> None:
    """Raises when two specs would be written to one folder."""
    seen: set[str] = set()
    for folder in folders:
        place = os.path.realpath(folder)
        if place in seen:
            raise usage_error(
                "same-folder",
                f"two specs would be written to {folder}",
                hint="give specs of different names and one -o, or compile them one by one, each with its -o",
            )
        seen.add(place)


def _say_written(outcome: Written, check: bool) -> None:
    """Says on standard error what happened to each file."""
    from memc.driver import Change

    verb = {Change.CREATE: "created", Change.UPDATE: "updated", Change.IDENTICAL: "unchanged"}
    for name, change in outcome.changes.items():
        if change is Change.IDENTICAL:
            continue
        shown = str(change) if check else verb.get(change, str(change) if change is Change.LEFT_OVER else "overwritten")
        click.echo(f"{shown}: {outcome.folder / name}", err=True)
    if outcome.current:
        click.echo(f"current: {outcome.folder}", err=True)


def _print_diffs(outcomes: list[Written], files: dict[Path, dict[str, str]]) -> None:
    """Prints what writing would change in the files that are there, as unified diffs; the others are only named."""
    from memc.checking import unified_diff
    from memc.driver import Change

    for outcome in outcomes:
        for name, change in outcome.changes.items():
            path, text = outcome.folder / name, files[outcome.folder].get(name)
            if text is not None and change is not Change.IDENTICAL and path.is_file() and not path.is_symlink():
                click.echo(unified_diff(path, path.read_bytes(), text), nl=False)


def _print_report(answer: Answer) -> None:
    from memc.plan import Plan
    from memc.report import plan_report, refusal_report

    result = answer.result
    _console().print(plan_report(result) if isinstance(result, Plan) else refusal_report(result))


def _write_page(answer: Answer, path: Path) -> None:
    from memc import driver
    from memc.page import report_page

    driver.write_text(path, report_page(answer.result, answer.loaded.spec), keep=answer.loaded.path)
    click.echo(f"created: {path}", err=True)


def _print_verdict(answer: Answer) -> None:
    from memc.plan import Plan
    from memc.verdict import plan_verdict

    assert isinstance(answer.result, Plan)
    for line in plan_verdict(answer.result):
        click.echo(line)
    for warning in answer.result.warnings:
        click.echo(f"note: {warning}")


def _console() -> Any:
    from rich.console import Console

    columns = os.environ.get("COLUMNS", "")
    width = None if sys.stdout.isatty() else int(columns) if columns.isdecimal() and int(columns) else 120
    plain = bool(os.environ.get("NO_COLOR"))
    return Console(highlight=False, width=width, soft_wrap=False, color_system=None if plain else "auto")


def _print_json(document: Any) -> None:
    click.echo(json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False))


def _print_record(record: Any, as_json: bool) -> None:
    from memc.document import record_document

    document = record_document(record)
    if as_json:
        _print_json(document)
        return
    import yaml

    click.echo(yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=110), nl=False)


def _print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    """Prints a listing as JSON or as an aligned table."""
    if as_json:
        _print_json(rows)
        return
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(cells[0]))]
    for row in cells:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _cell(value: Any) -> str:
    show: dict[type, Callable[[Any], str]] = {bool: lambda v: "yes" if v else "no", int: lambda v: f"{v:,}"}
    return "-" if value is None else show.get(type(value), str)(value)


def _fail(diagnostics: tuple[Diagnostic, ...], code: ExitCode) -> None:
    for diagnostic in diagnostics:
        click.echo(str(diagnostic), err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
