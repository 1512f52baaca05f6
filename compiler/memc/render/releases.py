"""What arguments are called in the releases that a folder is planned for."""

from __future__ import annotations

from typing import Any

from memc.facts import load_fact
from memc.facts.builds import torch_build
from memc.plan import Plan, RunSettings
from memc.rules.records import in_range, release_of

_PACKAGES = ("torch", "transformers", "accelerate", "peft", "trl", "deepspeed", "bitsandbytes", "datasets")


def release(run: RunSettings, package: str) -> str:
    """Returns the release of a package: the one that the spec names, else the one that memc plans with."""
    return dict(run.libraries).get(package) or str(load_fact(f"stack.{package}").value)


def argument_branches(run: RunSettings) -> dict[str, Any]:
    """Returns how the trainer's arguments are spelt in the release of transformers."""
    transformers = release_of(release(run, "transformers"))

    def since(name: str) -> bool:
        return transformers >= release_of(str(load_fact(f"transformers.{name}_since").value))

    return {
        "checkpointing": "activation_checkpointing" if since("activation_checkpointing") else "gradient_checkpointing",
        "layers_apart": since("activation_checkpointing"),
        "use_cache_argument": since("use_cache_argument"),
        "sampling_argument": since("sampling_argument"),
        "warmup_argument": "warmup_steps" if since("warmup_share") else "warmup_ratio",
    }


def requirements(plan: Plan) -> dict[str, str]:
    """Returns what requirements.txt asks for of each package: the release that the spec names, else a range.

    For a card that the build of torch of PyPI does not run on, one release of the build that does: of a range, pip
    could take a later release of PyPI instead.
    """
    named = dict(plan.run.libraries)
    asked = {package: f"=={named[package]}" if package in named else _range(package, named) for package in _PACKAGES}
    build = torch_build(plan.gpu)
    return asked if build is None else asked | {"torch": f"=={release(plan.run, 'torch')}+{build.tag}"}


def _range(package: str, named: dict[str, str]) -> str:
    """Returns the range of a package that the spec does not name.

    An older transformers keeps to older releases of datasets, which share its hub client; pip finds one.
    """
    tried = str(load_fact(f"stack.{package}_range").value)
    older = "transformers" in named and not in_range(
        named["transformers"], str(load_fact("stack.transformers_range").value)
    )
    return str(load_fact(f"stack.{package}_known").value) if older and package == "datasets" else tried
