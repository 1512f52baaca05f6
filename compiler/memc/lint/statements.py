"""What the documents of one run state, by name: each value with its place."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from memc.lint.records import Document, Kind, Place, Stated, words
from memc.lint.requirements import Version
from memc.lint.scripts import UNRESOLVED
from memc.lint.settings import table
from memc.lint.words import paths_of
from memc.spec_source import Node

NUMBERS = words(
    "learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon gradient_clipping warmup_steps warmup_ratio "
    "max_steps "
    "epochs micro_batch_size eval_batch_size gradient_accumulation_steps save_steps eval_steps max_length "
    "train_batch_size zero_stage nvme_state_buffers nvme_buffer_elements nvme_buffers hpz_partition num_processes "
    "nodes "
    "machine_rank processes_per_node fsdp_version lora_rank lora_alpha slurm_nodes slurm_tasks_per_node slurm_tasks "
    "slurm_gpus_per_node slurm_gpus_per_task quantization_bit validation_share"
)
SWITCHES = words(
    "bf16 fp16 tf32 activation_checkpointing use_reentrant packing do_eval auto_find_batch_size load_in_4bit "
    "load_in_8bit "
    "use_peft gathers_on_save force_cpu_optimizer zero3_init fsdp_checkpointing fsdp_offload use_orig_params "
    "sync_module_states efficient_loading flash_attention save_only_model "
    "load_best_model_at_end forward_prefetch ddp_find_unused_parameters"
)
_DEFAULTED = (
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "gradient_accumulation_steps",
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "bf16",
    "fp16",
    "save_strategy",
    "warmup_steps",
    "max_steps",
)
"""Arguments whose default is a statement like any other: DeepSpeed's JSON is compared with it."""
_BY_A_DEEPSPEED_FILE = ("zero_stage", "offload_optimizer", "offload_param")
"""What accelerate takes from a DeepSpeed file that the run reads; its own flags and keys fill in what is auto there.

Source: accelerate 1.15.0, utils/dataclasses.py DeepSpeedPlugin (fill_match with must_match off); transformers 5.24.0,
training_args.py (a file that the arguments name is what the plugin is made of).
"""
_NEVER = frozenset({"auto", "none", "null", ""})
_ON, _OFF = frozenset({"true", "yes", "on", "1"}), frozenset({"false", "no", "off", "0"})


@dataclass(frozen=True, kw_only=True)
class Statements:
    """What is stated, by name, in the order of the documents: what somebody wrote before defaults."""

    by_name: Mapping[str, tuple[Stated, ...]]
    documents: tuple[Document, ...]

    def all(self, name: str) -> tuple[Stated, ...]:
        """Returns every statement about something."""
        return self.by_name.get(name, ())

    def first(self, name: str) -> Stated | None:
        """Returns the statement that counts: the first that somebody wrote, else a default; None without any."""
        found = sorted(self.all(name), key=lambda item: item.default)
        return found[0] if found else None

    def value(self, name: str) -> Any:
        """Returns the value that counts; None without one."""
        found = self.first(name)
        return None if found is None else found.value

    def of(self, *kinds: Kind) -> tuple[Document, ...]:
        """Returns the documents of some kinds."""
        return tuple(document for document in self.documents if document.kind in kinds)


def statements_of(documents: Iterable[Document], versions: Mapping[str, Version]) -> Statements:
    """Returns what documents state, the defaults of the arguments' library among it."""
    held = tuple(documents)
    found: dict[str, list[Stated]] = {}
    for document in held:
        for stated in (*_stated(document), *_peculiar(document)):
            found.setdefault(stated.name, []).append(stated)
    for document in held:
        for stated in _defaults(document, versions):
            found.setdefault(stated.name, []).append(stated)
    if reads_a_deepspeed_file(held):
        for name in _BY_A_DEEPSPEED_FILE:
            found.get(name, []).sort(key=lambda stated: stated.kind is not Kind.DEEPSPEED)
    return Statements(by_name={name: tuple(items) for name, items in found.items()}, documents=held)


def reads_a_deepspeed_file(documents: Iterable[Document]) -> bool:
    """Whether arguments, a command line or accelerate's file name a DeepSpeed file: then its settings count."""
    for document in documents:
        for steps in (("deepspeed",), ("deepspeed_config_file",), ("deepspeed_config", "deepspeed_config_file")):
            value = document.value(*steps)
            named = document.kind is Kind.ARGUMENTS if steps == ("deepspeed",) else document.kind is not Kind.ARGUMENTS
            if named and value and value is not UNRESOLVED and str(value).lower() not in _NEVER:
                return True
    return False


def _stated(document: Document) -> Iterator[Stated]:
    for steps, name in paths_of(document.kind, document.dialect).items():
        written = _spelt(document, steps)
        node = document.find(*written) if written else None
        if node is None:
            continue
        value = plain(name, node)
        if value is not None:
            yield Stated(
                name=name, value=value, place=document.place(*written), key=".".join(written), kind=document.kind
            )


def _spelt(document: Document, steps: tuple[str, ...]) -> tuple[str, ...]:
    """Returns a key path as the document spells it: FSDP keys with and without their prefix, flags with a section."""
    if document.kind is Kind.FSDP and not document.has(*steps):
        return ("fsdp_" + steps[0],)
    return steps


def plain(name: str, node: Node) -> Any:
    """Returns what a node says about something: a finite number, a switch, text in lower case where case is free.

    None for what is left to another (``auto``), for what only a run can tell, and for values of another type.
    """
    value = node.value
    if value is UNRESOLVED or value is None:
        return None
    if name in NUMBERS:
        return number(value)
    if name in SWITCHES:
        return switch(value)
    if isinstance(value, str):
        text = value.strip()
        if name == "slurm_gres":
            return text
        if name in ("save_strategy", "eval_strategy"):
            return text.lower()
        spoken = name in ("offload_param", "offload_optimizer") or (name == "device_map" and text.lower() == "auto")
        return None if text.lower() in _NEVER and not spoken else text
    if isinstance(value, bool) and name in ("mixed_precision", "save_strategy", "eval_strategy"):
        return "no" if not value else None
    return value


def number(value: Any) -> int | float | None:
    """Returns a finite number that a value is or spells; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and re.fullmatch(r"\s*[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d{1,3})?\s*", value):
        value = float(value) if not value.strip().lstrip("+-").isdigit() or len(value) > 18 else int(value)
    if isinstance(value, int) and abs(value) < 10**18:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return int(value) if value.is_integer() and abs(value) < 10**18 else value
    return None


def switch(value: Any) -> bool | None:
    """Returns whether a switch is on, however it is spelt; None for what is no switch."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    return True if text in _ON else False if text in _OFF else None


def _peculiar(document: Document) -> Iterator[Stated]:
    """Yields what is stated in a way of its own: pairs, lists, engines that follow from a key's being there."""
    kind = document.kind
    if kind is Kind.DEEPSPEED:
        yield from _of_deepspeed(document)
    elif kind is Kind.ACCELERATE:
        engine = {"DEEPSPEED": "deepspeed", "FSDP": "fsdp", "MULTI_GPU": "ddp", "NO": "single"}.get(
            str(document.value("distributed_type")).upper()
        )
        if document.value("distributed_type") is False:  # an unquoted `no`
            engine = "single"
        if engine is not None:
            yield _make(document, "engine", engine, "distributed_type")
    elif kind is Kind.LAUNCH:
        yield from _of_launch(document)
    elif kind is Kind.ARGUMENTS:
        yield from _of_arguments(document)
    elif kind is Kind.FSDP:
        yield _make(document, "engine", "fsdp")
    elif kind is Kind.ADAPTER:
        yield _make(document, "adapter", str(document.value("peft_type") or "lora").lower())
    elif kind is Kind.SCRIPT:
        yield from _of_script(document)


def _make(document: Document, name: str, value: Any, *steps: str) -> Stated:
    return Stated(
        name=name,
        value=value,
        place=document.place(*steps),
        key=".".join(steps) or document.path.name,
        kind=document.kind,
    )


def _of_deepspeed(document: Document) -> Iterator[Stated]:
    yield _make(document, "engine", "deepspeed")
    betas = document.find("optimizer", "params", "betas")
    if betas is not None and isinstance(betas.value, list) and len(betas.value) == 2:
        for index, name in enumerate(("adam_beta1", "adam_beta2")):
            value = number(betas.value[index])
            if value is not None:
                yield _make(document, name, value, "optimizer", "params", "betas")
    if not document.has("zero_optimization", "stage"):
        yield _make(document, "zero_stage", 0, "zero_optimization")
    if number(document.value("zero_optimization", "stage")) == 3 and not _gathers(document):
        yield Stated(
            name="gathers_on_save",
            value=False,
            place=document.place("zero_optimization"),
            key="zero_optimization.stage3_gather_16bit_weights_on_model_save",
            kind=document.kind,
            default=True,
        )
    legacy = document.value("zero_optimization", "cpu_offload")
    if switch(legacy):
        yield _make(document, "offload_optimizer", "cpu", "zero_optimization", "cpu_offload")


def _gathers(document: Document) -> bool:
    names = (
        "stage3_gather_16bit_weights_on_model_save",
        "gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
    )
    return any(document.has("zero_optimization", name) for name in names)


def _of_launch(document: Document) -> Iterator[Stated]:
    launcher = document.dialect
    if launcher == "accelerate":
        for flag, engine in (("use_deepspeed", "deepspeed"), ("use_fsdp", "fsdp"), ("multi_gpu", "ddp")):
            if document.has(flag):
                yield _make(document, "engine", engine, flag)
    if launcher == "deepspeed" and isinstance(document.value("include"), str):
        hosts = [host.partition(":")[2].split(",") for host in str(document.value("include")).split("@")]
        counts = {len([card for card in cards if card]) for cards in hosts}
        if len(counts) == 1 and counts != {0}:
            yield _make(document, "processes_per_node", counts.pop(), "include")
    visible = document.extra.get("environment", {}).get("CUDA_VISIBLE_DEVICES")
    if isinstance(visible, str) and re.fullmatch(r"\d+(,\d+)*", visible):
        yield _make(document, "visible_gpus", visible.count(",") + 1)


def _of_arguments(document: Document) -> Iterator[Stated]:
    deepspeed = document.find("deepspeed")
    if deepspeed is not None and deepspeed.value and str(deepspeed.value).lower() not in _NEVER:
        yield _make(document, "engine", "deepspeed", "deepspeed")
    fsdp = document.find("fsdp")
    if fsdp is not None and fsdp.value and str(fsdp.value).lower() not in (*_NEVER, "false"):
        yield _make(document, "engine", "fsdp", "fsdp")
        if "offload" in str(fsdp.value):
            yield _make(document, "fsdp_offload", True, "fsdp")
    if document.dialect == "axolotl" and switch(document.value("flash_attention")):
        yield _make(document, "attention", "flash_attention_2", "flash_attention")
    if document.dialect == "llama-factory" and document.value("flash_attn") in ("fa2", "flash_attention_2"):
        yield _make(document, "attention", "flash_attention_2", "flash_attn")


def _of_script(document: Document) -> Iterator[Stated]:
    for name, called in (
        ("trainer", "trainer"),
        ("input_gradients", "enable_input_require_grads"),
        ("grows_vocabulary", "resize_token_embeddings"),
    ):
        if document.has(called):
            yield _make(document, name, document.value(called), called)
    if document.has("prepare_model_for_kbit_training") and not document.has("enable_input_require_grads"):
        yield _make(document, "input_gradients", True, "prepare_model_for_kbit_training")
    if document.has("LoraConfig"):
        yield _make(document, "adapter", "lora", "LoraConfig")
    early = document.extra.get("early_load")
    if early is not None:
        yield replace(_make(document, "loads_early", True), place=early[0], key="from_pretrained")
    frozen = document.extra.get("frozen_adapters")
    if frozen is not None:
        for name, place in zip(("freezes_adapters", "adapters_before"), frozen, strict=True):
            yield replace(_make(document, name, True), place=place, key="prepare_model_for_kbit_training")
    load = ("from_pretrained",)
    for key, name in (
        ("device_map", "device_map"),
        ("attn_implementation", "attention"),
        ("torch_dtype", "weights_dtype"),
        ("dtype", "weights_dtype"),
        ("load_in_4bit", "load_in_4bit"),
        ("pretrained_model_name_or_path", "model"),
    ):
        node = document.find(*load, key)
        value = None if node is None else plain(name, node)
        if value is not None:
            yield _make(document, name, value, *load, key)
    enable = document.find("gradient_checkpointing_enable")
    if enable is not None:
        yield _make(document, "activation_checkpointing", True, "gradient_checkpointing_enable")
        for key in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
            value = switch(document.value("gradient_checkpointing_enable", key, "use_reentrant"))
            if value is not None:
                yield _make(document, "use_reentrant", value, "gradient_checkpointing_enable", key)


def _defaults(document: Document, versions: Mapping[str, Version]) -> Iterator[Stated]:
    """Yields the defaults of arguments that nobody wrote, where the document holds all that is said of them."""
    if document.kind is not Kind.ARGUMENTS or document.dialect in ("axolotl", "llama-factory", "command", "section"):
        return
    if document.extra.get("open") or (document.names and not document.node.keys):
        return
    known = table("training-arguments")
    own = table(f"{document.dialect}-config") if document.dialect in ("sft", "dpo", "grpo", "reward", "kto") else None
    names = paths_of(document.kind, document.dialect)
    for key in _DEFAULTED:
        name = names[key,]
        spellings = [steps for steps, other in names.items() if other == name]
        if any(document.has(*steps) for steps in spellings):
            continue
        value = known.default(key, versions["transformers"].text)
        if own is not None and own.has(key, versions["trl"].text):
            value = own.default(key, versions["trl"].text)
        value = number(value) if name in NUMBERS else value
        if value is not None:
            yield Stated(name=name, value=value, place=document.place(), key=key, kind=document.kind, default=True)


def place_of(statements: Statements, *names: str) -> Place | None:
    """Returns the place of the first of some names that anything states; None without any."""
    for name in names:
        found = statements.first(name)
        if found is not None:
            return found.place
    return None
