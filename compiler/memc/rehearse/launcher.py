"""Stands in for `accelerate` in the emitted launcher: one process plays one rank, on the phantom card.

`accelerate launch` starts a process per GPU and gives each its settings in environment variables. This does the same
for the single rank named in MEMC_PHANTOM_RANK, with accelerate's own parser and its own translation of settings, and
puts the rehearsed script on the stage. It replaces itself, so that the launcher's process is the script's.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from accelerate.commands import launch  # type: ignore[import-untyped]
from accelerate.utils import launch as settings  # type: ignore[import-untyped]

STAGE = Path(__file__).with_name("stage.py")


def rank_environment(arguments: argparse.Namespace, defaults: object, mixed_precision_in_file: bool) -> dict[str, str]:
    """Returns the environment that `accelerate launch` would give to a process of this run, its rank left open."""
    if arguments.use_deepspeed:
        fields = list(getattr(defaults, "deepspeed_config", None) or ())
        fields += ["mixed_precision"] if mixed_precision_in_file else []
        arguments.deepspeed_fields_from_accelerate_config = ",".join(fields)
        return dict(settings.prepare_deepspeed_cmd_env(arguments)[1])
    if arguments.use_fsdp or arguments.multi_gpu:
        return dict(settings.prepare_multi_gpu_env(arguments))
    return dict(settings.prepare_simple_launcher_cmd_env(arguments)[1])


def main() -> None:
    """Parses what the launcher says to accelerate, and becomes the rank."""
    if sys.argv[1:2] != ["launch"]:
        sys.exit(f"accelerate {' '.join(sys.argv[1:2])} has no part in a rehearsal")
    parsed = launch.launch_command_parser().parse_args(sys.argv[2:])
    arguments, defaults, mixed_precision_in_file = launch._validate_launch_command(parsed)
    environment = {**os.environ, **rank_environment(arguments, defaults, bool(mixed_precision_in_file))}
    world, rank = int(arguments.num_processes or 1), int(os.environ["MEMC_PHANTOM_RANK"])
    if world > 1 or arguments.use_deepspeed or arguments.use_fsdp or arguments.multi_gpu:
        cards = int(os.environ["MEMC_PHANTOM"].partition("|")[0])
        local, node = rank % cards, rank // cards
        environment |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(local), "GROUP_RANK": str(node)}
        environment |= {"LOCAL_WORLD_SIZE": str(min(world, cards)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    script = [arguments.training_script, *arguments.training_script_args]
    os.execve(sys.executable, [sys.executable, str(STAGE), *script], environment)


if __name__ == "__main__":
    main()
