"""Combinations that bite: each rule holds where it should and nowhere near, and what memc writes keeps to it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import yaml
from memc.config import (
    AdapterPrecision,
    Attention,
    Engine,
    FsdpConfig,
    LossHead,
    Method,
    Offload,
    Optimizer,
    Precision,
    Reference,
    Task,
    TrainingConfig,
)
from memc.errors import MemcError
from memc.facts import Component, Tensor
from memc.facts.records import BlockGroup, ModelFacts
from memc.render import render
from memc.rules import Severity, broken_rules, facts_of, load_rules, message
from memc.rules.records import in_range
from memc.solver.releases import PlannedVersions
from planmaker import make_config, make_gpu, make_lora, make_model, make_plan, make_zero
from planspecs import answer_to, machine_of, plan_of, spec_text

PLANNED = dict(PlannedVersions())
_ZERO2 = make_config(engine=Engine.DEEPSPEED, stage=2, method=Method.FULL)
_FSDP = make_config(engine=Engine.FSDP, method=Method.FULL)
_QLORA_FSDP = make_config(engine=Engine.FSDP, method=Method.QLORA)


def _zero(stage: int, method: Method = Method.FULL, **changes: Any) -> TrainingConfig:
    return make_config(engine=Engine.DEEPSPEED, method=method, zero=make_zero(stage, **changes))


# For each rule: a configuration that breaks it, one next to it that does not, and facts or versions that matter.
CASES: dict[str, tuple[TrainingConfig, TrainingConfig, dict[str, Any]]] = {
    "sharding-over-one-rank": (
        replace(_ZERO2, gpus_per_node=1),
        replace(_zero(2, offload_optimizer=Offload.CPU), gpus_per_node=1),
        {},
    ),
    "qlora-under-zero-3": (_zero(3, Method.QLORA), _zero(2, Method.QLORA), {}),
    "qlora-under-fsdp-needs-float-storage": (_QLORA_FSDP, make_config(engine=Engine.FSDP), {}),
    "qlora-under-fsdp-loads-whole": (_QLORA_FSDP, make_config(engine=Engine.DDP, method=Method.QLORA), {}),
    "qlora-under-fsdp-offload": (replace(_QLORA_FSDP, fsdp=FsdpConfig(offload=Offload.CPU)), _QLORA_FSDP, {}),
    "fused-experts-stay-16-bit": (
        make_config(method=Method.QLORA),
        make_config(method=Method.LORA),
        {"experts": True},
    ),
    "checkpointed-adapters-need-input-gradients": (make_config(), make_config(checkpoint_every=0), {}),
    "ddp-adapters-need-non-reentrant-checkpoints": (
        make_config(engine=Engine.DDP),
        make_config(engine=Engine.DDP, checkpoint_every=0),
        {},
    ),
    "device-map-under-zero-3": (_zero(3), _zero(2), {}),
    "offload-param-needs-stage-3": (_zero(2, offload_param=Offload.CPU), _zero(3, offload_param=Offload.CPU), {}),
    "accelerate-keys-beside-a-deepspeed-file": (_ZERO2, _FSDP, {}),
    "bf16-before-ampere": (make_config(), make_config(precision=Precision.FP16), {"bf16": False}),
    "t5-overflows-in-fp16": (make_config(precision=Precision.FP16), make_config(), {"model_type": "t5"}),
    "fp16-trainables-cannot-be-unscaled": (
        make_config(precision=Precision.FP16, lora=make_lora(precision=AdapterPrecision.BASE)),
        make_config(precision=Precision.FP16),
        {},
    ),
    "fsdp-wraps-by-class": (_FSDP, _ZERO2, {}),
    "fsdp-rounds-the-loss": (_FSDP, replace(_FSDP, precision=Precision.BF16_PURE), {}),
    "fsdp-plugin-checkpoints-hide-adapters": (make_config(engine=Engine.FSDP), _FSDP, {}),
    "fsdp-accumulates-whole-gradients": (
        replace(_FSDP, fsdp=FsdpConfig(reduce_each_micro_batch=False)),
        replace(_FSDP, fsdp=FsdpConfig(reduce_each_micro_batch=False), gradient_accumulation_steps=1),
        {},
    ),
    "bitsandbytes-optimizer-under-fsdp": (replace(_FSDP, optimizer=Optimizer.ADAMW_8BIT), _FSDP, {}),
    "bitsandbytes-optimizer-under-deepspeed": (replace(_ZERO2, optimizer=Optimizer.PAGED_ADAMW), _ZERO2, {}),
    "shared-sequences-have-no-mask": (
        replace(_FSDP, context_parallel=2),
        replace(_FSDP, context_parallel=2, task=Task.PRETRAIN),
        {},
    ),
    "shared-sequences-need-sdpa": (
        replace(_FSDP, context_parallel=2, packing=False, attention=Attention.EAGER),
        replace(_FSDP, context_parallel=2, packing=False),
        {},
    ),
    "shared-sequences-divide-evenly": (
        replace(_FSDP, context_parallel=2, packing=False, max_length=130),
        replace(_FSDP, context_parallel=2, packing=False, max_length=132),
        {},
    ),
    "shared-sequences-leave-nothing-to-shard": (
        replace(_FSDP, context_parallel=2, nodes=2, packing=False, fsdp=FsdpConfig(hybrid=True)),
        replace(_FSDP, context_parallel=2, nodes=2, packing=False),
        {},
    ),
    "reference-under-fsdp": (
        replace(_FSDP, task=Task.DPO, reference=Reference.MODEL),
        replace(make_config(engine=Engine.FSDP), task=Task.DPO, reference=Reference.ADAPTERS_OFF),
        {},
    ),
    "precomputed-reference-under-deepspeed": (
        replace(_ZERO2, task=Task.DPO, reference=Reference.PRECOMPUTED),
        replace(_ZERO2, task=Task.DPO, reference=Reference.MODEL),
        {},
    ),
    "pairs-in-shared-sequences": (
        replace(_FSDP, task=Task.DPO, context_parallel=2, packing=False),
        replace(_FSDP, task=Task.DPO, packing=False),
        {},
    ),
    "classes-over-a-4-bit-base": (
        replace(make_config(method=Method.QLORA), task=Task.CLASSIFICATION),
        replace(make_config(method=Method.LORA), task=Task.CLASSIFICATION),
        {},
    ),
    "chunked-loss-of-a-model-that-is-its-own-base": (
        make_config(loss=LossHead.CHUNKED),
        make_config(loss=LossHead.PLAIN),
        {"tiled_loss": False},
    ),
    "quantised-checkpoint-under-qlora": (make_config(method=Method.QLORA), make_config(), {"published": "mxfp4"}),
    "quantised-checkpoint-is-dequantised": (make_config(), make_config(method=Method.QLORA), {"published": "fp8"}),
    "fp8-checkpoint-of-part-blocks": (make_config(), make_config(method=Method.QLORA), {"published": "fp8"}),
    "zero-2-gradients-too-small": (_ZERO2, _zero(3), {"deepspeed": "0.18.2"}),
    "zero-2-gradients-of-reused-modules": (_ZERO2, _zero(3), {"deepspeed": "0.19.3"}),
    "zero-3-loads-fused-experts-at-random": (_zero(3), _ZERO2, {"experts": True, "transformers": "5.3.0"}),
    "checkpoints-of-every-kth-layer-are-new": (
        make_config(checkpoint_every=2),
        make_config(checkpoint_every=1),
        {"transformers": "4.57.6"},
    ),
    "checkpoints-on-the-host-are-new": (
        make_config(checkpoint_offload=True),
        make_config(),
        {"transformers": "4.57.6"},
    ),
    "bf16-states-are-new": (_zero(2, bf16_master_weights=True), _ZERO2, {"deepspeed": "0.18.2"}),
    "second-copy-beside-offloaded-weights": (
        _zero(3, hpz_partition=8, offload_param=Offload.CPU),
        _zero(3, hpz_partition=8, offload_optimizer=Offload.CPU),
        {},
    ),
    "recomputation-adds-to-offload": (
        _zero(2, offload_optimizer=Offload.CPU),
        replace(_zero(2, offload_optimizer=Offload.CPU), checkpoint_every=0),
        {},
    ),
}


def _model(given: dict[str, Any]) -> ModelFacts:
    model = replace(
        make_model(),
        model_type=given.get("model_type", "llama"),
        checkpoint_quantization=given.get("published", ""),
        tiled_loss=given.get("tiled_loss", True),
    )
    if not given.get("experts"):
        return model
    fused = Tensor(name="mlp.experts.gate_up_proj", component=Component.EXPERTS, params=5_000_000)
    block = replace(model.groups[0].block, tensors=(fused,))
    return replace(model, groups=(BlockGroup(block=block, count=2),))


def _broken(config: TrainingConfig, given: dict[str, Any]) -> dict[str, str]:
    values = facts_of(config, _model(given), replace(make_gpu(), bf16=given.get("bf16", True)))
    versions = PLANNED | {name: given[name] for name in PLANNED if name in given}
    return {rule.id: message(rule, values) for rule in broken_rules(values, versions)}


def test_every_rule_has_a_case_and_a_source() -> None:
    assert {rule.id for rule in load_rules("combinations")} == set(CASES)
    for rule in load_rules():
        assert rule.when
        assert rule.source
        assert rule.fields
        assert not rule.sentence.endswith(".")


@pytest.mark.parametrize("name", CASES)
def test_a_rule_holds_where_it_should_and_not_beside_it(name: str) -> None:
    breaks, keeps, given = CASES[name]
    said = _broken(breaks, given)
    assert name in said
    assert "{" not in said[name]
    assert name not in _broken(keeps, given)


def test_experts_are_counted_in_the_sentence() -> None:
    breaks, _, given = CASES["fused-experts-stay-16-bit"]
    assert "10,000,000 elements" in _broken(breaks, given)["fused-experts-stay-16-bit"]


@pytest.mark.parametrize(
    ("version", "wrong"),
    [("0.17.5", ()), ("0.17.6", ("too-small",)), ("0.18.2", ("too-small",)), ("0.18.3", ("of-reused-modules",)),
     ("0.19.3", ("of-reused-modules",)), ("0.19.4", ()), ("0.19.8+cu128", ())],
)  # fmt: skip
def test_zero_2_gradients_are_wrong_in_two_ranges_of_versions(version: str, wrong: tuple[str, ...]) -> None:
    found = [name for name in _broken(_ZERO2, {"deepspeed": version}) if name.startswith("zero-2-gradients-")]
    assert found == [f"zero-2-gradients-{end}" for end in wrong]


@pytest.mark.parametrize(
    ("version", "span", "inside"),
    [
        ("1.0", "==1", True),
        ("1.10", ">1.9", True),
        ("2.0rc1", ">=2", True),
        ("0.9", "!=0.9", False),
        ("3", "<3", False),
    ],
)
def test_ranges_of_versions(version: str, span: str, inside: bool) -> None:
    assert in_range(version, span) is inside


def test_a_range_that_is_none_is_told() -> None:
    with pytest.raises(ValueError, match="no version range"):
        in_range("1.0", "~=1.0")


@pytest.mark.parametrize(
    ("pins", "rule", "field"),
    [
        ("pin: {engine: fsdp, optimizer: adamw_8bit}", "optimizer-under-fsdp", "pin.optimizer"),
        ("pin: {engine: fsdp, context_parallel: 2}", "combination", "pin.context_parallel"),
        ("pin: {precision: fp16, adapter_precision: base}", "combination", "pin.adapter_precision"),
    ],
)
def test_pins_that_break_a_rule_are_refused_at_their_place(pins: str, rule: str, field: str) -> None:
    text = spec_text(samples="1000, packing: true", count="2", more=pins)
    with pytest.raises(MemcError) as caught:
        answer_to(text)
    found = [(item.code, item.where.field if item.where else "") for item in caught.value.diagnostics]
    assert (rule, field) in found


def test_a_rule_that_one_allowed_method_keeps_does_not_refuse() -> None:
    plan_of(
        spec_text(gpu="h100-sxm5-80gb", count="2", host="1TiB", method="[qlora, lora]", more="pin: {zero_stage: 3}")
    )


@pytest.mark.parametrize(
    "text",
    [
        spec_text(method="auto", count="8", host="512GiB", length="512", batch="8"),
        spec_text(method="[full, qlora]", count="4", nodes="2", host="256GiB, nvme: 2TB", length="512", batch="8"),
        spec_text(method="auto", gpu="t4", host="256GiB", length="512", batch="4"),
    ],
)
def test_no_configuration_of_the_space_breaks_a_rule(text: str) -> None:
    """What the rules refuse, the techniques' own reasons have ruled out already."""
    machine = machine_of(text)
    question = machine.question
    for frame in machine.space().frames:
        values = facts_of(frame.config, question.model, question.gpu)
        assert [rule.id for rule in broken_rules(values, PLANNED, (Severity.ERROR,))] == []


def _files(config: TrainingConfig) -> dict[str, str]:
    return render(make_plan(config), spec_name="s.yaml", command="memc compile s.yaml")


def test_what_is_handled_stands_in_the_files() -> None:
    """One assertion for each rule that memc's own files avoid."""
    qlora, lora = _files(_QLORA_FSDP), _files(make_config(engine=Engine.FSDP))
    full, ddp = _files(_FSDP), _files(make_config(engine=Engine.DDP))
    zero3 = _files(make_config(engine=Engine.DEEPSPEED, stage=3))
    assert 'bnb_4bit_quant_storage=settings["dtype"]' in qlora["train.py"]
    assert "bnb_4bit_quant_storage=torch.uint8" in _files(make_config(method=Method.QLORA))["train.py"]
    assert "enable_input_require_grads()" in lora["train.py"]
    assert '"use_reentrant": False' in ddp["train.py"]
    assert "device_map" not in zero3["train.py"]
    keys = set(yaml.safe_load(zero3["accelerate.yaml"])["deepspeed_config"])
    assert keys == {"deepspeed_config_file", "deepspeed_multinode_launcher", "zero3_init_flag"}
    assert yaml.safe_load(full["accelerate.yaml"])["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == (
        "LlamaDecoderLayer"
    )
    assert "output_dtype=None" in full["train.py"]
    assert yaml.safe_load(lora["accelerate.yaml"])["fsdp_config"]["fsdp_activation_checkpointing"] is False
    assert yaml.safe_load(full["accelerate.yaml"])["fsdp_config"]["fsdp_activation_checkpointing"] is True
    document = json.loads(zero3["ds_config.json"])
    assert document["train_batch_size"] == (
        document["train_micro_batch_size_per_gpu"] * document["gradient_accumulation_steps"] * 2
    )
