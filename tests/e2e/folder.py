"""Compiles and runs a folder in end-to-end tests; the one place that knows how a folder is made."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from memc.config import TrainingConfig
from memc.document import settings_document
from memc.plan import RunSettings
from memc.render import render
from planmaker import make_plan, make_run
from torch_extensions import framework_environment

DATA = Path(__file__).resolve().parents[2] / "examples" / "data" / "self-instruct-seed.jsonl"


def compile_folder(out: Path, config: TrainingConfig, **run: Any) -> Path:
    """Returns `out`, written by `memc compile` from a spec that pins every choice of `config`.

    `run` are fields of RunSettings. The spec stands beside the folder.
    """
    spec = out.with_name(out.name + ".yaml")
    spec.write_text(yaml.safe_dump(spec_fields(config, make_run(**run)), sort_keys=False), encoding="utf-8")
    memc = Path(sys.executable).with_name("memc")
    done = subprocess.run(
        [str(memc), "compile", str(spec), "-o", str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    settings = json.loads((out / "memc.lock").read_text(encoding="utf-8"))["plan"]["settings"]
    asked = json.loads(json.dumps(settings_document(config)))
    loose = ("lora", "zero", "fsdp")  # hold settings that a spec pins only where they matter
    assert {key: settings[key] for key in asked if key not in loose} == {
        key: value for key, value in asked.items() if key not in loose
    }
    return out


def render_folder(out: Path, config: TrainingConfig, **run: Any) -> Path:
    """Returns `out`, rendered from a plan made by hand: for what `memc compile` would refuse."""
    out.mkdir(parents=True)
    plan = make_plan(config, make_run(**run))
    for name, text in render(plan, spec_name="smollm2.yaml", command="memc compile smollm2.yaml").items():
        (out / name).write_text(text, encoding="utf-8")
    return out


def spec_fields(config: TrainingConfig, run: RunSettings) -> dict[str, Any]:
    """Returns a spec that leaves the solver no choice but `config`."""
    pin: dict[str, Any] = {
        "engine": config.engine.value,
        "micro_batch_size": config.micro_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "activation_checkpointing": config.checkpoint_every,
        "attention": config.attention.value,
        "loss": config.loss.value,
        "optimizer": config.optimizer.value,
        "precision": config.precision.value,
    }
    if run.eval_data:
        pin["eval_batch_size"] = config.eval_batch_size
    if config.zero is not None:
        zero = config.zero
        pin |= {
            "zero_stage": zero.stage,
            "offload_optimizer": zero.offload_optimizer.value,
            "overlap_comm": zero.overlap_comm,
            "reduce_bucket_size": zero.reduce_bucket_elements,
            "bf16_master_weights": zero.bf16_master_weights,
            "bf16_optimizer_states": zero.bf16_states,
        }
        if zero.stage in (1, 2):
            pin["allgather_bucket_size"] = zero.allgather_bucket_elements
        if zero.stage == 3:
            pin |= {
                "prefetch_bucket_size": zero.prefetch_elements,
                "param_persistence_threshold": zero.persistence_elements,
                "max_live_parameters": zero.max_live_elements,
                "sub_group_size": zero.sub_group_elements,
            }
    if config.fsdp is not None:
        fsdp = config.fsdp
        pin |= {
            "reshard_after_forward": fsdp.reshard_after_forward,
            "reduce_each_micro_batch": fsdp.reduce_each_micro_batch,
            "sharded_checkpoints": fsdp.sharded_checkpoints,
            "offload_param": fsdp.offload.value,
            "hybrid_sharding": fsdp.hybrid,
        }
    data = {"train": run.train_data, "max_length": config.max_length, "packing": config.packing}
    if run.eval_data:
        data["eval"] = run.eval_data
    spec: dict[str, Any] = {
        "model": run.model,
        "task": config.task.value,
        "method": config.method.value,
        "data": data,
        "training": {
            "max_steps": run.max_steps,
            "global_batch_size": config.global_batch_size,
            "learning_rate": run.learning_rate,
            "warmup_ratio": run.warmup_ratio,
            "lr_scheduler": run.lr_scheduler,
            "save_steps": run.save_steps,
            "logging_steps": run.logging_steps,
            "output_dir": run.output_dir,
        },
        "hardware": {
            "gpu": "rtx-4090",
            "count": config.gpus_per_node,
            "nodes": config.nodes,
            "host_memory": "64GiB",
            "nvme": "200GB",
            "nvme_path": run.nvme_path,
        },
        "pin": pin,
    }
    if not run.max_steps:
        spec["training"].pop("max_steps")
        spec["training"]["epochs"] = run.epochs
    if run.eval_data:
        spec["training"]["eval_steps"] = run.eval_steps
    if config.lora is not None:
        spec["lora"] = {"rank": config.lora.rank, "alpha": config.lora.alpha}
    return spec


@dataclass(frozen=True)
class Outcome:
    """How one run of launch.sh ended."""

    status: int
    text: str

    @property
    def losses(self) -> list[float]:
        """Training losses in the order of the log."""
        logs = [ast.literal_eval(line) for line in re.findall(r"\{'loss': [^}]*\}", self.text)]
        return [float(log["loss"]) for log in logs]

    @property
    def logs(self) -> list[dict[str, Any]]:
        """All training log lines."""
        return [ast.literal_eval(line) for line in re.findall(r"\{'loss': [^}]*\}", self.text)]


def launch_nodes(folder: Path, start: Path, nodes: int, port: int) -> list[Outcome]:
    """Returns how `launch.sh --device cpu` ended on each of several nodes, all of them this machine."""
    start.mkdir(exist_ok=True)
    meeting = {"MAIN_PROCESS_IP": "127.0.0.1", "MAIN_PROCESS_PORT": str(port)}
    running = [
        subprocess.Popen(
            ["bash", str(folder / "launch.sh"), "--device", "cpu"],
            cwd=start,
            env=framework_environment() | meeting | {"MACHINE_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(nodes)
    ]
    try:
        texts = [process.communicate(timeout=1200)[0] for process in running]
    finally:
        for process in running:
            process.terminate()
    return [Outcome(status=process.returncode, text=text) for process, text in zip(running, texts, strict=True)]


def launch(folder: Path, start: Path, *arguments: str, timeout_seconds: int = 1200) -> Outcome:
    """Returns how `launch.sh --device cpu` ended, started from the folder `start`.

    Warnings of the libraries are theirs; the run is judged by its status and by what it wrote.
    """
    start.mkdir(exist_ok=True)
    with subprocess.Popen(
        ["bash", str(folder / "launch.sh"), "--device", "cpu", *arguments],
        cwd=start,
        env=framework_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            text, _ = process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            text, _ = process.communicate()
            raise AssertionError(f"not done after {timeout_seconds} s:\n{text[-4000:]}") from None
    return Outcome(status=process.returncode, text=text)


def inspect_model(program: str, *arguments: str) -> Any:
    """Returns the JSON that a short program prints on its last line, run where torch may be imported."""
    outcome = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *arguments],
        env=framework_environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert outcome.returncode == 0, outcome.stderr[-4000:]
    return json.loads(outcome.stdout.strip().splitlines()[-1])
