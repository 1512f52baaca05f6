"""`memc init`: a first spec, from options or a short dialogue."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from memc.commands.completion import complete_gpu, complete_model
from memc.config import Method, Task
from memc.errors import ExitCode, Location, MemcError, usage_error
from memc.units import GIB

_OPTIONS = (
    ("model", "model", "Model: a catalogue key, a hub id, a folder or a config.json."),
    ("task", "task", "sft or pretrain."),
    ("data", "data.train", "Training file: JSONL, JSON or Parquet."),
    ("eval", "data.eval", "Evaluation file."),
    ("max-length", "data.max_length", "Longest sequence in tokens."),
    ("packing", "data.packing", "true when several samples share one sequence."),
    ("samples", "data.samples", "Number of training samples, when the file is elsewhere."),
    ("mean-tokens", "data.mean_tokens", "Mean tokens per sample."),
    ("method", "method", "auto, full, lora, qlora, or several with commas in order of preference."),
    ("rank", "lora.rank", "Rank of the adapters."),
    ("epochs", "training.epochs", "Passes over the data."),
    ("max-steps", "training.max_steps", "Optimizer steps, instead of epochs."),
    ("global-batch-size", "training.global_batch_size", "Samples per optimizer step over all GPUs."),
    ("learning-rate", "training.learning_rate", "Peak learning rate."),
    ("gpu", "hardware.gpu", "Name of the GPU, as memc gpus lists it; this machine's when not given."),
    ("count", "hardware.count", "GPUs per node."),
    ("host-memory", "hardware.host_memory", "Memory of one node, for example 64GiB."),
    ("memory", "memory.target", "Memory of each GPU that the run may use, for example 22GiB, or auto."),
    ("budget", "time.budget", "Longest or dearest run: 24h, 3d, $40 or none."),
)
_QUESTIONS: tuple[tuple[str, str, str | None], ...] = (
    ("model", "Model (memc models lists the catalogue)", None),
    ("task", f"What is trained ({', '.join(Task)})", "sft"),
    ("data.train", "Training file", "data/train.jsonl"),
    ("data.max_length", "Longest sequence in tokens", "2048"),
    ("method", f"Which parameters train (auto, {', '.join(Method)})", "auto"),
    ("hardware.gpu", "GPU (memc gpus lists the catalogue)", None),
    ("hardware.count", "GPUs in the machine", "1"),
    ("hardware.host_memory", "Memory of the machine, for example 64GiB (none: nothing is offloaded)", "none"),
    ("memory.target", "GPU memory that may be used, for example 22GiB", "auto"),
    ("time.budget", "Longest or dearest run: 24h, 3d, $40", "none"),
)
_REQUIRED = ("model", "hardware.gpu")
_UNASKED_DEFAULTS: dict[str, Any] = {"data.train": "data/train.jsonl", "data.max_length": 2048}
_COMPLETIONS = {"model": complete_model, "gpu": complete_gpu}


def _add_options(function: Any) -> Any:
    for name, field, sentence in reversed(_OPTIONS):
        complete = _COMPLETIONS.get(name)
        function = click.option(f"--{name}", field.replace(".", "__"), help=sentence, shell_complete=complete)(function)
    return function


@click.command("init")
@click.argument("file", type=click.Path(path_type=Path), default=Path("spec.yaml"))
@_add_options
@click.option("--force", is_flag=True, help="Overwrite FILE when it is there already.")
@click.option("--no-detect", is_flag=True, help="Do not look at this machine's GPU and memory.")
def command(file: Path, force: bool, no_detect: bool, **options: str | None) -> None:
    """Write a commented spec to FILE (default: spec.yaml).

    Options fill it in; on a terminal, what they leave open is asked, each answer checked at once. The GPU, the number
    of GPUs and the memory of this machine are proposed when it has a GPU that the catalogue knows. FILE is never
    overwritten without --force.
    """
    from memc.starter import answer_value, checked

    _refuse_existing(file, force)
    values = {
        field.replace("__", "."): answer_value(field.replace("__", "."), text)
        for field, text in options.items()
        if text is not None
    }
    here = {} if no_detect else _this_machine(values)
    if any(field not in {**here, **values} for field in _REQUIRED) and sys.stdin.isatty():
        values = _ask(values, here, file.parent)
    values = {**_UNASKED_DEFAULTS, **here, **values}
    if "data.samples" in values and options.get("data__train") is None:
        values.pop("data.train")
    _require(values)
    loaded = checked(values, str(file), file.parent)
    _write(file, loaded.text, force)
    click.echo(f"created: {file}", err=True)
    for line in _next_steps(file, loaded.spec.data.train is not None):
        click.echo(line, err=True)


def _refuse_existing(file: Path, force: bool) -> None:
    """Raises when FILE is there and may not be overwritten."""
    if (file.exists() or file.is_symlink()) and (not force or not file.is_file()):
        what = "is there already" if file.is_file() else "is no plain file"
        hint = "name another file, or overwrite it with --force" if file.is_file() else "name another file"
        raise usage_error("would-overwrite", f"{file} {what}", where=Location(file=str(file)), hint=hint)


def _this_machine(values: dict[str, Any]) -> dict[str, Any]:
    """Returns GPU, count and memory of this machine, and says what it saw; nothing when another GPU was named."""
    from memc.machine import host_memory_bytes, local_gpus
    from memc.starter import catalogue_gpu

    gpus = local_gpus()
    if "hardware.gpu" in values or not gpus:
        return {}
    first = gpus[0].name
    known = catalogue_gpu(first)
    if known is None:
        message = f"this machine has {len(gpus)} x {first}, which the catalogue does not know under that name"
        click.echo(f"{message}; memc gpus lists what it knows", err=True)
        return {}
    same = sum(gpu.name == first for gpu in gpus)
    click.echo(f"this machine has {same} x {first}: {known.key}", err=True)
    found: dict[str, Any] = {"hardware.gpu": known.key, "hardware.count": same}
    host = host_memory_bytes()
    if host is not None and host >= GIB:
        found["hardware.host_memory"] = f"{host // GIB}GiB"
    return found


def _ask(values: dict[str, Any], here: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the values with everything that options left open asked for; wrong answers are told why, at once."""
    from memc.starter import answer_value, problems_of

    for field, question, default in _QUESTIONS:
        if field in values:
            continue
        proposed = here.get(field, default)
        while True:
            answer = click.prompt(question, default=None if proposed is None else str(proposed), err=True)
            if field == "hardware.host_memory" and answer == "none":
                break
            attempt = {**values, field: answer_value(field, answer)}
            problems = problems_of(field, attempt, folder)
            if not problems:
                values = attempt
                break
            for problem in problems:
                click.echo(f"{problem.message}" + (f"\n  {problem.hint}" if problem.hint else ""), err=True)
    return values


def _require(values: dict[str, Any]) -> None:
    names = {field: f"--{name}" for name, field, _ in _OPTIONS}
    missing = [names[field] for field in _REQUIRED if field not in values]
    are = "is" if len(missing) == 1 else "are"
    if missing:
        raise usage_error(
            "init-needs-more",
            f"{' and '.join(missing)} {are} not given, and there is no terminal to ask",
            hint="memc init --model KEY --gpu KEY; memc models and memc gpus list the keys",
        )


def _write(file: Path, text: str, force: bool) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if force:
            beside = file.with_name(f".{file.name}.{os.getpid()}")
            beside.write_text(text, encoding="utf-8", newline="\n")
            beside.replace(file)
        else:
            with file.open("x", encoding="utf-8", newline="\n") as stream:
                stream.write(text)
    except OSError as error:
        raise MemcError(
            usage_error(
                "cannot-write",
                f"{file} cannot be written: {error.strerror or error}",
                where=Location(file=str(file)),
                hint="name a file that you may write",
            ).diagnostics,
            ExitCode.USAGE,
        ) from error


def _next_steps(file: Path, has_file: bool) -> list[str]:
    name = shlex.quote(str(file))
    steps = [f"next: memc explain {name}   shows whether it fits, where the peak is and how long it takes"]
    if has_file:
        steps.append(f"      memc compile {name}   writes the launch files to out/ beside it")
    else:
        steps.append("      name data.train in it before memc compile, which writes the launch files")
    return steps
