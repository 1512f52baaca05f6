"""Laws of the lint: it reads anything without an error of its own, says the same twice, and points into the files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memc.lint import Given, Linted, lint_path
from memc.lint.settings import TABLES, table
from memc.lint.words import ACCELERATE, ADAPTER, ARGUMENTS, DEEPSPEED, FSDP

ROOT = Path(__file__).parents[2]
FILES = (
    "ds_config.json",
    "accelerate.yaml",
    "args.yaml",
    "adapter_config.json",
    "fsdp.json",
    "config.json",
    "train.sh",
    "train.py",
    "requirements.txt",
    "job",
)
LOOSE = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

names = st.sampled_from(sorted({name for key in TABLES for name in table(key).names}))
paths = st.sampled_from([*DEEPSPEED, *ACCELERATE, *ARGUMENTS, *FSDP, *ADAPTER])
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(["auto", "no", "none", "nvme", "cpu", "bf16", "1e-4", "FULL_SHARD", "all-linear", "NaN", "-1"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=4)),
    max_leaves=12,
)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Draws a mapping with keys that readers know, at the places where they look for them, and values of any kind."""
    document: dict[str, Any] = {}
    for steps in draw(st.lists(paths, max_size=12)):
        section = document
        for step in steps[:-1]:
            inner = section.get(step)
            section[step] = inner if isinstance(inner, dict) else {}
            section = section[step]
        section[steps[-1]] = draw(values)
    return document | draw(st.dictionaries(names, values, max_size=4))


def linted(folder: Path, told: Given | None = None) -> Linted:
    """Returns what the lint says, having checked that it says it twice and about lines that are there."""
    found = lint_path(folder, told or Given())
    assert lint_path(folder, told or Given()).remarks == found.remarks
    for remark in found.remarks:
        assert remark.message
        assert remark.hint
        assert "\n" not in remark.message
        for place in (remark.place, *remark.others):
            lines = place.path.read_bytes().decode("utf-8-sig", "replace").replace("\r\n", "\n").count("\n") + 1
            assert 0 <= place.line <= lines + 1, place
    return found


def empty(folder: Path) -> None:
    for name in FILES:
        (folder / name).unlink(missing_ok=True)


@LOOSE
@given(
    ds=documents(),
    accelerate=documents(),
    arguments=documents(),
    adapter=documents(),
    gpu=st.sampled_from([None, "t4"]),
)
def test_any_values_at_known_keys_are_read(
    tmp_path: Path, ds: Any, accelerate: Any, arguments: Any, adapter: Any, gpu: str | None
) -> None:
    empty(tmp_path)
    (tmp_path / "ds_config.json").write_text(json.dumps(ds))
    (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump({"distributed_type": "DEEPSPEED", **accelerate}))
    (tmp_path / "args.yaml").write_text(yaml.safe_dump({"output_dir": "x", "num_train_epochs": 1, **arguments}))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **adapter}))
    linted(tmp_path, Given(gpu=gpu, gpus_per_node=8, nodes=2, model="Qwen/Qwen2.5-0.5B-Instruct"))


@LOOSE
@given(content=st.binary(max_size=400), name=st.sampled_from(FILES))
def test_any_bytes_are_passed_over(tmp_path: Path, content: bytes, name: str) -> None:
    empty(tmp_path)
    (tmp_path / name).write_bytes(content)
    linted(tmp_path)


def filled(form: str, *parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Returns lines of a form with its places filled."""
    return st.tuples(*parts).map(lambda texts: form.format(*texts))


short = st.text(max_size=8)
lines_of_files = st.one_of(
    st.text(max_size=30),
    filled("{}: {}", names, short),
    filled("accelerate launch --{} {} train.py --{}={}", names, short, names, short),
    filled("{}={}", st.sampled_from(["A", "export B", "CUDA_VISIBLE_DEVICES"]), short),
    filled("#SBATCH --{}={}", st.sampled_from(["nodes", "gres", "ntasks"]), short),
    filled("x = TrainingArguments({}={})", names, st.sampled_from(["1", "'a'", "f(", "x.y"])),
    st.sampled_from(["from transformers import TrainingArguments", "torchrun \\", "srun torchrun -m x", "<<: *a"]),
    st.just("a: &a [*a, *a]"),
)


@LOOSE
@given(lines=st.lists(lines_of_files, max_size=8), name=st.sampled_from(FILES))
def test_any_lines_are_read(tmp_path: Path, lines: list[str], name: str) -> None:
    empty(tmp_path)
    (tmp_path / name).write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
    linted(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        '{"zero_optimization":' * 3000 + "1" + "}" * 3000,
        "zero_optimization: " + "[" * 5000,
        "a: &a [x]\n"
        + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(20))
        + "train_batch_size: 1\nfp16: {}\n",
        '{"train_batch_size": NaN, "fp16": {"enabled": Infinity}, "gradient_accumulation_steps": -Infinity}',
        '{"train_batch_size": 1, "train_batch_size": 2, "zero_optimization": {"stage": 3, "stage": 2}}',
        "\ufefflearning_rate: 1e-4\r\nper_device_train_batch_size: 2\r\nwarmup_ratio: 0.1\r\n",
        "learning_rate: !!python/object/apply:os.system ['true']\nper_device_train_batch_size: 2\nsave_steps: 3\n",
        "learning_rate: " + "9" * 5000 + "\nper_device_train_batch_size: 1e999\nnum_train_epochs: -0\n",
        "? [a, b]\n: c\nlearning_rate: {}\nper_device_train_batch_size: []\nsave_steps: *x\n",
        "<<: {learning_rate: 1, per_device_train_batch_size: 2}\nsave_steps: 1\n",
        '{"zero_optimization": {"stage": "\ud83d\ude00"}, "train_batch_size": 1}',
        "train_batch_size: 1\nfp16: {enabled: true}\n" * 20000,
    ],
    ids=[
        "deep-json",
        "deep-yaml",
        "aliases",
        "nan",
        "repeated",
        "bom-crlf",
        "tag",
        "digits",
        "odd-keys",
        "merge",
        "pair",
        "many",
    ],
)
@pytest.mark.parametrize("name", ["ds_config.json", "accelerate.yaml"])
def test_what_parsers_choke_on(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    linted(tmp_path)


def test_large_and_special_files_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text('{"learning_rate": [' + "1," * 700_000 + "1]}")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    (tmp_path / "folder.json").mkdir()
    assert linted(tmp_path).documents == ()


@pytest.mark.parametrize("folder", sorted(ROOT.glob("examples/*/out")), ids=lambda path: path.parent.name)
def test_what_memc_writes_is_clean(folder: Path) -> None:
    found = linted(folder)
    assert len(found.documents) >= 4
    assert found.remarks == ()


def test_the_order_of_keys_decides_nothing(tmp_path: Path) -> None:
    document = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 3},
        "fp16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    (tmp_path / "args.yaml").write_text(
        "learning_rate: 2e-4\nper_device_train_batch_size: 2\nbf16: true\nsave_steps: 5\n"
    )
    said = set()
    keys = list(document)
    for seed in range(6):
        random.Random(seed).shuffle(keys)
        (tmp_path / "ds.json").write_text(json.dumps({key: document[key] for key in keys}))
        said.add(frozenset((remark.code, remark.message) for remark in linted(tmp_path).remarks))
    assert len(said) == 1
    assert {code for code, _ in next(iter(said))} >= {"files-disagree", "weights-not-gathered-on-save"}
