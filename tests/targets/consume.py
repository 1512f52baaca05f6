"""Shows emitted folders to the real programs, in a process of its own; prints one JSON object per folder.

Run as: python consume.py PORT PROCESSES FOLDER...; with more than one process, the others are stood in for by torch's
fake process group, so that world sizes, meshes and batches are those of the plan.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any


def load_script(folder: Path) -> ModuleType:
    """Returns the emitted train.py, imported."""
    spec = importlib.util.spec_from_file_location("train", folder / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_arguments(script: ModuleType) -> Any:
    """Returns the trainer arguments that the emitted code builds."""
    arguments = argparse.Namespace(
        device="cpu", probe=None, max_steps=script.MAX_STEPS, output_dir="o", resume=False, random_weights=False
    )
    os.environ.pop("ACCELERATE_USE_CPU", None)
    script.start_processes(arguments)
    args = script.build_arguments(arguments, tempfile.mkdtemp())
    script.check_world(args)
    return args


def read_accelerate(folder: Path) -> dict[str, Any]:
    """Returns what `accelerate launch` makes of accelerate.yaml, with its own checks run."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import DeepSpeedPlugin
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    command = ["--config_file", str(folder / "accelerate.yaml"), "--main_process_port", "29555"]
    command += ["--main_process_ip", "127.0.0.1", "--machine_rank", "0"]
    deepspeed_file = folder / "ds_config.json"
    if deepspeed_file.exists():
        command += ["--deepspeed_config_file", str(deepspeed_file)]
    args, defaults, mixed_precision_from_file = _validate_launch_command(
        launch_command_parser().parse_args([*command, str(folder / "train.py"), "--device", "cpu"])
    )
    if args.use_deepspeed:
        fields = [*defaults.deepspeed_config, *(["mixed_precision"] if mixed_precision_from_file else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        _, environment = prepare_deepspeed_cmd_env(args)
        before = dict(os.environ)
        os.environ.update(environment)
        try:
            DeepSpeedPlugin()  # refuses the keys that would repeat the DeepSpeed file
        finally:
            os.environ.clear()
            os.environ.update(before)
    return {
        "use_deepspeed": args.use_deepspeed,
        "use_fsdp": args.use_fsdp,
        "multi_gpu": args.multi_gpu,
        "num_processes": args.num_processes,
        "num_machines": args.num_machines,
        "mixed_precision": args.mixed_precision,
        "fsdp": read_fsdp(args) if args.use_fsdp else None,
    }


def read_fsdp(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the FSDP plugin and the device mesh that an Accelerator makes of what the launcher hands over."""
    from accelerate import Accelerator
    from accelerate.utils.launch import prepare_multi_gpu_env

    before = dict(os.environ)
    os.environ.update(prepare_multi_gpu_env(args))
    try:
        accelerator = Accelerator()
        plugin, mesh = accelerator.state.fsdp_plugin, accelerator.torch_device_mesh
        return {
            "type": accelerator.distributed_type.value,
            "version": plugin.fsdp_version,
            "reshard": plugin.reshard_after_forward,
            "offload": type(plugin.cpu_offload).__name__,
            "state_dict": plugin.state_dict_type.name,
            "wraps": plugin.transformer_cls_names_to_wrap,
            "checkpointing": plugin.activation_checkpointing,
            "checkpoint_offload": plugin.activation_checkpointing_offload,
            "efficient_loading": plugin.cpu_ram_efficient_loading,
            "param_dtype": str(getattr(plugin.mixed_precision_policy, "param_dtype", None)),
            "mesh": dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)) if mesh is not None else {},
        }
    finally:
        os.environ.clear()
        os.environ.update(before)


def read_peft(folder: Path) -> dict[str, Any]:
    """Returns the adapter settings as PEFT reads them from a folder, and as the script makes them."""
    from peft import LoraConfig, PeftConfig

    with tempfile.TemporaryDirectory() as place:
        shutil.copy(folder / "peft_config.json", Path(place) / "adapter_config.json")
        found = PeftConfig.from_pretrained(place)
    made = LoraConfig(**json.loads((folder / "peft_config.json").read_text()))
    assert found.to_dict() == made.to_dict()
    return {
        "r": found.r,
        "lora_alpha": found.lora_alpha,
        "targets": sorted(found.target_modules),
        "type": found.peft_type,
    }


def consume(folder: Path) -> dict[str, Any]:
    """Returns what each program read from the folder."""
    script = load_script(folder)
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    args = read_arguments(script)
    if hasattr(script, "shard_on_the_cpu"):
        script.shard_on_the_cpu()
    report: dict[str, Any] = {"class": type(args).__name__, "accelerate": read_accelerate(folder)}
    kept = args.to_dict()
    report["arguments"] = {
        key: value for key, value in kept.items() if not isinstance(value, dict) or "activation" in key
    }
    if (folder / "ds_config.json").exists():
        from deepspeed.runtime.config import DeepSpeedConfig

        settings = args.hf_deepspeed_config.config
        settings.pop("optimizer_auto", None)
        args.hf_deepspeed_config.trainer_config_finalize(args, None, 10)
        read = DeepSpeedConfig(dict(settings))
        report["deepspeed"] = {
            "stage": read.zero_optimization_stage,
            "batch": [read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps],
            "bf16": read.bfloat16_config.enabled,
            "fp16": read.float16_config.enabled,
            "optimizer": read.optimizer_name,
            "clipping": read.gradient_clipping,
            "reduce_bucket_size": read.zero_config.reduce_bucket_size,
            "offload_optimizer": str(getattr(read.zero_config.offload_optimizer, "device", "none")),
            "offload_param": str(getattr(read.zero_config.offload_param, "device", "none")),
            "nvme": [
                str(getattr(section, "nvme_path", None))
                for section in (read.zero_config.offload_optimizer, read.zero_config.offload_param)
            ],
            "aio": read.aio_config,
            "hpz": read.zero_config.zero_hpz_partition_size,
            "bf16_masters": read.bfloat16_config.bf16_master_weights_and_grads,
            "bf16_states": read.bfloat16_config.bf16_optimizer_states,
            "auto_left": [key for key, value in settings.items() if value == "auto"],
        }
    if (folder / "peft_config.json").exists():
        report["peft"] = read_peft(folder)
    return report


def main() -> None:
    """Prints a report for each folder of the command line."""
    port, processes = sys.argv[1:3]
    os.environ |= {"RANK": "0", "WORLD_SIZE": processes, "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": port, "DS_ACCELERATOR": "cpu", "ACCELERATE_LOG_LEVEL": "error"}
    if int(processes) > 1:
        import torch
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group("fake", rank=0, world_size=int(processes), store=FakeStore())
    for name in sys.argv[3:]:
        try:
            report = consume(Path(name))
        except BaseException:
            report = {"error": traceback.format_exc()}
        print("REPORT " + json.dumps({"folder": name, **report}, default=str), flush=True)


if __name__ == "__main__":
    main()
