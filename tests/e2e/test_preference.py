"""Preference training really runs: pairs of answers, with a second model, a reference scored ahead, adapters."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest
import yaml
from folder import DATA, Outcome, inspect_model, launch

pytestmark = pytest.mark.slow

_LOAD = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
base, final = sys.argv[1:3]
start = AutoModelForCausalLM.from_pretrained(base).state_dict()
if sys.argv[3] == "full":
    model, report = AutoModelForCausalLM.from_pretrained(final, output_loading_info=True)
    moved = [n for n, t in model.state_dict().items() if not torch.equal(t.float(), start[n].float())]
    print(json.dumps({"problems": len(report["missing_keys"]) + len(report["unexpected_keys"]), "moved": len(moved)}))
else:
    from peft import PeftModel
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), final)
    b = [p for n, p in model.named_parameters() if "lora_B" in n]
    still = sum(not bool(p.any()) for p in b)
    print(json.dumps({"problems": still, "moved": len(b), "adapters": list(model.peft_config)}))
"""


def write_pairs(path: Path, *, chat: bool = True, count: int = 16) -> None:
    """Writes pairs that are easy to tell apart: an answer, and the same words in the reverse order."""
    rows = [json.loads(line)["messages"] for line in DATA.read_text(encoding="utf-8").splitlines()]
    pairs = []
    for question, answer in ((row[-2]["content"][:80], row[-1]["content"][:120]) for row in rows if len(row) > 1):
        turned = " ".join(reversed(answer.split()))
        if turned == answer or len(answer) < 30:
            continue
        texts = {"prompt": question, "chosen": answer, "rejected": turned}
        roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
        pairs.append({key: [{"role": roles[key], "content": text}] if chat else text for key, text in texts.items()})
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs[:count]), encoding="utf-8")


def compile_pairs(
    folder: Path, model: Path, *, method: str, count: int = 1, evaluate: bool = False, **pin: object
) -> Path:
    """Returns the compiled folder of a run over `pairs.jsonl` beside it."""
    rate = 2e-5 if method == "full" else 2e-3
    spec = {
        "model": str(model),
        "task": "dpo",
        "method": method,
        "data": {"train": "pairs.jsonl", "max_length": 64, **({"eval": "pairs.jsonl"} if evaluate else {})},
        "training": {
            "global_batch_size": 4, "max_steps": 6, "save_steps": 4, "learning_rate": rate, "lr_scheduler": "constant",
            "warmup_ratio": 0, "logging_steps": 1, "output_dir": "it", **({"eval_steps": 6} if evaluate else {}),
        },
        "hardware": {"gpu": "rtx-4090", "count": count, "host_memory": "64GiB"},
        "pin": pin,
    }  # fmt: skip
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(spec), encoding="utf-8")
    memc = Path(sys.executable).with_name("memc")
    command = [str(memc), "compile", str(path), "-o", str(folder / "out"), "--no-certify"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "out"


def trained(out: Path) -> Outcome:
    """Returns the outcome of a run whose loss starts where model and reference agree, and falls."""
    outcome = launch(out, out.parent)
    assert outcome.status == 0, outcome.text[-4000:]
    assert len(outcome.losses) == 6
    assert outcome.losses[0] == pytest.approx(math.log(2), abs=2e-3), "model and reference differ before the first step"
    assert mean(outcome.losses[-2:]) < 0.99 * math.log(2), outcome.losses
    return outcome


@pytest.mark.parametrize("reference", ["model", "precomputed"])
def test_all_weights(tmp_path: Path, small: Path, reference: str) -> None:
    write_pairs(tmp_path / "pairs.jsonl")
    out = compile_pairs(tmp_path, small, method="full", evaluate=True, reference=reference, activation_checkpointing=2)
    outcome = trained(out)
    assert "eval_rewards/margins" in outcome.text
    found = inspect_model(_LOAD, str(small), str(tmp_path / "it" / "final"), "full")
    assert found["problems"] == 0
    assert found["moved"] > 10


def test_adapters_are_switched_off_for_the_reference_and_the_run_resumes(tmp_path: Path, small: Path) -> None:
    write_pairs(tmp_path / "pairs.jsonl", chat=False)
    out = compile_pairs(tmp_path, small, method="lora", activation_checkpointing=True)
    trained(out)
    found = inspect_model(_LOAD, str(small), str(tmp_path / "it" / "final"), "lora")
    assert found == {"problems": 0, "moved": 4 * 7, "adapters": ["default"]}
    again = launch(out, tmp_path, "--resume", "--max-steps", "7")
    assert again.status == 0, again.text[-4000:]
    assert len(again.losses) == 1


@pytest.mark.parametrize("method", ["full", "lora"])
def test_two_processes_partition_model_and_reference(tmp_path: Path, small: Path, method: str) -> None:
    write_pairs(tmp_path / "pairs.jsonl")
    out = compile_pairs(tmp_path, small, method=method, count=2, zero_stage=3, activation_checkpointing=True)
    trained(out)
    found = inspect_model(_LOAD, str(small), str(tmp_path / "it" / "final"), method)
    assert found["problems"] == 0


def test_a_probe_of_random_weights_scores_pairs(tmp_path: Path, small: Path) -> None:
    out = compile_pairs(tmp_path, small, method="full")
    outcome = launch(out, tmp_path, "--probe", "probe", "--max-steps", "2", "--random-weights")
    assert outcome.status == 0, outcome.text[-4000:]
    report = json.loads((tmp_path / "probe" / "rank0.json").read_text(encoding="utf-8"))
    assert report["error"] is None
    assert len(report["losses"]) == 2


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "chosen": "b"}, ":3 has no usable `chosen` and `rejected`"),
        ({"prompt": "a", "chosen": [{"role": "assistant", "content": "b"}], "rejected": "c"}, ":3: prompt and chosen"),
        ({"chosen": "b", "rejected": "c"}, ":3 has chosen and rejected and as text, the rows before it have"),
    ],
    ids=["missing", "mixed", "other-kind"],
)
def test_a_row_that_is_no_pair_is_named(tmp_path: Path, small: Path, row: dict[str, object], said: str) -> None:
    path = tmp_path / "pairs.jsonl"
    write_pairs(path, chat=False, count=2)
    path.write_text(path.read_text(encoding="utf-8") + json.dumps(row) + "\n", encoding="utf-8")
    outcome = launch(compile_pairs(tmp_path, small, method="full"), tmp_path)
    assert outcome.status != 0
    assert said in outcome.text
