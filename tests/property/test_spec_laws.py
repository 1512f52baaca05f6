"""Laws of the spec: junk is refused in words, and what is valid survives its canonical form."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from memc.config import Attention, Offload, Optimizer, Precision
from memc.errors import ExitCode, MemcError
from memc.spec import LoadedSpec, LrScheduler, Objective, Spec, parse_spec

KEYS = sorted(
    set(Spec.model_fields)
    | {inner for info in Spec.model_fields.values() for inner in getattr(info.annotation, "model_fields", {})}
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["auto", "none", "22GiB", "24h", "$40", "cpu", "lora", "full", "yes", "1:30", "attention"])
)
JUNK = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=8), inner, max_size=6)
    ),
    max_leaves=25,
)
# What a name or path may hold: everything but control characters (new line and tab are allowed) and surrogates.
CHARACTERS = st.characters(exclude_categories=("Cc", "Cs"), include_characters="\n\t")
# PyYAML writes 1E5 without quotes, which YAML 1.2, and so memc, reads as a number.
TEXT = st.text(CHARACTERS, min_size=1, max_size=30).filter(lambda text: text.strip(" \n\t.+-_eE0123456789"))


def read(text: str) -> LoadedSpec | None:
    """Returns the spec; None when it is refused, which must happen in words and with exit code 2."""
    try:
        return parse_spec(text, "spec.yaml")
    except MemcError as error:
        assert error.exit_code is ExitCode.USAGE
        assert error.diagnostics
        for diagnostic in error.diagnostics:
            assert diagnostic.code.startswith("spec-")
            assert diagnostic.code != "spec-invalid"
            assert diagnostic.hint
            assert diagnostic.where is not None
            assert all(char.isprintable() or char == "\n" for char in str(diagnostic))
        return None


@given(st.dictionaries(st.sampled_from(sorted(Spec.model_fields)) | st.text(max_size=8), JUNK, max_size=8))
@settings(max_examples=120, deadline=None)
def test_any_mapping_is_read_or_refused_in_words(junk: dict[str, Any]) -> None:
    read(yaml.safe_dump(junk, allow_unicode=True))


@given(st.text(st.sampled_from("ab:-?[]{}&*!|>'\"%@`#,\\ \n\t0x1e.~<=\ufeff\u2028\x00\x85é😀"), max_size=60))
@settings(max_examples=250, deadline=None)
def test_any_text_is_read_or_refused_in_words(text: str) -> None:
    read(text)


def optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


SIZES = st.integers(1, 10**6).map(lambda number: f"{number} MiB") | st.floats(0.5, 900).map(lambda gib: f"{gib:.3f}GiB")
MODULES = st.sampled_from(["attention", "all-linear"]) | st.lists(TEXT, min_size=1, max_size=4, unique=True)
VALID = st.fixed_dictionaries(
    {
        "model": TEXT,
        "data": st.fixed_dictionaries(
            {"train": TEXT, "max_length": st.integers(100, 10**6)},
            optional={
                "eval": TEXT,
                "packing": st.booleans(),
                "samples": st.integers(1, 10**9),
                "mean_tokens": st.integers(1, 100),
            },
        ),
        "hardware": st.fixed_dictionaries(
            {"gpu": TEXT}, optional={"host_memory": SIZES, "nvme": SIZES, "usd_per_gpu_hour": st.floats(0, 99)}
        ),
    },
    optional={
        "task": st.sampled_from(["sft", "pretrain"]),
        "method": st.sampled_from(["auto", "lora", "qlora"]) | st.permutations(["full", "lora", "qlora"]),
        "lora": optional(rank=st.integers(1, 512), dropout=st.floats(0, 0.5), target_modules=MODULES),
        "training": optional(
            epochs=st.floats(0.01, 100),
            global_batch_size=st.integers(1, 4096),
            learning_rate=st.floats(1e-8, 1),
            lr_scheduler=st.sampled_from([str(name) for name in LrScheduler]),
            output_dir=TEXT,
        )
        | optional(max_steps=st.integers(1, 10**6), seed=st.integers(0, 2**32 - 1)),
        "memory": optional(target=SIZES | st.just("auto")),
        "time": optional(budget=st.sampled_from(["none", "24h", "1.5d", "90min", "$40", "$ 12.25", "0.001s"])),
        "objective": st.sampled_from([str(name) for name in Objective]),
        "ladder": optional(require=st.lists(st.sampled_from(["a", "b"]), unique=True), forbid=st.just(["c"])),
        "pin": optional(
            precision=st.sampled_from([str(name) for name in Precision]),
            attention=st.sampled_from([str(name) for name in Attention]),
            optimizer=st.sampled_from([str(name) for name in Optimizer]),
            offload_optimizer=st.sampled_from([str(name) for name in Offload]),
            activation_checkpointing=st.booleans() | st.integers(0, 99),
            reduce_bucket_size=st.integers(0, 10**10) | st.just(5e8),
            overlap_comm=st.booleans(),
        ),
    },
)


@given(VALID, st.booleans())
@settings(max_examples=80, deadline=None)
def test_valid_specs_survive_their_canonical_form(values: dict[str, Any], flow: bool) -> None:
    text = yaml.safe_dump(values, default_flow_style=flow, allow_unicode=True, sort_keys=False)
    loaded = parse_spec(text, "spec.yaml")
    assert loaded.spec.model == values["model"]
    assert loaded.spec.data.train == values["data"]["train"]
    again = parse_spec(loaded.spec.canonical_json(), "again.json").spec
    assert again == loaded.spec
    assert again.digest() == loaded.spec.digest()
    assert again.canonical_json() == loaded.spec.canonical_json()
    wordy = parse_spec(yaml.safe_dump(loaded.spec.resolved()), "resolved.yaml").spec
    assert wordy.digest() == loaded.spec.digest()


@given(VALID)
@settings(max_examples=20, deadline=None)
def test_a_spec_cannot_be_changed(values: dict[str, Any]) -> None:
    spec = parse_spec(yaml.safe_dump(values), "spec.yaml").spec
    with pytest.raises(ValueError, match="frozen"):
        spec.data.max_length = 1  # type: ignore[misc]
