"""What schedulers are given: a Slurm script that runs, a TrainJob that its own models read, a SkyPilot task."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import yaml
from memc.config import Engine, Method, Offload, TrainingConfig
from memc.ledger.entries import Account, Moment, Resource, resource_ledger
from memc.ledger.parts import host_entry
from memc.render import render
from memc.render.schedulers import job_name, output_folder
from memc.units import GIB
from planmaker import make_config, make_plan, make_run, make_zero

COMMAND = "memc compile 'my spec.yaml' -o 'the out/'"
_STUB_SRUN = """#!/usr/bin/env bash
# Stands in for srun: one task per node, each with its number.
while [[ "$1" == --* ]]; do shift; done
for node in 0 1; do SLURM_NODEID=$node "$@"; done
"""
_STUB_LAUNCH = """#!/usr/bin/env bash
echo "rank=$MACHINE_RANK ip=$MAIN_PROCESS_IP port=$MAIN_PROCESS_PORT arguments=$*"
"""


def files(nodes: int = 2, config: TrainingConfig | None = None, **run: Any) -> dict[str, str]:
    config = config or make_config(engine=Engine.FSDP, method=Method.FULL)
    plan = make_plan(replace(config, nodes=nodes, gpus_per_node=8), make_run(**run))
    return render(plan, spec_name="My Spec_2.yaml", command=COMMAND)


def test_names_and_folders_are_plain() -> None:
    assert job_name("Llama-3.1 70B_sft.yaml") == "llama-3-1-70b-sft"
    assert job_name("....yaml") == "memc"
    assert output_folder(COMMAND) == "the out"
    assert output_folder("memc compile s.yaml") == "."


def test_without_a_scheduler_there_is_no_file_for_one() -> None:
    assert not {"job.sbatch", "sky.yaml", "trainjob.yaml"} & set(files())


def test_slurm_starts_one_launcher_per_node(tmp_path: Path) -> None:
    """The script runs, with stand-ins for Slurm's two programs."""
    text = files(scheduler="slurm", partition="gpu", account="my lab", time_limit_hours=30)["job.sbatch"]
    wanted = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--partition=gpu", "--account='my lab'")
    for option in (*wanted, "--time=30:00:00", "--job-name=my-spec-2"):
        assert f"#SBATCH {option}\n" in text
    first_command = text.index("set -euo pipefail")
    assert all(text.index(line) < first_command for line in text.splitlines() if line.startswith("#SBATCH"))
    folder = tmp_path / "the out"
    folder.mkdir()
    (folder / "job.sbatch").write_text(text)
    (folder / "launch.sh").write_text(_STUB_LAUNCH)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, program in (("srun", _STUB_SRUN), ("scontrol", "#!/bin/sh\nprintf 'node7\\nnode8\\n'\n")):
        (programs / name).write_text(program)
        (programs / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_ID": "12345",
    }
    environment.pop("MAIN_PROCESS_IP", None)
    environment.pop("MAIN_PROCESS_PORT", None)
    run = subprocess.run(
        ["bash", "the out/job.sbatch", "--resume"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    lines = [f"rank={rank} ip=node7 port=29845 arguments=--resume" for rank in (0, 1)]
    assert run.stdout.splitlines() == lines
    elsewhere = subprocess.run(
        ["bash", str(folder / "job.sbatch")], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert elsewhere.returncode == 2
    assert "submit from the folder" in elsewhere.stderr


def sbatch_options() -> set[str]:
    """Returns the names of sbatch's options, from the list that the package simple-slurm brings."""
    found = find_spec("simple_slurm")
    if found is None or not found.submodule_search_locations:
        pytest.skip("simple-slurm is not installed: pip install --no-deps simple-slurm")
    lines = (Path(found.submodule_search_locations[0]) / "arguments.txt").read_text(encoding="utf-8").split()
    return {line.partition(",")[0].replace("_", "-") for line in lines}


@pytest.mark.parametrize("nodes", [1, 2])
def test_slurm_knows_every_option(nodes: int) -> None:
    known = sbatch_options()
    text = files(nodes, scheduler="slurm", partition="gpu", account="lab", time_limit_hours=30)["job.sbatch"]
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    asked = re.findall(r"^#SBATCH --([\w-]+)=\S+", text, flags=re.MULTILINE)
    assert len(asked) == text.count("\n#SBATCH ") == 10
    assert set(asked) <= known
    assert "gpus-a-node" not in known


def with_host(config: TrainingConfig, size_bytes: int, **run: Any) -> dict[str, str]:
    """Returns the files of a plan that needs so much of a node's memory."""
    needed = host_entry("weights", Account.PARAMETERS, size_bytes, frozenset({Moment.LOAD}), "given", "given")
    plan = make_plan(config, make_run(**run))
    ledger = replace(plan.ledger, host=resource_ledger(Resource.HOST, (needed,)))
    return render(replace(plan, ledger=ledger), spec_name="s.yaml", command=COMMAND)


def test_slurm_is_asked_for_the_memory_and_the_cores_that_the_plan_counts() -> None:
    config = replace(make_config(engine=Engine.FSDP, method=Method.FULL), gpus_per_node=8)
    text = with_host(config, 119 * GIB + 1, scheduler="slurm")["job.sbatch"]
    assert "#SBATCH --mem=120G\n" in text
    assert "#SBATCH --cpus-per-task=24\n" in text
    assert "--exclusive" not in text
    assert text.index("export SRUN_CPUS_PER_TASK=") < text.index("exec srun --kill-on-bad-exit=1 bash")
    assert "OMP_NUM_THREADS" not in files(scheduler="slurm")["launch.sh"]


def test_an_optimizer_on_the_cpu_has_the_whole_node_and_all_its_cores() -> None:
    config = make_config(engine=Engine.DEEPSPEED, zero=make_zero(stage=2, offload_optimizer=Offload.CPU))
    written = with_host(replace(config, gpus_per_node=4), 50 * GIB, scheduler="slurm")
    text = written["job.sbatch"]
    assert "#SBATCH --exclusive\n#SBATCH --mem=0\n" in text
    assert "--cpus-per-task" not in text
    assert "srun --kill-on-bad-exit=1 --cpu-bind=none bash" in text
    launcher = written["launch.sh"].replace("exec accelerate launch", 'echo "threads=$OMP_NUM_THREADS"; exit;')
    cores = len(os.sched_getaffinity(0))
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    for given, threads in ((environment, max(1, cores // 4)), (environment | {"OMP_NUM_THREADS": "7"}, 7)):
        run = subprocess.run(["bash", "-s"], input=launcher, env=given, capture_output=True, text=True)
        assert run.stdout == f"threads={threads}\n", run.stderr


def test_schedulers_place_a_run_where_its_host_memory_is() -> None:
    config = replace(make_config(engine=Engine.FSDP, method=Method.FULL), gpus_per_node=8)
    job = with_host(config, 7 * GIB, scheduler="kubernetes", image="i", volume="v")["trainjob.yaml"]
    asked = list(yaml.safe_load_all(job))[1]["spec"]["trainer"]["resourcesPerNode"]["requests"]
    assert asked == {"cpu": "24", "memory": "7Gi"}
    task = yaml.safe_load(with_host(config, 7 * GIB, scheduler="skypilot", accelerator="H100")["sky.yaml"])
    assert task["resources"]["memory"] == "7+"


def test_kubeflow_reads_the_job_and_mounts_the_files() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
    written = files(scheduler="kubernetes", image="registry/train:1", volume="claim", time_limit_hours=2)
    config_map, job = yaml.safe_load_all(written["trainjob.yaml"])
    assert set(config_map["data"]) == {"accelerate.yaml", "launch.sh", "requirements.txt", "train.py"}
    assert config_map["data"]["train.py"] == written["train.py"]
    assert sum(map(len, config_map["data"].values())) < 1_000_000, "what Kubernetes takes in one ConfigMap"
    read = models.TrainerV1alpha1TrainJob.from_dict(job)
    assert read.to_dict() == job, "a key that the trainer does not know was dropped"
    trainer = read.spec.trainer
    assert (trainer.num_nodes, trainer.num_proc_per_node, trainer.image) == (2, 8, "registry/train:1")
    assert read.spec.active_deadline_seconds == 7200
    script = trainer.command[-1]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert script.endswith("exec bash /memc/launch.sh")


def test_skypilot_task_copies_the_folder_and_names_the_first_node(tmp_path: Path) -> None:
    task = yaml.safe_load(files(scheduler="skypilot", accelerator="H100", image="registry/train:1")["sky.yaml"])
    asked = {"accelerators": "H100:8", "cpus": "24+", "memory": "1+", "image_id": "docker:registry/train:1"}
    assert task["resources"] == asked
    assert (task["num_nodes"], task["workdir"], task["name"]) == (2, ".", "my-spec-2")
    folder = tmp_path / "the out"
    folder.mkdir()
    (folder / "launch.sh").write_text(_STUB_LAUNCH)
    environment = os.environ | {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    environment.pop("MAIN_PROCESS_PORT", None)
    run = subprocess.run(["bash", "-c", task["run"]], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.stdout == "rank=1 ip=10.0.0.1 port= arguments=\n"


@pytest.fixture
def skypilot_schemas(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns SkyPilot's module of schemas, without what the rest of the package would load.

    The names of clouds, which it asks a catalogue for, are left empty: no file of memc names one.
    """
    found = find_spec("sky")
    if found is None or not found.submodule_search_locations:
        pytest.skip("skypilot is not installed: pip install --no-deps skypilot")
    package, clouds = ModuleType("sky"), ModuleType("sky.clouds")
    package.__path__ = list(found.submodule_search_locations)
    package.__version__ = version("skypilot")  # type: ignore[attr-defined]
    clouds.service_catalog = ModuleType("sky.clouds.service_catalog")  # type: ignore[attr-defined]
    clouds.service_catalog.ALL_CLOUDS = ()
    for name in [name for name in sys.modules if name.split(".")[0] == "sky"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sky", package)
    monkeypatch.setitem(sys.modules, "sky.clouds", clouds)
    return importlib.import_module("sky.utils.schemas")


@pytest.mark.parametrize("image", ["", "registry/train:1"], ids=["machine", "container"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_skypilot_schemas_accept_the_task(skypilot_schemas: Any, nodes: int, image: str) -> None:
    """The task and its resources, each by the schema that SkyPilot checks it with; a key of neither is refused."""
    task = yaml.safe_load(files(nodes, scheduler="skypilot", accelerator="H100", image=image)["sky.yaml"])
    jsonschema.validate(task, skypilot_schemas.get_task_schema())
    jsonschema.validate(task["resources"], skypilot_schemas.get_resources_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(task | {"nodes": nodes}, skypilot_schemas.get_task_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(task["resources"] | {"gpus": 8}, skypilot_schemas.get_resources_schema())


def test_one_node_asks_for_no_address() -> None:
    launcher = files(nodes=1, scheduler="slurm")["launch.sh"]
    assert "MACHINE_RANK" not in launcher
    assert "#SBATCH --nodes=1\n" in files(nodes=1, scheduler="slurm")["job.sbatch"]
