"""Releases of libraries that a spec names: which are known, what is broken in them, how names follow them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from memc import driver
from memc.config import Engine, Method, Task, TrainingConfig
from memc.errors import MemcError
from memc.facts import load_fact
from memc.lint.settings import table
from memc.plan import Infeasible, Plan
from memc.render import render
from memc.render.releases import argument_branches, requirements
from memc.rules.records import in_range
from planmaker import make_config, make_plan, make_run


def answered(tmp_path: Path, libraries: dict[str, Any], **fields: Any) -> Plan | Infeasible:
    spec: dict[str, Any] = {
        "model": "HuggingFaceTB/SmolLM2-135M",
        "method": "full",
        "data": {"samples": 1000, "max_length": 512},
        "hardware": {"gpu": "rtx-4090", "count": 2},
        "libraries": libraries,
    }
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(spec | fields), encoding="utf-8")
    return driver.answer(path).result


@pytest.mark.parametrize(
    ("libraries", "code", "words"),
    [
        ({"transformers": "4.40.0"}, "library-unknown", "transformers 4.40.0 is outside of what memc knows, >=4.57,<6"),
        ({"deepspeed": "0.20.1"}, "library-unknown", "deepspeed 0.20.1 is outside of what memc knows, >=0.17.6,<0.20"),
        ({"deepspeed": 0.18}, "spec-version", "must be one release as text, got the number 0.18"),
        ({"deepspeed": ">=0.18"}, "spec-version", "must be one release as text"),
        ({"torch": True}, "spec-version", "must be one release as text"),
        ({"deepsped": "0.18.2"}, "spec-unknown-key", "deepspeed"),
    ],
)
def test_releases_that_are_none_or_unknown_are_refused(
    tmp_path: Path, libraries: dict[str, Any], code: str, words: str
) -> None:
    with pytest.raises(MemcError) as caught:
        answered(tmp_path, libraries)
    assert [item.code for item in caught.value.diagnostics] == [code]
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("libraries", "fields", "rule"),
    [
        ({"deepspeed": "0.18.2"}, {"pin": {"zero_stage": 2}}, "zero-2-gradients-too-small"),
        ({"deepspeed": "0.19.2"}, {"pin": {"zero_stage": 2}}, "zero-2-gradients-of-reused-modules"),
        ({"deepspeed": "0.18.2"}, {"pin": {"bf16_optimizer_states": True}}, "bf16-states-are-new"),
        (
            {"transformers": "4.57.6"},
            {"pin": {"activation_checkpointing": 2}},
            "checkpoints-of-every-kth-layer-are-new",
        ),
    ],
)
def test_what_is_broken_in_a_release_is_refused(
    tmp_path: Path, libraries: dict[str, Any], fields: dict[str, Any], rule: str
) -> None:
    with pytest.raises(MemcError, match=rule):
        answered(tmp_path, libraries, **fields)
    answered(tmp_path, {}, **fields)


def test_techniques_that_are_broken_in_a_release_are_not_chosen(tmp_path: Path) -> None:
    """ZeRO-2 is asked for by name; with a release that scales its gradients wrongly nothing is left to choose."""
    asked = {"ladder": {"require": ["zero-2"]}}
    fine = answered(tmp_path, {}, **asked)
    assert isinstance(fine, Plan)
    assert fine.config.zero_stage == 2
    assert isinstance(answered(tmp_path, {"deepspeed": "0.18.2"}, **asked), Infeasible)
    free = answered(tmp_path, {"deepspeed": "0.18.2"})
    assert isinstance(free, Plan)
    assert any("zero-2-gradients-too-small" in warning and "rules out zero-2" in warning for warning in free.warnings)
    assert free.run.libraries == (("deepspeed", "0.18.2"),)


def test_a_release_that_may_load_experts_at_random_is_warned_of(tmp_path: Path) -> None:
    fields = {"model": "Qwen/Qwen3-30B-A3B", "method": "lora", "pin": {"zero_stage": 3}}
    hardware = {"gpu": "h100-sxm5-80gb", "count": 8}
    for release, warned in (("5.3", True), ("5.24.0", False)):
        plan = answered(tmp_path, {"transformers": release}, **fields, hardware=hardware)
        assert isinstance(plan, Plan)
        assert any("zero-3-loads-fused-experts-at-random" in warning for warning in plan.warnings) is warned


CONFIGS: dict[str, TrainingConfig] = {
    "sft": make_config(),
    "pretrain": make_config(task=Task.PRETRAIN, method=Method.FULL),
    "fsdp": make_config(engine=Engine.FSDP, method=Method.FULL),
    "ddp": make_config(engine=Engine.DDP),
}
RELEASES = [
    version
    for version in table("training-arguments").versions
    if in_range(version, str(load_fact("stack.transformers_known").value))
]


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_emitted_argument_is_known_in_the_release(version: str, name: str) -> None:
    plan = make_plan(CONFIGS[name], make_run(libraries=(("transformers", version),)))
    files = render(plan, spec_name="s", command="c")
    text = files["train.py"].partition("def build_arguments(")[2].partition("\n    )\n")[0]
    names = re.findall(r"^        (\w+)=", text, re.M)
    assert len(names) > 40
    known = {*table("training-arguments").known(version)}
    if CONFIGS[name].task is Task.SFT:
        known |= {*table("sft-config").known(str(load_fact("stack.trl").value))}
    assert not set(names) - known
    assert f"transformers=={version}\n" in files["requirements.txt"]


def test_names_follow_the_release() -> None:
    new, old = (argument_branches(make_run(libraries=found)) for found in ((), (("transformers", "4.57.6"),)))
    assert (new["checkpointing"], new["warmup_argument"]) == ("activation_checkpointing", "warmup_steps")
    assert (old["checkpointing"], old["warmup_argument"]) == ("gradient_checkpointing", "warmup_ratio")
    assert (new["layers_apart"], old["layers_apart"], old["use_cache_argument"]) == (True, False, False)


def test_requirements_name_the_release_and_ranges_of_the_others() -> None:
    asked = requirements(make_plan(run=make_run(libraries=(("transformers", "4.57.6"),))))
    assert asked["transformers"] == "==4.57.6"
    assert asked["datasets"] == load_fact("stack.datasets_known").value
    assert requirements(make_plan())["datasets"] == load_fact("stack.datasets_range").value
    for package in asked:
        tested, known = load_fact(f"stack.{package}").value, str(load_fact(f"stack.{package}_known").value)
        assert in_range(str(tested), str(load_fact(f"stack.{package}_range").value))
        assert in_range(str(tested), known)
    assert replace(make_run(), libraries=()) == make_run()


def test_cards_that_the_build_of_the_index_leaves_out_get_one_that_runs(tmp_path: Path) -> None:
    release = load_fact("stack.torch").value
    for card, tag, named in (
        ("v100-sxm2-32gb", "cu126", {}),
        ("mi300x", "rocm7.2", {}),
        ("v100-sxm2-32gb", "cu126", {"torch": "2.14.1"}),
    ):
        plan = answered(tmp_path, named, hardware={"gpu": card})
        assert isinstance(plan, Plan)
        lines = render(plan, spec_name="s.yaml", command="c")["requirements.txt"].splitlines()
        assert f"torch=={named.get('torch', release)}+{tag}" in lines
        assert f"--extra-index-url https://download.pytorch.org/whl/{tag}" in lines
        assert any(f"requirements.txt takes the {tag} build" in line for line in plan.warnings)
    plan = answered(tmp_path, {}, hardware={"gpu": "t4"})  # compute capability 7.5, where the build of PyPI begins
    assert isinstance(plan, Plan)
    assert "--extra-index-url" not in render(plan, spec_name="s.yaml", command="c")["requirements.txt"]
    assert not any("requirements.txt" in line for line in plan.warnings)


def test_a_release_of_torch_without_the_card_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MemcError) as refused:
        answered(tmp_path, {"torch": "2.15.0"}, hardware={"gpu": "v100-sxm2-32gb"})
    (found,) = refused.value.diagnostics
    assert found.code == "library-lacks-card"
    assert "torch from PyPI begins with compute capability 7.5, and Tesla V100-SXM2-32GB has 7.0" in found.message
    assert isinstance(answered(tmp_path, {"torch": "2.15.0"}), Plan)
