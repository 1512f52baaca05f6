"""What schedulers start the run with: a Slurm script, a SkyPilot task, a Kubernetes TrainJob with its files."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from typing import Any

from memc.config import Offload, TrainingConfig
from memc.plan import Plan
from memc.units import GIB, ceil_div

SBATCH = "job.sbatch"
SKYPILOT = "sky.yaml"
KUBERNETES = "trainjob.yaml"

_MOUNT = "/memc"
_WORK = "/workspace"
_GPU_RESOURCE = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu"}


def job_name(spec_name: str) -> str:
    """Returns a name that every scheduler takes: lower-case letters, digits and dashes, from that of the spec."""
    stem = spec_name.rsplit(".", 1)[0].lower()
    return re.sub(r"[^a-z0-9]+", "-", stem).strip("-")[:50].strip("-") or "memc"


def output_folder(command: str) -> str:
    """Returns the folder that a command writes to, without its last slash; ``.`` when it does not say."""
    try:
        words = shlex.split(command)
    except ValueError:  # a command that no shell would take
        return "."
    for word, after in pairwise(words):
        if word in ("-o", "--output", "--out"):
            return after.rstrip("/") or "/"
    return "."


def slurm_values(plan: Plan, spec_name: str, command: str) -> dict[str, Any]:
    """Returns what the Slurm script is written from."""
    run, config = plan.run, plan.config
    return {
        "job_name": job_name(spec_name),
        "folder": output_folder(command),
        "nodes": config.nodes,
        "gpus_per_node": config.gpus_per_node,
        "partition": run.partition,
        "account": run.account,
        "time_limit_hours": run.time_limit_hours,
        "whole_node": steps_on_host(config),
        "cpus": cpus_per_node(config),
        "host_gib": host_gib(plan),
    }


def steps_on_host(config: TrainingConfig) -> bool:
    """Whether the optimizer steps on the CPU: its time is that of all cores and of all of a node's memory."""
    return config.offload_optimizer is not Offload.NONE


def cpus_per_node(config: TrainingConfig) -> int:
    """Returns the cores that the processes of a node keep busy.

    Each has the thread of Python, which also reads the data, and autograd's thread of its GPU; NCCL adds one where
    there are several. Source: torch/csrc/autograd/engine.cpp (a thread for each device), NCCL src/proxy.cc.
    """
    return config.gpus_per_node * (2 if config.world_size == 1 else 3)


def host_gib(plan: Plan) -> int:
    """Returns what a run needs of a node's memory, in whole GiB: its fullest moment, reading a checkpoint included.

    Source: the plan's ledger of the host.
    """
    host = plan.ledger.host
    return max(1, ceil_div(max(host.required_bytes, *host.by_moment.values()) + host.uncertainty_bytes, GIB))


def skypilot_task(plan: Plan, spec_name: str, command: str) -> dict[str, Any]:
    """Returns a SkyPilot task. Its working folder is the one it is started from, copied to every node."""
    folder = shlex.quote(output_folder(command))
    resources: dict[str, Any] = {
        "accelerators": f"{plan.run.accelerator}:{plan.config.gpus_per_node}",
        "cpus": f"{cpus_per_node(plan.config)}+",
        "memory": f"{host_gib(plan)}+",
    }
    if plan.run.image:
        resources["image_id"] = f"docker:{plan.run.image}"
    run = [
        'export MACHINE_RANK="$SKYPILOT_NODE_RANK"',
        'export MAIN_PROCESS_IP="$(printf "%s\\n" "$SKYPILOT_NODE_IPS" | sed -n 1p)"',
        f"bash {folder}/launch.sh",
    ]
    return {
        "name": job_name(spec_name),
        "workdir": ".",
        "num_nodes": plan.config.nodes,
        "resources": resources,
        "setup": f"pip install -r {folder}/requirements.txt\n",
        "run": "\n".join(run) + "\n",
    }


def kubernetes_documents(plan: Plan, spec_name: str, files: dict[str, str]) -> list[dict[str, Any]]:
    """Returns a ConfigMap with the folder's files and a TrainJob that mounts it.

    The torch runtime of Kubeflow Trainer names ranks and addresses in variables that torchrun reads too; they are
    handed to launch.sh and taken away, so that only one of the two starts processes.
    """
    name, run, config = job_name(spec_name), plan.run, plan.config
    script = [
        "set -euo pipefail",
        f"cd {_WORK}",
        f"pip install -r {_MOUNT}/requirements.txt",
        'export MACHINE_RANK="$PET_NODE_RANK" MAIN_PROCESS_IP="$PET_MASTER_ADDR" MAIN_PROCESS_PORT="$PET_MASTER_PORT"',
        'unset "${!PET_@}"',
        f"exec bash {_MOUNT}/launch.sh",
    ]
    volumes = [
        {"name": "memc", "configMap": {"name": name}},
        {"name": "work", "persistentVolumeClaim": {"claimName": run.volume}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    mounts = [
        {"name": "memc", "mountPath": _MOUNT},
        {"name": "work", "mountPath": _WORK},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    pod = {"spec": {"volumes": volumes, "containers": [{"name": "node", "volumeMounts": mounts}]}}
    patch = {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": pod}}}]}
    resource = _GPU_RESOURCE.get(plan.gpu.vendor, "nvidia.com/gpu")
    job: dict[str, Any] = {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": {
            "image": run.image,
            "numNodes": config.nodes,
            "numProcPerNode": config.gpus_per_node,
            "command": ["bash", "-c", "\n".join(script)],
            "resourcesPerNode": {
                "limits": {resource: str(config.gpus_per_node)},
                "requests": {"cpu": str(cpus_per_node(config)), "memory": f"{host_gib(plan)}Gi"},
            },
        },
        "runtimePatches": [{"manager": "memc", "trainingRuntimeSpec": {"template": {"spec": patch}}}],
    }
    if run.time_limit_hours:
        job["activeDeadlineSeconds"] = 3600 * run.time_limit_hours
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": files},
        {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": name}, "spec": job},
    ]
