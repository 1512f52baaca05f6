"""From a report's sketch of a run to specs: the run as it was asked for, and what of it memc may decide.

A sketch names a card by vendor words and gigabytes, a model by family and dimensions, and a few training arguments in
neutral words. Everything is read by rule; what has no place in a spec is said, not guessed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from memc.facts import GpuFacts, ModelFacts, gpu_rows, load_gpu, load_model, load_model_config, model_rows
from memc.facts.records import Sees
from memc.facts.vocabulary import vocabulary_modules
from memc.spec_fields import Libraries
from memc.units import GB

from reported.scaling import scaled

_FORM_FACTORS = ("sxm", "pcie", "nvl")
_SAME_FAMILY = {
    "gemma": ("gemma", "gemma2", "gemma3_text", "gemma3"),
    "qwen": ("qwen2",),
    "mistral": ("mistral", "llama"),
    "yi": ("llama",),
}
_VENDORS = ("nvidia", "geforce", "tesla", "amd", "instinct")
_TOLERANCE = 0.04
_TILES_SINCE = 2026  # TRL 1.x
_EMBEDDINGS = ("wte", "embed_tokens", "word_embeddings", "tok_embeddings", "embed_in", "embedding", "embeddings")
_HEADS = ("lm_head", "embed_out", "output_layer", "output", "head")
_MOST_NEW_TOKENS = 200  # that a spec can name
_BITSANDBYTES = ("adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit")
_PRECISION = {
    "bf16": "bf16",
    "bf16-mixed": "bf16",
    "mixed-bf16": "bf16",
    "bf16_mixed": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "fp16-mixed": "fp16",
    "float16": "fp16",
    "fp32": "fp32",
    "float32": "fp32",
    "tf32": "fp32",
    "pure-bf16": "bf16_pure",
    "bf16-pure": "bf16_pure",
    "pure_bf16": "bf16_pure",
}
_OPTIMIZER = {
    "adamw": "adamw_torch_fused",
    "adam": "adamw_torch_fused",
    "adamw_torch_fused": "adamw_torch_fused",
    "adamw_fused": "adamw_torch_fused",
    "adamw_torch": "adamw_torch",
    "adamw_hf": "adamw_torch",
    "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "8bit-adam": "adamw_8bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "paged_adamw_32bit": "paged_adamw_32bit",
    "paged_adamw": "paged_adamw_32bit",
}
_ATTENTION = {
    "eager": "eager",
    "sdpa": "sdpa",
    "flash": "sdpa",
    "flash_attention_2": "flash_attention_2",
    "flash2": "flash_attention_2",
}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a report's sketch became.

    Attributes:
        asked: The spec with everything that the sketch fixes as a pin; None when the sketch names no run.
        open: The same with engine, sharding, states, offload and checkpointing left to memc.
        model: Facts of the model; None when the sketch names none that can be planned.
        notes: What was substituted.
        waits: Why the sketch cannot be planned, or not wholly: what memc has no words for yet.
        stands_in: What the sketch leaves out and something usual stands in for: only what files hold whatever the
            model and the card are can be asked then.
    """

    asked: dict[str, Any] | None
    open: dict[str, Any] | None
    model: ModelFacts | None
    notes: tuple[str, ...] = ()
    waits: tuple[str, ...] = ()
    stands_in: tuple[str, ...] = ()


@dataclass
class _Notes:
    notes: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)


def read(report: Mapping[str, Any], folder: Path) -> Reading:
    """Returns the specs of a report.

    Args:
        report: One entry of the collection.
        folder: Where a config.json may be written for a model that the catalogue does not have.
    """
    sketch, said = report.get("spec") or {}, _Notes()
    sketch, stands_in = _completed(sketch)
    training = sketch.get("training") or {}
    name = _model(sketch["model"], folder, said)
    if name is None:
        return Reading(asked=None, open=None, model=None, notes=tuple(said.notes), waits=tuple(said.waits))
    name = _long_enough(name, training, folder, said)
    model = load_model(name, base_dir=folder)
    hardware, cards = _hardware(sketch["hardware"], said)
    asked: dict[str, Any] = {"model": name, "data": _data(training), "hardware": hardware}
    asked["method"] = str(training.get("method", "full")).lower()
    if libraries := releases(sketch):
        asked["libraries"] = libraries
    if asked["method"] not in ("full", "lora", "qlora"):
        said.waits.append(f"method {asked['method']} has no place in a spec")
        asked["method"] = "full"
    micro, accumulation = _count(training, "micro_batch", "batch"), _count(training, "grad_accum", "accumulation")
    asked["training"] = {"global_batch_size": (micro or 1) * (accumulation or 1) * cards, "epochs": 1}
    asked["task"] = "pretrain" if str(training.get("trainer", "")).endswith("transformers.Trainer") else "sft"
    if _objective(training, asked, said):
        micro = 2 * (micro or 1)
        asked["training"]["global_batch_size"] *= 2
    asked["data"] |= {"samples": 10_000, **_images(training)}
    if any(stack.sees is Sees.IMAGE for stack in model.other_stacks):
        asked["data"]["packing"] = False  # which TRL refuses of images
    lora: dict[str, Any] = (
        {"rank": _count(training, "lora_r", "lora_rank", "rank")} if asked["method"] != "full" else {}
    )
    whole, new = _vocabulary(training, model, said)
    if asked["method"] == "full" and (whole or new):
        said.waits.append("modules_to_save and new_tokens have no place in a spec without adapters")
        whole, new = [], []
    lora |= {"modules_to_save": whole} if whole else {"new_tokens": new}
    if any(lora.values()):
        asked["lora"] = {name: value for name, value in lora.items() if value}
    _steps(training, asked)
    asked["pin"] = _pins(training, micro, accumulation, hardware, said)
    asked["pin"] |= _from_artifacts(sketch.get("artifacts") or {}, asked["pin"], hardware)
    if _materialises_logits(report):
        if asked["task"] == "dpo":
            said.waits.append("a trainer of pairs that holds all logits at once has no place in a spec")
        else:
            asked["pin"]["loss"] = "plain"
    if asked["pin"].get("engine") == "fsdp" and asked["pin"].get("optimizer") in _BITSANDBYTES:
        asked["pin"]["fsdp_version"] = 1  # the only one that such optimizers go with
    return Reading(
        asked=asked,
        open=_opened(asked, new),
        model=model,
        notes=tuple(said.notes),
        waits=tuple(said.waits),
        stands_in=stands_in,
    )


def _completed(sketch: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns a sketch with a usual model and card where it names none, and what was put in."""
    accelerate = (sketch.get("artifacts") or {}).get("accelerate") or {}
    processes, machines = _count(accelerate, "num_processes"), _count(accelerate, "num_machines") or 1
    distributed = str(accelerate.get("distributed_type", "NO")).upper() != "NO"
    cards = (processes or 8) // machines if distributed or (processes or 1) > 1 else 1
    usual = {
        "model": {"arch": "llama", "params_b": 6.738},
        "hardware": {"gpu": "A100-80GB", "gpus_per_node": max(1, cards), "nodes": machines},
    }
    missing = tuple(name for name in usual if not isinstance(sketch.get(name), Mapping))
    return {**sketch, **{name: usual[name] for name in missing}}, missing


def _images(training: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a sketch says of images: how many a sample has, and the pixels of one where they are limited."""
    found: dict[str, Any] = {}
    if training.get("images_per_sample") is not None:
        found["images_per_sample"] = int(training["images_per_sample"])
    pixels = training.get("image_px")
    if isinstance(pixels, int):
        found["image_pixels"] = pixels
    elif isinstance(pixels, str) and (sides := re.findall(r"\d+", pixels)):
        found["image_pixels"] = math.prod(int(side) for side in sides[:2])
    return found


def releases(sketch: Mapping[str, Any]) -> dict[str, str]:
    """Returns the releases of a sketch that a spec can name, by package."""
    named = {str(name): str(release) for name, release in (sketch.get("libs") or {}).items()}
    return {
        name: release
        for name, release in named.items()
        if name in Libraries.model_fields and re.fullmatch(r"[0-9]+(\.[0-9]+)+", release)
    }


def _materialises_logits(report: Mapping[str, Any]) -> bool:
    """Whether the report's libraries are from before trainers computed the loss in tiles by themselves."""
    conditions = report.get("conditions") or {}
    libraries = f"{conditions.get('libs', '')} {report.get('source', '')}".lower()
    years = [int(year) for year in re.findall(r"\b(20[12]\d)\b", libraries)]
    fused = re.search(r"unsloth|liger|cut.cross|fused.loss|chunked.loss", libraries)
    return bool(years) and max(years) < _TILES_SINCE and not fused


def _from_artifacts(
    artifacts: Mapping[str, Any], pins: Mapping[str, Any], hardware: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns what files that the report shows say of the engine, where its arguments do not."""
    accelerate, deepspeed = artifacts.get("accelerate") or {}, artifacts.get("ds_config") or {}
    found: dict[str, Any] = {}
    if pins.get("engine") or pins.get("zero_stage") is not None or hardware["count"] * hardware["nodes"] == 1:
        return found
    if str(accelerate.get("distributed_type", "")).upper() == "FSDP":
        found["engine"] = "fsdp"
    inline = accelerate.get("deepspeed_config") or {}
    stage = (deepspeed.get("zero_optimization") or {}).get("stage", inline.get("zero_stage"))
    if isinstance(stage, int):
        found["zero_stage"] = stage
    elif str(accelerate.get("distributed_type", "")).upper() == "DEEPSPEED":
        found["engine"] = "deepspeed"
    return found


def _opened(asked: dict[str, Any], new_tokens: list[str]) -> dict[str, Any]:
    """Returns the spec with engine, sharding, states, offload, checkpointing and releases left to memc.

    Where modules train whole for the sake of tokens that are new, how those train is left open, too.
    """
    free, pin = deepcopy(asked), asked["pin"]
    free.pop("libraries", None)
    if new_tokens:
        free["lora"].pop("modules_to_save", None)
        free["lora"]["new_tokens"] = new_tokens
    fixed = {
        "micro_batch_size": pin.get("micro_batch_size") == 1,  # it cannot be lowered; a larger one may be
        "precision": True,
    }
    free["pin"] = {name: pin[name] for name, keep in fixed.items() if keep and name in pin}
    if pin.get("precision") == "bf16" and not load_gpu(asked["hardware"]["gpu"]).bf16:
        del free["pin"]["precision"]  # a card that cannot is a reason to choose another
    return free


def _pins(
    training: Mapping[str, Any],
    micro: int | None,
    accumulation: int | None,
    hardware: Mapping[str, Any],
    said: _Notes,
) -> dict[str, Any]:
    """Returns what the sketch fixes."""
    pins: dict[str, Any] = {}
    if micro:
        pins["micro_batch_size"] = micro
    if accumulation:
        pins["gradient_accumulation_steps"] = accumulation
    for key, name, known in (
        ("precision", "precision", _PRECISION),
        ("optimizer", "optimizer", _OPTIMIZER),
        ("attention", "attention", _ATTENTION),
    ):
        value = training.get(key)
        if value is None:
            continue
        if str(value).lower() in known:
            pins[name] = known[str(value).lower()]
        else:
            said.waits.append(f"{key} {value} has no place in a spec")
    if training.get("gradient_checkpointing") is not None:
        pins["activation_checkpointing"] = bool(training["gradient_checkpointing"])
    pins |= _engine(training, hardware)
    return pins


def _objective(training: Mapping[str, Any], asked: dict[str, Any], said: _Notes) -> bool:
    """Writes the task that a sketch's objective is, where it names one; returns whether a sample stands for two."""
    objective = str(training.get("objective") or "").lower()
    if objective == "dpo":
        asked["task"], asked["data"]["packing"] = "dpo", False
    elif objective in ("orpo", "kto"):
        # One model with as many tokens in flight, its gradients those of plain text.
        asked["task"] = "pretrain"
        said.waits.append(f"objective {objective} has no place in a spec")
        said.notes.append("preference pairs: planned as twice the samples, without a reference model")
        return True
    elif objective in ("pretrain", "clm", "causal_lm"):
        asked["task"] = "pretrain"
    elif objective not in ("", "sft"):
        said.waits.append(f"objective {objective} has no place in a spec")
    return False


def _vocabulary(training: Mapping[str, Any], model: ModelFacts, said: _Notes) -> tuple[list[str], list[str]]:
    """Returns the modules that a sketch trains whole beside adapters, by the model's names, and its new tokens."""
    names, whole = vocabulary_modules(model.model_type), []
    stated = training.get("modules_to_save") or []
    for module in re.split(r"[,\s]+", stated) if isinstance(stated, str) else map(str, stated):
        last = module.rpartition(".")[2]
        if last == names.head or last in _HEADS:
            whole.append(names.head)
        elif last == names.embedding or last in _EMBEDDINGS:
            whole.append(names.embedding)
        else:
            said.waits.append(f"{module} among modules_to_save has no place in a spec")
    new = training.get("new_tokens") or []
    if not isinstance(new, list):
        new = [f"<new-{index}>" for index in range(_count(training, "new_tokens") or 0)]
    if len(new) > _MOST_NEW_TOKENS:
        said.waits.append(f"new_tokens: {len(new)} of them have no place in a spec")
    return list(dict.fromkeys(whole)), list(dict.fromkeys(map(str, new)))[:_MOST_NEW_TOKENS]


def _engine(training: Mapping[str, Any], hardware: Mapping[str, Any]) -> dict[str, Any]:
    engine = str(training.get("engine", "")).lower().replace("-", "").replace("_", "").replace(" ", "")
    pins: dict[str, Any] = {}
    stage = re.search(r"(?:zero|deepspeed|stage)\D*([0-3])", engine)
    several = hardware["count"] * hardware["nodes"] > 1
    if stage:
        pins["zero_stage"] = int(stage.group(1))
    elif engine.startswith("fsdp") and several:
        pins["engine"] = "fsdp"
    elif engine in ("ddp", "single"):
        pins["engine"] = "ddp" if several else "single"
    for key in ("offload_optimizer", "offload_param"):
        if training.get(key) is not None:
            pins[key] = str(training[key]).lower()
    if pins.get("zero_stage") is not None:
        pins.setdefault("offload_optimizer", "none")
        pins.setdefault("offload_param", "none")
        if training.get("method", "full") == "full" and pins["zero_stage"]:
            pins["bf16_master_weights"] = False  # DeepSpeed's masters are fp32 unless somebody asks for others
    return pins


def _steps(training: Mapping[str, Any], asked: dict[str, Any]) -> None:
    for key in ("save_steps", "eval_steps"):
        steps = _count(training, key)
        if steps:
            asked["training"][key] = steps
    if "eval_steps" in asked["training"]:
        asked["data"]["eval"] = "eval.jsonl"


def _count(source: Mapping[str, Any], *keys: str) -> int | None:
    for key in keys:
        value = source.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 1:
            return int(value)
        if isinstance(value, str) and value.strip().isdigit():
            return int(value)
    return None


def _data(training: Mapping[str, Any]) -> dict[str, Any]:
    return {"train": "train.jsonl", "max_length": _length(training), "packing": True}


def _length(training: Mapping[str, Any]) -> int:
    return _count(training, "seq_len", "max_length", "seq") or 2048


def _long_enough(name: str, training: Mapping[str, Any], folder: Path, said: _Notes) -> str:
    """Returns the model, with as many positions as the report's length needs: such runs stretch them."""
    length, positions = _length(training), load_model(name, base_dir=folder).max_position_embeddings
    if positions is None or length <= positions:
        return name
    said.notes.append(f"{length} tokens are beyond the {positions} positions of {name}: stretched")
    config = load_model_config(name, base_dir=folder) | {"max_position_embeddings": length}
    target = folder / f"stretched-{name.replace('/', '--')}-{length}"
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(target)


def _hardware(sketch: Mapping[str, Any], said: _Notes) -> tuple[dict[str, Any], int]:
    """Returns the hardware section and the number of cards."""
    count, nodes = _count(sketch, "gpus_per_node", "gpus", "count") or 1, _count(sketch, "nodes") or 1
    gpu = card(str(sketch.get("gpu", "")))
    exact = gpu is not None and _gigabytes(str(sketch.get("gpu", ""))) is not None
    if gpu is None:
        gpu = card("A100-80GB")
        said.notes.append(f"card {sketch.get('gpu')!r} is not in the catalogue: another stands in")
    elif not exact:
        said.notes.append(f"card {sketch.get('gpu')!r} read as {gpu.key}")
    assert gpu is not None
    found: dict[str, Any] = {"gpu": gpu.key, "count": count, "nodes": nodes}
    for key, name in (("host_ram_gib", "host_memory"), ("nvme_gib", "nvme")):
        size = _count(sketch, key)
        if size:
            found[name] = f"{size}GiB"
    if sketch.get("nvme_path"):
        found["nvme_path"] = str(sketch["nvme_path"])
    return found, count * nodes


def _gigabytes(name: str) -> float | None:
    size = re.search(r"(\d+(?:\.\d+)?)\s*gi?b", name.lower())
    return float(size.group(1)) if size else None


@cache
def _cards() -> tuple[GpuFacts, ...]:
    return tuple(row.facts for row in gpu_rows() if row.facts.capacity_bytes)


def card(name: str) -> GpuFacts | None:
    """Returns the card that a name like ``A100-80GB`` or ``TITAN-RTX-24GB`` means; of one generation where it can be.

    By the words of the key, then by the capacity that the name states; among form factors the module (SXM) first. A
    card that the catalogue lacks gives way to one of its generation and size.
    """
    size, stated = _gigabytes(name), re.sub(r"\d+(?:\.\d+)?\s*gi?b", " ", name.lower())
    stated = re.sub(r"(?<=[a-z0-9])(?=sxm|pcie|nvl)|(?<=rtx)(?=\d)|(?<=gtx)(?=\d)", " ", stated)
    words = [word for word in re.split(r"[^a-z0-9]+", stated) if word and word not in _VENDORS]

    def distance(facts: GpuFacts) -> tuple[bool, float, int, str]:
        capacity = (facts.capacity_bytes or 0) / GB
        off = 0.0 if size is None else abs(capacity / size - 1.03)
        form = next((place for place, form in enumerate(_FORM_FACTORS) if form in facts.key), 0)
        return "laptop" in facts.key, round(off, 1), form, facts.key

    named = [facts for facts in _cards() if words and set(words) <= set(_words(facts))]
    fitting = [facts for facts in named if size is None or abs((facts.capacity_bytes or 0) / GB / size - 1.03) < 0.12]
    if fitting:
        return min(fitting, key=distance)
    same_size = [facts for facts in _cards() if size and abs((facts.capacity_bytes or 0) / GB / size - 1.03) < 0.12]
    old = "titan" in words or "v100" in words or "p100" in words or "2080" in words
    alike = [facts for facts in same_size if old is not bool(facts.bf16)] or same_size
    return min(alike, key=distance) if alike else (min(named, key=distance) if named else None)


def _words(facts: GpuFacts) -> Iterator[str]:
    for part in re.split(r"[^a-z0-9]+", facts.key):
        yield part
        yield re.sub(r"\d$", "", part) if part.startswith("sxm") else part


def _model(sketch: Mapping[str, Any], folder: Path, said: _Notes) -> str | None:
    """Returns the name or folder of the model that a sketch describes; None when nothing like it can be planned."""
    family, wanted = str(sketch.get("arch", "")).lower(), float(sketch.get("params_b") or 0) * 1e9
    families = _SAME_FAMILY.get(family, (family,))
    rows = [row for row in model_rows() if row.model_type in families and row.priced]
    alike = [row for row in rows if wanted and abs(row.params / wanted - 1) <= _TOLERANCE]
    for row in sorted(alike, key=lambda row: (abs(row.params / wanted - 1), row.key)):
        if _same_dimensions(load_model(row.key, base_dir=Path()), sketch):
            return row.key
    if alike:
        best = min(alike, key=lambda row: (abs(row.params / wanted - 1), row.key))
        said.notes.append(f"dimensions differ from the sketch's: {best.key}")
        return best.key
    made = _made(sketch, rows, wanted, folder) if rows else None
    if made is not None:
        said.notes.append(f"no {family} of {wanted / 1e9:g}B in the catalogue: made from the sketch's dimensions")
        return made
    said.waits.append(f"no model of family {family!r} can be planned at {wanted / 1e9:g}B parameters")
    return None


def _same_dimensions(model: ModelFacts, sketch: Mapping[str, Any]) -> bool:
    pairs = ((sketch.get("layers"), model.num_layers), (sketch.get("hidden"), model.hidden_size))
    return all(not stated or stated == actual for stated, actual in pairs)


def _made(sketch: Mapping[str, Any], rows: list[Any], wanted: float, folder: Path) -> str | None:
    """Writes a config.json of the family with the sketch's dimensions and returns its folder."""
    stated = {name: int(sketch[name]) for name in ("layers", "hidden", "vocab", "experts") if sketch.get(name)}
    for start in sorted(rows, key=lambda row: (abs(row.params / (wanted or row.params) - 1), row.key)):
        config = scaled(load_model_config(start.key, base_dir=Path()), stated, wanted)
        if config is not None:
            break
    else:
        return None
    if sketch.get("tied") is not None:
        config["tie_word_embeddings"] = bool(sketch["tied"])
    target = folder / f"made-{start.key.replace('/', '--')}-{wanted / 1e9:g}"
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(target)
