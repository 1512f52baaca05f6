"""`memc completion`: the script that completes memc's commands, options, files and catalogue keys in a shell."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem, get_completion_class

_SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_MEMC_COMPLETE"


@click.command("completion")
@click.argument("shell", type=click.Choice(_SHELLS))
def command(shell: str) -> None:
    """Print the completion script of SHELL.

    It completes commands, options, files, GPU keys after `memc gpus` and model keys after `memc models`. Switch it on
    with eval "$(memc completion bash)" in ~/.bashrc, eval "$(memc completion zsh)" in ~/.zshrc, or
    memc completion fish > ~/.config/fish/completions/memc.fish.
    """
    root = click.get_current_context().find_root()
    made = get_completion_class(shell)
    assert made is not None
    click.echo(made(root.command, {}, root.info_name or "memc", _VARIABLE).source())


def complete_gpu(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Returns the GPU keys of the catalogue that begin with what was typed."""
    from memc.facts import gpu_keys

    return _beginning_with(incomplete, gpu_keys())


def complete_model(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Returns the model keys of the catalogue that begin with what was typed, in any case."""
    from memc.facts import model_keys

    return _beginning_with(incomplete, model_keys())


def complete_symptom(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Returns the symptoms that `memc diagnose` knows by name."""
    from memc.diagnose.symptoms import SYMPTOMS

    return _beginning_with(incomplete, (*SYMPTOMS, "list"))


def _beginning_with(incomplete: str, names: tuple[str, ...]) -> list[CompletionItem]:
    typed = incomplete.casefold()
    return [CompletionItem(name) for name in names if name.casefold().startswith(typed)]
