"""Small models that read images, with the tokenizer of the cut SmolLM2, and rows of drawn images to train them on.

Run as: python tiny_pictures.py KIND SMALL FOLDER ROWS, where torch and transformers may be loaded; the language model
is taught a little on rows of chats, so that its loss is below that of random weights.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from torch_extensions import framework_environment

DATA = Path(__file__).resolve().parents[2] / "examples" / "data" / "self-instruct-seed.jsonl"
SIDE, PATCH = 56, 14
TEXT: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "image_size": SIDE, "patch_size": PATCH,
}  # fmt: skip
WORDS = {
    "llava": {"image": "<image>"},
    "gemma3": {"image": "<image_soft_token>", "boi": "<start_of_image>", "eoi": "<end_of_image>"},
    "qwen2_5_vl": {
        "image": "<|image_pad|>",
        "video": "<|video_pad|>",
        "start": "<|vision_start|>",
        "end": "<|vision_end|>",
    },
}
SHOWN = {"llava": "<image>", "gemma3": "<start_of_image>", "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>"}
TOKENS_OF_AN_IMAGE = {"llava": (SIDE // PATCH) ** 2, "gemma3": 4}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}SHOWN"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COLOURS = ("red", "green", "blue", "white")


def write_pictures(kind: str, small: Path, folder: Path) -> Path:
    """Returns `folder`, which then holds config, random weights and processor; made by a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, kind, str(small), str(folder), str(DATA)],
        capture_output=True, text=True, timeout=600,
        env=framework_environment() | {"PYTHONPATH": str(Path(__file__).parent.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def write_picture_rows(place: Path, count: int, *, form: str = "parts", images: int = 1) -> None:
    """Writes rows.jsonl and the images that it names: plain colours, with the name of the colour as the answer.

    A `form` is `parts` (turns of parts), `turns` (turns of text), `pair` (prompt and completion) or `inline` (the parts
    name the files themselves).
    """
    from PIL import Image

    (place / "pictures").mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        colour, names = COLOURS[number % 2], []
        for index in range(images):
            names.append(f"pictures/{colour}-{number % 2}-{index}.png")
            if not (place / names[-1]).exists():
                Image.new("RGB", (80 + 40 * index, 60 + 30 * (number % 2)), colour).save(place / names[-1])
        shown: list[dict[str, Any]] = [{"type": "image"}] * images
        if form == "inline":
            shown = [{"type": "image", "image": name} for name in names]
        asked: Any = "Which colour is this?"
        if form in ("parts", "inline"):
            asked = [*shown, {"type": "text", "text": asked}]
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": f"It is {colour}."}]
        row: dict[str, Any] = {"prompt": turns[:1], "completion": turns[1:]} if form == "pair" else {"messages": turns}
        rows.append(row if form == "inline" else {**row, "images": names})
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _processor(kind: str, small: str) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small)
    words = WORDS[kind]
    tokenizer.add_special_tokens({"additional_special_tokens": list(words.values())})
    template = TEMPLATE.replace("SHOWN", SHOWN[kind])
    if kind == "llava":
        from transformers import LlavaProcessor
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        pixels = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
        return LlavaProcessor(
            pixels, tokenizer, patch_size=PATCH, vision_feature_select_strategy="default",
            num_additional_image_tokens=1, chat_template=template,
        )  # fmt: skip
    if kind == "gemma3":
        from transformers import Gemma3Processor
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        tokenizer = AutoTokenizer.from_pretrained(
            small, extra_special_tokens={f"{name}_token": word for name, word in words.items()}
        )
        pixels = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
        return Gemma3Processor(pixels, tokenizer, image_seq_length=TOKENS_OF_AN_IMAGE[kind], chat_template=template)
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    return Qwen2_5_VLProcessor(Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor(), chat_template=template)


def _config(kind: str, tokenizer: Any) -> Any:
    from transformers import AutoConfig

    words = WORDS[kind]
    numbers = {name: tokenizer.convert_tokens_to_ids(word) for name, word in words.items()}
    ends = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    text = {**TEXT, "vocab_size": len(tokenizer), **ends}
    if kind == "llava":
        return AutoConfig.for_model(
            "llava", text_config={"model_type": "llama", **text}, image_token_index=numbers["image"],
            vision_config={"model_type": "clip_vision_model", "projection_dim": 64, **TOWER}, tie_word_embeddings=False,
        )  # fmt: skip
    if kind == "gemma3":
        more = {"head_dim": 32, "sliding_window": 64, "sliding_window_pattern": 2, "query_pre_attn_scalar": 32}
        return AutoConfig.for_model(
            "gemma3", text_config={"model_type": "gemma3_text", **text, **more},
            vision_config={"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER},
            mm_tokens_per_image=TOKENS_OF_AN_IMAGE[kind], image_token_index=numbers["image"],
            boi_token_index=numbers["boi"], eoi_token_index=numbers["eoi"], **ends,
        )  # fmt: skip
    rotary = {"rope_type": "default", "mrope_section": [4, 6, 6], "type": "mrope"}
    return AutoConfig.for_model(
        "qwen2_5_vl", text_config={**text, "rope_scaling": rotary, "tie_word_embeddings": False},
        vision_config={"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 128,
                       "fullatt_block_indexes": [1]},
        image_token_id=numbers["image"], video_token_id=numbers["video"], vision_start_token_id=numbers["start"],
        vision_end_token_id=numbers["end"], tie_word_embeddings=False,
    )  # fmt: skip


def _make(kind: str, small: str, folder: str, rows: str) -> None:
    import torch
    from smollm2 import teach
    from transformers import AutoModelForImageTextToText

    processor = _processor(kind, small)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(_config(kind, processor.tokenizer))
    teach(model, processor.tokenizer, Path(rows))
    model.to(torch.bfloat16).save_pretrained(folder)
    processor.save_pretrained(folder)


if __name__ == "__main__":
    _make(*sys.argv[1:5])
