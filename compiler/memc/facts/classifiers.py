"""A model that sorts texts into classes: the layers of another one, with a head of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from memc.errors import usage_error
from memc.facts.architectures import Names
from memc.facts.blocks import build_linears, build_norms
from memc.facts.documents import read_spec
from memc.facts.programs import program_text
from memc.facts.records import ModelFacts, Objective

_FOLDER, _FILE, _DECODER = "heads", "classification", "decoder"


@dataclass(frozen=True, kw_only=True)
class ClassifierHead:
    """What a script must know of a head for classes.

    Attributes:
        trained: Modules that a checkpoint of the base model does not have, trained whole beside adapters too.
        unused: Modules of such a checkpoint that have no place in the classifier.
    """

    trained: tuple[str, ...]
    unused: tuple[str, ...]


def classifier_families() -> tuple[str, ...]:
    """Returns the `model_type`s that have a head for classes, sorted."""
    heads = read_spec(_FOLDER, _FILE)["heads"]
    return tuple(sorted({*heads, *heads[_DECODER]["families"]} - {_DECODER}))


def classifier_head(model_type: str) -> ClassifierHead:
    """Returns what a script must know of a family's head.

    Raises:
        MemcError: ``no-classifier`` when the family has none.
    """
    head = _head(model_type)
    return ClassifierHead(trained=tuple(head["trained"]), unused=tuple(head["unused"]))


def as_classifier(model: ModelFacts, labels: int) -> ModelFacts:
    """Returns a model with its head replaced by one for `labels` classes.

    Assumes: one number of `labels` classes per text; ModernBERT takes the mean of the tokens or, at the same cost but
        for one product, the first.
    Source: the modelling file that the head's record names.

    Raises:
        MemcError: ``no-classifier`` when the family has none.
    """
    head = _head(model.model_type)
    sizes = {"hidden": model.hidden_size, "labels": labels}
    block = dict(model.groups[0].block.sizes)
    names = Names(sizes={**block, **sizes}, switches={})
    own = [{"component": "head", "reads": "attention_input", **entry} for entry in head["linears"]]
    kept = tuple(norm for norm in model.outer_norms if norm.name in head.get("kept_norms", ()))
    tail = program_text(head["tail"], "tail")
    return replace(
        model,
        architecture=head["class"] or model.architecture.replace("ForCausalLM", "ForSequenceClassification"),
        auto_class="AutoModelForSequenceClassification",
        objective=Objective.CLASSIFICATION,
        # trained whole beside adapters, so that none is put on them
        outer_linears=tuple(replace(linear, adaptable=False) for linear in build_linears(own, names)),
        outer_norms=(*kept, *build_norms(head.get("norms", ()), names)),
        head_params=0,
        tied=False,
        head_bias=False,
        logit_softcap=None,
        tail=tail,
        tail_sizes=tuple(sorted({**block, **sizes}.items())),
    )


def _head(model_type: str) -> Mapping[str, Any]:
    heads: Mapping[str, Any] = read_spec(_FOLDER, _FILE)["heads"]
    name = _DECODER if model_type in heads[_DECODER]["families"] else model_type
    if name not in heads or model_type == _DECODER:
        raise usage_error(
            "no-classifier",
            f"no head for classes is described for model_type {model_type!r}",
            hint=f"choose a model of one of {', '.join(classifier_families())}",
        )
    found: Mapping[str, Any] = heads[name]
    return found
