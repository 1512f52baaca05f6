"""Every emitted file is accepted by the program that reads it, and reads as the plan says."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matrix import LAYERS, kind_of, matrix, write_matrix
from memc.config import Engine, Method, Offload, Optimizer, Precision, Task
from packaging.requirements import Requirement
from torch_extensions import framework_environment

pytestmark = pytest.mark.xdist_group("consumers")  # one process writes all folders and reads them
CASES = matrix()
_REFUSED_BESIDE_A_DEEPSPEED_FILE = {
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_param_nvme_path",
    "offload_optimizer_nvme_path",
    "zero3_save_16bit_model",
    "mixed_precision",
}
_SCHEDULER_FILES = {"slurm": {"job.sbatch"}, "skypilot": {"sky.yaml"}, "kubernetes": {"trainjob.yaml"}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_matrix(tmp_path_factory.mktemp("matrix"))


@pytest.fixture(scope="module")
def reports(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Returns what the real programs said, by case; one process reads all folders of one world size."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = {}
    for processes in sorted({config.world_size for config in CASES.values()}):
        own = [str(folder) for name, folder in folders.items() if CASES[name].world_size == processes]
        outcome = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("consume.py")), str(port), str(processes), *own],
            capture_output=True,
            text=True,
            cwd=tmp_path_factory.mktemp("start"),
            env=framework_environment(),
            timeout=1200,
        )
        lines = [line.removeprefix("REPORT ") for line in outcome.stdout.splitlines() if line.startswith("REPORT ")]
        reported = {Path(report["folder"]).name: report for report in map(json.loads, lines)}
        assert len(reported) == len(own), outcome.stderr[-3000:]
        found |= reported
    return found


@pytest.mark.parametrize("name", CASES)
def test_trainer_arguments_are_the_plan(name: str, reports: dict[str, dict[str, Any]]) -> None:
    report, config = reports[name], CASES[name]
    assert "error" not in report, report["error"]
    arguments = report["arguments"]
    assert report["class"] == {Task.SFT: "SFTConfig", Task.DPO: "DPOConfig"}.get(config.task, "TrainingArguments")
    assert arguments["per_device_train_batch_size"] == config.micro_batch_size
    assert arguments["gradient_accumulation_steps"] == config.gradient_accumulation_steps
    assert arguments["per_device_eval_batch_size"] == (config.eval_batch_size or config.micro_batch_size)
    assert arguments["per_device_eval_batch_size"] <= max(config.micro_batch_size, config.eval_batch_size)
    assert arguments["optim"] == config.optimizer.value
    by_plugin = config.fsdp is not None and config.checkpoint_every == 1 and config.method is Method.FULL
    assert arguments["activation_checkpointing"] is (config.checkpoint_every > 0 and not by_plugin)
    if not by_plugin:
        checkpointing = arguments["activation_checkpointing_kwargs"]
        assert checkpointing["every_n_layers"] == max(config.checkpoint_every, 1)
        assert checkpointing["use_reentrant"] is (config.zero_stage == 3 and config.method is not Method.FULL)
        assert checkpointing.get("offload", False) is False, "a CPU has no pinned memory"
    assert arguments["prediction_loss_only"] is (config.task is not Task.CLASSIFICATION)
    if config.task is Task.SFT:
        assert arguments["max_length"] == (None if kind_of(name) else config.max_length)
        assert arguments["remove_unused_columns"] is not bool(kind_of(name))
        assert arguments["packing"] is config.packing
        flash = config.attention.value == "flash_attention_2"
        assert arguments["packing_strategy"] == ("bfd" if flash else "wrapped")


@pytest.mark.parametrize("name", [name for name, config in CASES.items() if config.engine is Engine.DEEPSPEED])
def test_deepspeed_reads_its_file(name: str, reports: dict[str, dict[str, Any]], folders: dict[str, Path]) -> None:
    config, read = CASES[name], reports[name]["deepspeed"]
    assert config.zero is not None
    assert read["stage"] == config.zero.stage
    assert read["batch"] == [config.global_batch_size, config.micro_batch_size, config.gradient_accumulation_steps]
    assert read["auto_left"] == []
    assert read["clipping"] == 1.0
    assert read["optimizer"] == (None if config.optimizer is Optimizer.ADAMW_8BIT else "adamw")
    if config.zero.stage:
        assert read["reduce_bucket_size"] == config.zero.reduce_bucket_elements
        assert read["offload_optimizer"].endswith(config.zero.offload_optimizer.value)
        assert read["offload_param"].endswith(config.zero.offload_param.value)
    places = [config.zero.offload_optimizer, config.zero.offload_param]
    assert read["nvme"] == ["/local_nvme" if place is Offload.NVME else "None" for place in places]
    if Offload.NVME in places:
        assert read["aio"]["queue_depth"] == config.zero.nvme_queue_depth
    assert read["hpz"] == config.zero.hpz_partition
    assert (read["bf16_masters"], read["bf16_states"]) == (config.zero.bf16_master_weights, config.zero.bf16_states)

    document = json.loads((folders[name] / "ds_config.json").read_text())
    assert document["bf16"]["enabled"] is (config.precision is Precision.BF16)
    assert document["fp16"]["enabled"] is (config.precision is Precision.FP16)
    gathers = document["zero_optimization"].get("stage3_gather_16bit_weights_on_model_save")
    assert gathers is (True if config.zero.stage == 3 else None)


@pytest.mark.parametrize("name", CASES)
def test_accelerate_reads_its_file(name: str, reports: dict[str, dict[str, Any]], folders: dict[str, Path]) -> None:
    import yaml

    config, read = CASES[name], reports[name]["accelerate"]
    assert read["use_deepspeed"] is (config.engine is Engine.DEEPSPEED)
    assert read["use_fsdp"] is (config.engine is Engine.FSDP)
    assert read["num_processes"] == config.world_size
    assert read["num_machines"] == config.nodes
    document = yaml.safe_load((folders[name] / "accelerate.yaml").read_text())
    if config.engine is Engine.DEEPSPEED:
        keys = set(document) | set(document["deepspeed_config"])
        assert not keys & _REFUSED_BESIDE_A_DEEPSPEED_FILE
    else:
        expected = {Precision.BF16: "bf16", Precision.FP16: "fp16"}.get(config.precision, "no")
        assert read["mixed_precision"] == expected


@pytest.mark.parametrize("name", [name for name, config in CASES.items() if config.engine is Engine.FSDP])
def test_accelerate_shards_as_the_plan_says(name: str, reports: dict[str, dict[str, Any]]) -> None:
    config, read = CASES[name], reports[name]["accelerate"]["fsdp"]
    fsdp = config.fsdp
    assert fsdp is not None
    assert (read["type"], read["version"], read["reshard"]) == ("FSDP", 2, fsdp.reshard_after_forward)
    assert read["offload"] == ("CPUOffloadPolicy" if fsdp.offload is Offload.CPU else "OffloadPolicy")
    assert read["state_dict"] == ("SHARDED_STATE_DICT" if fsdp.sharded_checkpoints else "FULL_STATE_DICT")
    other = "BertLayer" if name.startswith("classes-encoder") else "LlamaDecoderLayer"
    assert read["wraps"] == [LAYERS.get(kind_of(name), other)]
    assert read["efficient_loading"] is (config.method is not Method.QLORA)
    by_plugin = config.checkpoint_every == 1 and config.method is Method.FULL
    assert read["checkpointing"] is by_plugin
    assert read["checkpoint_offload"] is (by_plugin and config.checkpoint_offload)
    dtype = {Precision.BF16: "torch.bfloat16", Precision.FP16: "torch.float16"}.get(config.precision, "None")
    assert read["param_dtype"] == dtype
    mesh = read["mesh"]
    assert mesh.get("dp_replicate", 1) == (config.nodes if fsdp.hybrid else 1)
    assert mesh.get("cp", 1) == config.context_parallel
    if mesh:
        assert mesh.get("dp_shard", 1) * mesh.get("cp", 1) == config.shard_ranks


@pytest.mark.parametrize("name", [name for name, config in CASES.items() if config.lora is not None])
def test_peft_reads_its_file(name: str, reports: dict[str, dict[str, Any]]) -> None:
    lora = CASES[name].lora
    assert lora is not None
    read = reports[name]["peft"]
    assert (read["r"], read["lora_alpha"], read["type"]) == (lora.rank, lora.alpha, "LORA")
    assert read["targets"] == sorted(lora.target_modules)


@pytest.mark.parametrize("name", CASES)
def test_files_agree_on_which_there_are(name: str, folders: dict[str, Path]) -> None:
    config = CASES[name]
    expected = {"PLAN.md", "accelerate.yaml", "launch.sh", "memc.lock", "requirements.txt", "train.py"}
    expected |= _SCHEDULER_FILES.get(name.rpartition("-")[0], set())
    expected |= {"ds_config.json"} if config.engine is Engine.DEEPSPEED else set()
    expected |= {"peft_config.json"} if config.lora is not None else set()
    assert {path.name for path in folders[name].iterdir()} == expected


@pytest.mark.parametrize("name", CASES)
def test_shell_reads_the_launcher(name: str, folders: dict[str, Path]) -> None:
    subprocess.run(["bash", "-n", str(folders[name] / "launch.sh")], check=True)


@pytest.mark.parametrize("name", CASES)
def test_checkpoints_wait_on_the_host_where_planned(name: str, folders: dict[str, Path]) -> None:
    text, config = (folders[name] / "train.py").read_text(), CASES[name]
    assert ("CHECKPOINT_OFFLOAD = True" in text) is config.checkpoint_offload
    by_model = config.fsdp is None or config.checkpoint_every != 1 or config.method is not Method.FULL
    assert ('"offload": CHECKPOINT_OFFLOAD' in text) is (config.checkpoint_offload and by_model)


@pytest.mark.parametrize("name", CASES)
def test_arguments_come_before_the_model(name: str, folders: dict[str, Path]) -> None:
    body = (folders[name] / "train.py").read_text().split("def run(")[1]
    assert body.index("build_arguments(") < body.index("load_model(")


def test_requirements_are_met_here(folders: dict[str, Path]) -> None:
    from importlib.metadata import version

    for name, folder in folders.items():
        lines = [line for line in (folder / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
        for requirement in map(Requirement, lines):
            if requirement.name not in ("flash-attn", "torchvision"):  # have no build for a machine without a GPU
                assert version(requirement.name) in requirement.specifier, (name, str(requirement))
        names = {Requirement(line).name for line in lines}
        config = CASES[name]
        assert ("deepspeed" in names) is (config.engine is Engine.DEEPSPEED)
        assert ("peft" in names) is (config.lora is not None)
        quantized = (
            config.method is Method.QLORA or "8bit" in config.optimizer.value or "paged" in config.optimizer.value
        )
        assert ("bitsandbytes" in names) is quantized


def test_images_are_bounded_and_the_tower_is_left_alone(folders: dict[str, Path]) -> None:
    for name in filter(kind_of, CASES):
        config, text = CASES[name], (folders[name] / "train.py").read_text()
        of_any_size = kind_of(name).startswith("qwen")
        assert (f"MAX_PIXELS = {config.image_pixels} " in text) is of_any_size
        assert ("max_pixels=MAX_PIXELS" in text) is of_any_size
        assert f"IMAGES_PER_SAMPLE = {config.images_per_sample} " in text
        assert f"MAX_LENGTH = {config.max_length} " in text
        assert "pillow" in (folders[name] / "requirements.txt").read_text()
        if config.lora is not None:
            document = json.loads((folders[name] / "peft_config.json").read_text())
            tower = "visual" if of_any_size else "vision_tower"
            layer = "blocks.0.attn.qkv" if of_any_size else "encoder.layers.0.self_attn.q_proj"
            assert re.fullmatch(document["exclude_modules"], f"model.{tower}.{layer}")
            assert not re.fullmatch(document["exclude_modules"], "model.language_model.layers.0.self_attn.q_proj")


def test_scripts_pass_a_linter_and_a_type_checker(folders: dict[str, Path], tmp_path: Path) -> None:
    """One script per distinct text: a name that a branch forgot to import or define shows here."""
    texts = {(folder / "train.py").read_text(): name for name, folder in folders.items()}
    for text, name in texts.items():
        (tmp_path / f"train_{name.replace('-', '_')}.py").write_text(text)
    files = sorted(map(str, tmp_path.glob("*.py")))
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E,F,W,B,PIE", "--line-length", "150"]
    outcome = subprocess.run([*ruff, *files], capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stdout
    mypy = [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--follow-imports=skip", "--config-file="]
    mypy += ["--check-untyped-defs", "--cache-dir", str(tmp_path / "cache")]
    outcome = subprocess.run([*mypy, *files], capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stdout
