"""The lint of files that memc never wrote: each thing it says, at its place, and not a word once it is mended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from inprocess import SMALL, command_runner
from memc.facts.documents import read_spec
from memc.lint import Given, Kind, Linted, lint_path
from memc.lint.gather import files_below, read_files, runs_in
from memc.lint.requirements import planned_versions
from memc.lint.settings import successors, table
from memc.rules import load_rules

CASES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("lint_folders.yaml").read_text())
DOCUMENTED = yaml.safe_load((Path(__file__).parents[2] / "docs/errors.yaml").read_text())
STRANGERS = "Files that memc never wrote"


def written(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def linted(folder: Path, case: Mapping[str, Any]) -> Linted:
    return lint_path(folder, Given(**case.get("given", {})))


def told(found: Linted, folder: Path) -> list[str]:
    return [
        f"{remark.weight} {remark.code} {remark.place.path.relative_to(folder)}:{remark.place.line}"
        for remark in found.remarks
    ]


@pytest.mark.parametrize("name", CASES)
def test_it_is_said_at_its_place_and_not_once_it_is_mended(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    written(tmp_path, case["files"])
    assert set(case["finds"]) <= set(told(linted(tmp_path, case), tmp_path))
    path, before, after = case["mend"]
    text = (tmp_path / path).read_text()
    assert before in text
    (tmp_path / path).write_text(text.replace(before, after))
    levels_and_codes = {found.rpartition(" ")[0] for found in case["finds"]}
    assert not levels_and_codes & {said.rpartition(" ")[0] for said in told(linted(tmp_path, case), tmp_path)}


def test_everything_that_can_be_said_has_a_case() -> None:
    said = {found.split()[1] for case in CASES.values() for found in case["finds"]}
    rules = set(read_spec("rules", "files")["rules"])
    codes = {code for code, entry in DOCUMENTED.items() if entry["area"] == STRANGERS}
    assert rules | codes <= said
    assert not rules & {rule.id for rule in load_rules("combinations")}


def test_every_finding_names_both_places(tmp_path: Path) -> None:
    written(tmp_path, CASES["files-disagree"]["files"])
    (remark,) = linted(tmp_path, CASES["files-disagree"]).remarks
    assert (remark.place.path.name, remark.place.line, remark.place.column) == ("ds.json", 1, 86)
    assert [(other.path.name, other.line, other.column) for other in remark.others] == [("args.yaml", 1, 1)]
    assert remark.message == (
        "optimizer.params.lr is 0.0001 in ds.json, learning_rate is 5e-05 in args.yaml: "
        "the trainer stops at the difference"
    )


@pytest.mark.parametrize(
    ("passed", "counts"),
    [("--deepspeed ds.json", "ds.json counts, so it is 2"), ("", "the command line counts, so it is 3")],
)
def test_the_stage_that_counts_is_the_files_where_the_run_reads_it(passed: str, counts: str, tmp_path: Path) -> None:
    files = {
        "ds.json": '{"train_batch_size": "auto", "zero_optimization": {"stage": 2}}',
        "train.sh": f"accelerate launch --use_deepspeed --zero_stage 3 --num_processes 2 train.py {passed}\n",
        "accelerate.yaml": "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {zero_stage: 1}\n",
    }
    said = [remark.message for remark in lint_path(written(tmp_path, files), Given()).remarks]
    assert any(message.endswith(counts) for message in said), said


@pytest.mark.parametrize(
    ("span", "version"),
    [
        ("==4.45.1", "4.45.1"), (">=4.40,<4.46", "4.45.2"), ("~=4.44.0", "4.44.2"), ("==4.46.*", "4.46.3"),
        ("<=4.52.4", "4.52.4"), (">=5,!=5.24.0", "5.20.2"), ("", None), ("@ git+https://x", None),
    ],
)  # fmt: skip
def test_a_range_stands_for_the_newest_version_that_is_known(tmp_path: Path, span: str, version: str | None) -> None:
    written(tmp_path, {"requirements.txt": f"# pins\nTransformers{span}  # why\nnumpy==1\n"})
    documents = read_files([tmp_path / "requirements.txt"]).documents
    found = planned_versions(documents, {})["transformers"]
    assert (found.text if found.place is not None else None) == version
    assert planned_versions(documents, {"transformers": "9"})["transformers"].told == "given"


def test_names_by_version() -> None:
    arguments = table("training-arguments")
    assert arguments.has("evaluation_strategy", "4.45.0")
    assert not arguments.has("evaluation_strategy", "5.24.0")
    assert arguments.has("eval_strategy", "4.43.1")  # between two that were read
    assert arguments.default("per_device_eval_batch_size", "5.24.0") == 8
    assert not arguments.has("no_such_name", "5.24.0")


@pytest.mark.parametrize("package", ["transformers", "trl", "accelerate", "deepspeed"])
def test_successors_exist_and_what_they_replace_is_gone(package: str) -> None:
    keys = ("training-arguments", "sft-config", "dpo-config", "model-config", "accelerate-config", "accelerate-launch")
    tables = [known for known in map(table, (*keys, "deepspeed-zero", "deepspeed")) if known.package == package]
    for old, successor in successors(package).items():
        newest = {known.key: known.versions[-1] for known in tables}
        assert not any(known.has(old, newest[known.key]) for known in tables), old
        if successor.new and old != "tokenizer":
            assert any(known.has(successor.new, newest[known.key]) for known in tables) or successor.new == "dtype", old


def test_what_a_launcher_passes_on_is_read(tmp_path: Path) -> None:
    script = """\
    #!/bin/bash
    GPUS=4
    CONFIG="configs/ds.json"   # which one
    if true; then
      exec python -m torch.distributed.run --nproc_per_node "$GPUS" \\
        train.py --deepspeed ${CONFIG} --learning_rate=1e-4 --bf16 --weight_decay -0.1 && echo done
    fi
    """
    written(tmp_path, {"go": script.replace("    #!", "#!"), "configs/ds.json": '{"train_batch_size": 8, "fp16": {}}'})
    documents = lint_path(tmp_path, Given()).documents
    assert [document.kind for document in documents] == [Kind.LAUNCH, Kind.ARGUMENTS, Kind.DEEPSPEED]
    launch, arguments = documents[:2]
    assert launch.value("nproc_per_node") == 4
    assert launch.extra["script"] == "train.py"
    assert arguments.value("learning_rate") == 1e-4
    assert arguments.value("bf16") is True
    assert arguments.value("weight_decay") == -0.1
    (run,) = runs_in(documents, tmp_path)
    assert len(run.documents) == 3


def test_files_that_belong_to_different_runs_are_not_held_against_each_other(tmp_path: Path) -> None:
    one, other = (
        {"ds.json": json.dumps({"train_micro_batch_size_per_gpu": size, "zero_optimization": {"stage": 1}}),
         "args.yaml": f"per_device_train_batch_size: {size}\nper_device_eval_batch_size: {size}\nbf16: true\n"}
        for size in (2, 4)
    )  # fmt: skip
    written(tmp_path / "one", one)
    written(tmp_path / "other", other)
    assert lint_path(tmp_path, Given()).remarks == ()


def test_classes_of_somebody_else_are_not_taken_for_those_of_a_library(tmp_path: Path) -> None:
    script = "from mine import TrainingArguments\nTrainingArguments(evaluation_strategy='no', learning_rate=1)\n"
    written(tmp_path, {"train.py": script})
    assert lint_path(tmp_path, Given()).documents == ()


def test_a_configuration_that_is_in_order_is_not_remarked_upon(tmp_path: Path) -> None:
    files = {
        "accelerate.yaml": "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_machines: 1\n"
        "num_processes: 8\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n  zero3_init_flag: true\n",
        "ds.json": json.dumps({
            "bf16": {"enabled": "auto"}, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 10,
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}},
            "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": "auto",
                                  "stage3_gather_16bit_weights_on_model_save": True},
        }),
        "args.yaml": "model_name_or_path: meta-llama/Llama-3.1-8B\noutput_dir: out\nbf16: true\nlearning_rate: 2.0e-5\n"
        "per_device_train_batch_size: 2\nper_device_eval_batch_size: 2\ngradient_accumulation_steps: 4\n"
        "max_length: 4096\npacking: true\nsave_steps: 100\neval_strategy: 'no'\nlogging_steps: 10\n",
        "train.sh": "accelerate launch --config_file accelerate.yaml train.py --config args.yaml\n",
    }  # fmt: skip
    written(tmp_path, files)
    given = Given(gpu="h100-sxm5-80gb", gpus_per_node=8, nodes=1, versions={"transformers": "5.24.0", "trl": "1.16.0"})
    assert lint_path(tmp_path, given).remarks == ()


@pytest.mark.parametrize("form", ["text", "json", "github", "sarif"])
def test_every_format_carries_both_places(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(written(tmp_path, CASES["files-disagree"]["files"]))
    done = command_runner(capsys)("check", ".", "--format", form)
    assert done.code == 4
    assert "files-disagree" in done.out
    assert "args.yaml" in done.out
    if form == "sarif":
        (result,) = json.loads(done.out)["runs"][0]["results"]
        place = result["locations"][0]["physicalLocation"]
        assert place == {"artifactLocation": {"uri": "ds.json"}, "region": {"startLine": 1, "startColumn": 86}}
        (related,) = result["relatedLocations"]
        assert related["physicalLocation"]["artifactLocation"]["uri"] == "args.yaml"
    if form == "json":
        (finding,) = json.loads(done.out)["folders"][0]["findings"]
        assert (finding["line"], finding["column"]) == (1, 86)
        assert finding["related"] == [{"path": "args.yaml", "line": 1, "column": 1}]


def test_options_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"args.yaml": "per_device_train_batch_size: 8\nevaluation_strategy: steps\nbf16: true\n"}
    monkeypatch.chdir(written(tmp_path, files))
    run = command_runner(capsys)
    assert run("check", "args.yaml", "--with", "transformers==4.45.2").code == 0
    assert "no evaluation_strategy" in run("check", "args.yaml", "--with", "transformers==5.3.0").out
    assert "has no bf16" in run("check", ".", "--with", "transformers==4.45.2", "--gpu", "t4").out
    assert run("check", ".", "--gpu", "no-such-card").code == 2
    assert run("check", ".", "--with", "transformers").code == 2


def test_a_folder_of_memcs_own_is_linted_once_somebody_edited_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = command_runner(capsys)
    Path("spec.yaml").write_text(SMALL)
    assert run("compile", "spec.yaml", "--no-certify").code == 0
    config = Path("out/peft_config.json")
    config.write_text(config.read_text().replace('"q_proj"', '"query"').replace('"v_proj"', '"value"'))
    script = Path("out/train.py")
    script.write_text(script.read_text().replace("max_grad_norm=", "max_gradd_norm="))
    done = run("check", "--json", "out")
    (folder,) = json.loads(done.out)["folders"]
    found = {(finding["code"], Path(finding["path"]).name) for finding in folder["findings"]}
    assert found >= {("edited", "train.py"), ("no-such-module", "peft_config.json"), ("setting-unknown", "train.py")}
    assert folder["linted"] == 0


def test_folders_that_memc_wrote_cost_the_lint_nothing(tmp_path: Path) -> None:
    """The lint reads what lies outside of memc's folders, and there it looks no further into specs."""
    root = tmp_path / "tree"
    for number in range(20):
        (root / str(number) / "out").mkdir(parents=True)
        (root / str(number) / "spec.yaml").write_text(SMALL)
        (root / str(number) / "out" / "memc.lock").write_text("{}")
        (root / str(number) / "out" / "ds_config.json").write_text('{"train_batch_size": 1, "fp16": {}')
    below = [root / str(number) / "out" for number in range(20)]
    assert list(files_below(root, below)) == sorted(root.glob("*/spec.yaml"))
    assert lint_path(root, Given(), below) == Linted(documents=(), remarks=())
