"""Releases of libraries: those a folder is planned for, which memc knows, and what is broken in one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from memc.config import TrainingConfig
from memc.errors import Diagnostic
from memc.facts import GpuFacts, load_fact
from memc.facts.builds import torch_build
from memc.ladder import LADDER
from memc.ladder.technique import Situation
from memc.rules import Rule, Severity, broken_rules, facts_of, message
from memc.rules.records import in_range
from memc.spec import LoadedSpec

_PACKAGES = ("torch", "transformers", "accelerate", "peft", "trl", "deepspeed", "bitsandbytes", "datasets")


class PlannedVersions(Mapping[str, str]):
    """The release of each package that a folder is planned for; a fact is read only when a rule asks for it."""

    def __init__(self, named: Mapping[str, str] | None = None) -> None:
        self._named = named or {}

    def __getitem__(self, name: str) -> str:
        if name not in _PACKAGES:
            raise KeyError(name)
        return self._named.get(name) or str(load_fact(f"stack.{name}").value)

    def __contains__(self, name: object) -> bool:
        return name in _PACKAGES

    def __iter__(self) -> Iterator[str]:
        return iter(_PACKAGES)

    def __len__(self) -> int:
        return len(_PACKAGES)


def unknown_releases(loaded: LoadedSpec) -> list[Diagnostic]:
    """Returns a diagnostic for each release that is outside of what memc knows of its package."""
    found = []
    for package, release in loaded.spec.libraries.named.items():
        known = str(load_fact(f"stack.{package}_known").value)
        if not in_range(release, known):
            tested = load_fact(f"stack.{package}").value
            text = f"{package} {release} is outside of what memc knows, {known}: its names and defaults were not read"
            hint = f"write a release in {known}, or remove the line to plan with {tested}"
            found.append(loaded.diagnostic(f"libraries.{package}", "library-unknown", text, hint))
    return found


def builds_without_card(loaded: LoadedSpec, gpu: GpuFacts) -> list[Diagnostic]:
    """Returns a diagnostic where the release of torch that the spec names was not built for its card."""
    build, named = torch_build(gpu), loaded.spec.libraries.torch
    if build is None or named is None or not build.releases or in_range(named, build.releases):
        return []
    text = f"torch {named} has no build for {gpu.name}: {build.reason}, and {build.tag} is built of {build.releases}"
    hint = f"write a release in {build.releases}, or remove the line"
    return [loaded.diagnostic("libraries.torch", "library-lacks-card", text, hint)]


def library_notes(loaded: LoadedSpec, gpu: GpuFacts) -> list[str]:
    """Returns sentences: on the build of torch that the card needs, on releases with which nothing was run."""
    build = torch_build(gpu)
    needed = [] if build is None else [f"{build.reason}: requirements.txt takes the {build.tag} build of {build.index}"]
    return [*needed, *_untried(loaded)]


def _untried(loaded: LoadedSpec) -> list[str]:
    """Returns a sentence for the releases whose names were read, but with which nothing was run."""
    untried = [
        f"{package} {release}"
        for package, release in loaded.spec.libraries.named.items()
        if not in_range(release, str(load_fact(f"stack.{package}_range").value))
    ]
    if not untried:
        return []
    return [f"bytes are those of the releases memc plans with; names and defaults follow {', '.join(untried)}"]


def broken_techniques(loaded: LoadedSpec, asked: TrainingConfig, situation: Situation) -> dict[str, str]:
    """Returns the techniques that a release named in the spec does not do right, each with what is wrong."""
    named = loaded.spec.libraries.named
    if not named:
        return {}
    versions, found = PlannedVersions(named), {}
    for technique in LADDER:
        for start in (asked, replace(asked, checkpoint_every=1)):
            if technique.why_not(start, situation) is None:
                after = technique.apply(start, situation)
                before, rules = (_broken(config, situation, versions) for config in (start, after))
                new = next((rule for rule in rules if rule not in before), None)
                if new is not None:
                    found[technique.name] = _said(new, after, situation, versions)
    return found


def broken_notes(broken: Mapping[str, str]) -> list[str]:
    """Returns one sentence for each thing that is wrong, with the techniques that it rules out."""
    return [
        f"{wrong}: rules out {', '.join(name for name, said in broken.items() if said == wrong)}"
        for wrong in dict.fromkeys(broken.values())
    ]


def _broken(config: TrainingConfig, situation: Situation, versions: Mapping[str, str]) -> list[Rule]:
    values = facts_of(config, situation.model, situation.gpu)
    return [rule for rule in broken_rules(values, versions, (Severity.ERROR,)) if rule.versions]


def _said(rule: Rule, config: TrainingConfig, situation: Situation, versions: Mapping[str, str]) -> str:
    releases = " and ".join(f"{name} {versions[name]}" for name in rule.versions)
    return f"{releases}: {message(rule, facts_of(config, situation.model, situation.gpu))} ({rule.id})"
