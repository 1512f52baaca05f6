"""The modules of a causal language model that have a row for every token, by the names that PEFT finds them by."""

from __future__ import annotations

from dataclasses import dataclass

from memc.facts.documents import read_spec


@dataclass(frozen=True, kw_only=True)
class VocabularyModules:
    """Names of the modules with a row for every token.

    Attributes:
        embedding: The input embedding.
        head: The output head.
    """

    embedding: str
    head: str


def vocabulary_modules(model_type: str) -> VocabularyModules:
    """Returns the names of a family's input embedding and output head."""
    record = read_spec("heads", "vocabulary")
    return VocabularyModules(**record["families"].get(model_type, record["default"]))
