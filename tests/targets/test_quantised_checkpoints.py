"""Checkpoints that are published in mxfp4 or fp8: what is planned of them, and that the emitted script reads them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from memc import driver
from memc.config import Attention, Engine, Method, Task
from memc.errors import MemcError
from memc.facts import load_model
from memc.plan import Plan
from memc.render import render
from planmaker import make_config, make_plan, make_run
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig

GPT_OSS = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
    "layer_types": ["full_attention"], "max_position_embeddings": 512,
}  # fmt: skip
DEEPSEEK = {
    "vocab_size": 64, "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "q_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 128,
    "max_position_embeddings": 512,
}  # fmt: skip
SPEC = {"model": "m", "method": "full", "data": {"samples": 100, "max_length": 64}, "hardware": {"gpu": "rtx-4090"}}


def saved(folder: Path, config: Any) -> dict[str, torch.Tensor]:
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def write_quantised(folder: Path, weights: dict[str, torch.Tensor], quantization: dict[str, Any]) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def mxfp4_checkpoint(folder: Path) -> None:
    """Writes experts as codes of four bits with a scale for every 32 of them."""
    found: dict[str, torch.Tensor] = {}
    for name, weight in saved(folder, GptOssConfig(**GPT_OSS)).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = weight.shape
            shape = (experts, outputs, inputs // 32)
            found[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
            found[f"{name}_scales"] = torch.full(shape, 120, dtype=torch.uint8)
        else:
            found[name] = weight.to(torch.bfloat16)
    write_quantised(folder, found, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


def fp8_checkpoint(folder: Path, latent: int) -> dict[str, torch.Tensor]:
    """Writes linears in eight bits, a scale of one half for every block; returns the weights that they stand for."""
    found: dict[str, torch.Tensor] = {}
    full = saved(folder, DeepseekV3Config(**DEEPSEEK, kv_lora_rank=latent))
    for name, weight in full.items():
        if weight.ndim == 2 and "proj" in name:
            found[name] = (2 * weight).to(torch.float8_e4m3fn)
            blocks = [math.ceil(size / 128) for size in weight.shape]
            found[name.replace("weight", "weight_scale_inv")] = torch.full(blocks, 0.5)
        else:
            found[name] = weight.to(torch.bfloat16) if weight.dtype == torch.float32 else weight
    write_quantised(folder, found, {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"})
    return full


def script(folder: Path, checkpoint: Path) -> ModuleType:
    from consume import load_script

    folder.mkdir()
    facts = load_model(str(checkpoint), base_dir=folder)
    eager = any(group.block.attention.eager_only for group in facts.groups)
    attention = Attention.EAGER if eager else Attention.SDPA
    config = make_config(task=Task.PRETRAIN, method=Method.FULL, engine=Engine.SINGLE, attention=attention)
    plan = replace(make_plan(replace(config, lora=None), make_run(model=str(checkpoint))), model=facts)
    for name, text in render(plan, spec_name="s", command="c").items():
        (folder / name).write_text(text, encoding="utf-8")
    return load_script(folder)


def read(folder: Path, checkpoint: Path) -> Any:
    module = script(folder, checkpoint)
    arguments = SimpleNamespace(device="cpu", random_weights=False)
    return module.load_model(arguments, SimpleNamespace(device="cpu", use_cpu=True), module.load_config())


@pytest.mark.filterwarnings("ignore")
def test_the_script_reads_four_bit_experts_as_weights_that_train(tmp_path: Path) -> None:
    checkpoint = tmp_path / "m"
    mxfp4_checkpoint(checkpoint)
    model = read(tmp_path / "out", checkpoint)
    assert all(weight.is_floating_point() and weight.requires_grad for weight in model.parameters())
    assert "Mxfp4" not in str(model)
    tokens = torch.arange(8)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert all(weight.grad is not None for name, weight in model.named_parameters() if "experts" in name)
    model.save_pretrained(tmp_path / "again")
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())


@pytest.mark.filterwarnings("ignore")
def test_the_script_reads_eight_bit_weights_as_what_they_stand_for(tmp_path: Path) -> None:
    checkpoint = tmp_path / "m"
    full = fp8_checkpoint(checkpoint, 64)
    model = read(tmp_path / "out", checkpoint)
    weights = dict(model.named_parameters())
    compared = [name for name in full if name in weights and "proj" in name]
    assert len(compared) > 8
    for name in compared:
        assert torch.allclose(weights[name].float(), full[name], rtol=0.07, atol=1e-3), name
    assert "FP8" not in str(model)


def written(tmp_path: Path) -> dict[str, str]:
    """Returns the files of the spec that was answered last."""
    return driver.generate(driver.answer(tmp_path / "spec.yaml"), tmp_path / "out", "c")


def answered(tmp_path: Path, **fields: Any) -> Plan:
    path = tmp_path / "spec.yaml"
    path.write_text(json.dumps(SPEC | fields), encoding="utf-8")
    result = driver.answer(path).result
    assert isinstance(result, Plan)
    return result


@pytest.mark.filterwarnings("ignore")
def test_a_plan_says_that_the_checkpoint_is_turned_into_sixteen_bits(tmp_path: Path) -> None:
    mxfp4_checkpoint(tmp_path / "m")
    plan = answered(tmp_path, hardware={"gpu": "rtx-4090", "count": 2}, pin={"zero_stage": 3})
    assert any("the checkpoint holds mxfp4 weights" in line for line in plan.warnings)
    assert plan.config.zero is not None and not plan.config.zero.partitioned_at_load
    (entry,) = [item for item in plan.ledger.host.entries if item.name == "checkpoint-in-memory"]
    assert "every rank reads the whole checkpoint" in entry.formula
    assert any("never as a 4-bit base of bitsandbytes" in line for line in answered(tmp_path, method="qlora").warnings)
    with pytest.raises(MemcError, match="never as a 4-bit base of bitsandbytes"):
        written(tmp_path)


@pytest.mark.parametrize("name", ["openai/gpt-oss-20b", "openai/gpt-oss-120b"])
def test_a_catalogue_row_is_as_its_checkpoint(tmp_path: Path, name: str) -> None:
    assert load_model(name, base_dir=tmp_path).checkpoint_quantization == "mxfp4"
    assert load_model("Qwen/Qwen2.5-7B", base_dir=tmp_path).checkpoint_quantization == ""


@pytest.mark.filterwarnings("ignore")
def test_blocks_that_are_cut_off_are_refused_as_transformers_refuses_them(tmp_path: Path) -> None:
    """576 rows, as DeepSeek-V3 has them, are four blocks and a half."""
    fp8_checkpoint(tmp_path / "m", 512)
    assert any("are no whole number of blocks" in line for line in answered(tmp_path).warnings)
    with pytest.raises(MemcError, match=r"2 of the model's linears are no\s+whole number of blocks"):
        written(tmp_path)
    with pytest.raises(RuntimeError, match="conversion of the weights"):
        read(tmp_path / "out", tmp_path / "m")
