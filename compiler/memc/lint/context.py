"""What the lint knows besides the files: versions, the card, the model, how many processes there should be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from memc.errors import MemcError
from memc.facts import load_gpu, load_model
from memc.facts.models import model_from_config
from memc.facts.records import GpuFacts, ModelFacts
from memc.lint.records import Document, Kind
from memc.lint.requirements import Version
from memc.lint.statements import Statements


@dataclass(frozen=True, kw_only=True)
class Given:
    """What the person who asks says besides the files.

    Attributes:
        versions: Version by package, over whatever a requirements file asks for.
        gpu: Name of the card; None when nothing is said.
        model: The model, or its name or folder; None when the files decide.
        gpus_per_node, nodes: What there is; None when nothing is said.
        told: Where that comes from, for sentences (``spec.yaml``).
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    gpu: str | None = None
    model: str | ModelFacts | None = None
    gpus_per_node: int | None = None
    nodes: int | None = None
    told: str = "the options"


@dataclass(frozen=True, kw_only=True)
class Context:
    """What one run is judged by.

    Attributes:
        statements: What its files state.
        versions: Version of each package that counts.
        given: What was said besides.
        gpu: The card; None when unknown.
        model: The model; None when no file names one that is known.
    """

    statements: Statements
    versions: Mapping[str, Version]
    given: Given
    gpu: GpuFacts | None
    model: ModelFacts | None

    @property
    def plain_versions(self) -> dict[str, str]:
        """Version by package, as rules want them."""
        return {name: version.text for name, version in self.versions.items()}


def context_of(statements: Statements, versions: Mapping[str, Version], given: Given, root: Path) -> Context:
    """Returns what a run is judged by.

    Raises:
        MemcError: ``gpu-unknown`` or ``gpu-ambiguous`` when a card is given that is not in the catalogue.
    """
    gpu = None if given.gpu is None else load_gpu(given.gpu)
    return Context(
        statements=statements, versions=versions, given=given, gpu=gpu, model=_model(statements, given, root)
    )


def _model(statements: Statements, given: Given, root: Path) -> ModelFacts | None:
    """Returns the model that is given, or the first one that the files name and memc knows."""
    if isinstance(given.model, ModelFacts):
        return given.model
    named = [given.model] if given.model is not None else []
    named += [str(stated.value) for stated in statements.all("model") if isinstance(stated.value, str)]
    for name in named:
        found = _load(name, root)
        if found is not None:
            return found
    configs: Sequence[Document] = statements.of(Kind.MODEL)
    for document in configs:
        value = document.node.value
        try:
            if isinstance(value, dict):
                return model_from_config(
                    value,
                    key=document.path.parent.name or "model",
                    file=str(document.path),
                    source=str(document.path),
                    checked="",
                )
        except (MemcError, ValueError, TypeError, KeyError, ArithmeticError, AttributeError):
            continue
    return None


def _load(name: str, root: Path) -> ModelFacts | None:
    if not name or len(name) > 512 or "\0" in name:
        return None
    try:
        return load_model(name, base_dir=root)
    except (MemcError, OSError, ValueError, TypeError, KeyError, ArithmeticError, AttributeError):
        return None
