"""A process that loads what runs have written and says what is in it; started once, asked once for each run.

Reads lines `[base folder, written folder]` from standard input; answers each with one JSON line after ANSWER.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from torch_extensions import framework_environment


class Loader:
    """The process, seen from the tests."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def ask(self, base: Path, written: Path) -> dict[str, Any]:
        """Returns what the loading libraries make of `written`; `base` is the model it was trained from."""
        if self.process is None:
            command = [sys.executable, "-W", "ignore", str(Path(__file__)), "serve"]
            paths = f"{Path(__file__).parent.parent}"
            environment = framework_environment() | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([str(base), str(written)]), file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                answer: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
                return answer
        raise AssertionError("the loader ended without an answer")

    def close(self) -> None:
        """Ends the process."""
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait(timeout=60)
            assert self.process.stdout is not None
            self.process.stdout.close()


def _sorts(written: Path) -> bool:
    """Whether what was written sorts texts into classes."""
    adapters, config = written / "adapter_config.json", written / "config.json"
    if adapters.is_file():
        return bool(json.loads(adapters.read_text(encoding="utf-8"))["task_type"] == "SEQ_CLS")
    return "ForSequenceClassification" in json.loads(config.read_text(encoding="utf-8"))["architectures"][0]


def _auto_class(base: Path, written: Path) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

    if "vision_config" in json.loads((base / "config.json").read_text(encoding="utf-8")):
        return AutoModelForImageTextToText
    return AutoModelForSequenceClassification if _sorts(written) else AutoModelForCausalLM


def _adapters(base: Path, written: Path) -> dict[str, Any]:
    from peft import PeftModel
    from transformers import AutoTokenizer

    model: Any = PeftModel.from_pretrained(_auto_class(base, written).from_pretrained(base), written)
    second = [parameter for name, parameter in model.named_parameters() if "lora_B" in name]
    ids = AutoTokenizer.from_pretrained(written)("The capital of France is", return_tensors="pt")
    return {
        "lora_B": len(second),
        "non_zero": sum(bool(parameter.any()) for parameter in second),
        "finite": bool(model(**ids).logits.isfinite().all()),
    }


def _model(base: Path, written: Path) -> dict[str, Any]:
    from transformers import AutoTokenizer

    model, report = _auto_class(base, written).from_pretrained(written, output_loading_info=True)
    before = _auto_class(base, written).from_pretrained(base).state_dict()
    moved = [name for name, tensor in model.state_dict().items() if not tensor.float().equal(before[name].float())]
    AutoTokenizer.from_pretrained(written)
    return {
        "missing": len(report["missing_keys"]),
        "unexpected": len(report["unexpected_keys"]),
        "tensors": len(before),
        "moved": len(moved),
        "finite": all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values()),
    }


def _serve() -> None:
    for line in sys.stdin:
        base, written = map(Path, json.loads(line))
        try:
            adapters = (written / "adapter_config.json").is_file()
            answer = _adapters(base, written) if adapters else _model(base, written)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print("ANSWER " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
