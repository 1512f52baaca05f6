"""Models that sort texts into classes: their elements are those of the real class, their memory that of the trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trace_cases import config

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from memc.config import Attention, LossHead, TrainingConfig
from memc.config import Task as Work
from memc.facts.classifiers import as_classifier, classifier_families, classifier_head
from memc.facts.gpus import load_gpu
from memc.facts.models import load_model, load_model_config, model_from_config
from memc.ledger.constants import ledger_facts
from memc.ledger.estimate import Estimator
from memc.trace import trace_step

WORST = 0.02
CLASSES = 5
NAMED = (
    "google-bert/bert-base-uncased",
    "FacebookAI/roberta-base",
    "microsoft/deberta-v3-base",
    "answerdotai/ModernBERT-base",
    "Qwen/Qwen2.5-0.5B",
    "google/gemma-2-2b",
)


def _config_of(name: str) -> Any:
    fields = dict(load_model_config(name, base_dir=Path()))
    settings = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    settings.num_labels = CLASSES
    return settings


@pytest.mark.parametrize("name", NAMED)
def test_elements_and_modules_are_those_of_the_real_class(name: str) -> None:
    described = as_classifier(load_model(name, base_dir=Path()), CLASSES)
    with torch.device("meta"):
        real = transformers.AutoModelForSequenceClassification.from_config(_config_of(name))
    assert type(real).__name__ == described.architecture
    assert sum(parameter.numel() for parameter in real.parameters()) == described.total_params
    modules = {part for path, _ in real.named_modules() for part in path.split(".")}
    assert set(classifier_head(described.model_type).trained) <= modules


def test_every_described_family_has_such_a_class() -> None:
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    assert [family for family in classifier_families() if family not in mapping] == []


def _settings(**changes: Any) -> TrainingConfig:
    plain = config(**{"length": 128, "batch": 8, "mask": True, **changes})
    return replace(plain, task=Work.CLASSIFICATION, classes=CLASSES, loss=LossHead.PLAIN)


TRACED = (
    "google-bert/bert-base-uncased",
    "FacebookAI/roberta-base",
    "microsoft/deberta-v3-base",
    "Qwen/Qwen2.5-0.5B",
)


@pytest.mark.parametrize("name", TRACED)
@pytest.mark.parametrize("changes", [{}, {"checkpoint_every": 1}], ids=["full", "checkpointed"])
def test_allocated_peak_is_that_of_the_trace(name: str, changes: dict[str, Any]) -> None:
    settings, fields = _settings(**changes), load_model_config(name, base_dir=Path())
    facts = model_from_config(fields, key="case", file="config.json", source="test", checked="2026-01-01")
    only_eager = facts.groups[0].block.attention.eager_only
    settings = replace(settings, attention=Attention.EAGER if only_eager else Attention.SDPA)
    bill = Estimator(as_classifier(facts, CLASSES), ledger_facts(load_gpu("a100-sxm4-80gb"))).price(settings)
    gpu = bill.ledger().gpu
    cublas = sum(entry.bytes for entry in gpu.entries if entry.in_allocator and "cublas" in entry.name)
    assert gpu.peak_allocated_bytes - cublas == pytest.approx(
        trace_step(settings, fields).peak_allocated_bytes, rel=WORST
    )
