"""Small models of families other than SmolLM2's, with the tokenizer of the cut SmolLM2, made where torch may be loaded.

Run as: python tiny_models.py KIND SMALL FOLDER [ROWS]; with rows (JSON Lines of chats) the model is taught a little, so
that its loss is well below that of random weights.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from torch_extensions import framework_environment

SIZES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "tie_word_embeddings": False},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True},
    "qwen3_moe": {"num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": 64, "num_experts": 4,
                  "num_experts_per_tok": 2, "decoder_sparse_step": 1},
    "bert": {"max_position_embeddings": 130},
    "roberta": {"max_position_embeddings": 130},
    "modernbert": {"max_position_embeddings": 130},
}  # fmt: skip
ENCODERS = ("bert", "roberta", "modernbert")


def write_tiny(kind: str, small: Path, folder: Path, *, rows: Path | None = None) -> Path:
    """Returns `folder`, which then holds config, weights and tokenizer; made by a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, kind, str(small), str(folder)]
    done = subprocess.run(
        [*command, *([str(rows)] if rows else [])], capture_output=True, text=True, timeout=600,
        env=framework_environment() | {"PYTHONPATH": str(Path(__file__).parent.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def _make(kind: str, small: str, folder: str, rows: str | None) -> None:
    import torch
    from smollm2 import teach
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2 if kind in ENCODERS else 4}
    config = AutoConfig.for_model(
        kind, vocab_size=len(tokenizer), intermediate_size=256, **sizes, **SIZES[kind],
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = (AutoModelForMaskedLM if kind in ENCODERS else AutoModelForCausalLM).from_config(config)
    if rows is not None:
        teach(model, tokenizer, Path(rows))
    model.to(torch.float32 if kind in ENCODERS else torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    _make(*sys.argv[1:4], sys.argv[4] if len(sys.argv) > 4 else None)
