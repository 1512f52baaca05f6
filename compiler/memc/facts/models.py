"""Models: `load_model` turns a catalogue name, a hub id, a folder or a config.json into `ModelFacts`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from memc.errors import Location, usage_error
from memc.facts.architectures import architecture_keys, ledger_described, unpriced
from memc.facts.documents import nearest, read_json_object, read_spec, spec_file, spec_keys
from memc.facts.documents import read_names as read_spec_names
from memc.facts.programs import program_sizes, program_text
from memc.facts.records import ModelFacts, Objective, Stack
from memc.facts.stacks import describe, main_stack, other_stacks

_FOLDER = "models"
_CONFIG_NAME = "config.json"
_BYTES_PER_PARAM = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_UNSTATED_DTYPE = "float32"
_DEQUANTISED = ("mxfp4", "fp8")
"""Formats that transformers turns into 16 bits while it reads a checkpoint (`dequantize` of their configs)."""


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """One line of the model listing.

    Attributes:
        key: Hub id of the catalogue entry.
        model_type: Its family.
        params: Unique parameters (a tied head counted once), as the model class built them.
        verified: How sure the config is: ``exact`` equals a published count.
        described: Whether the family has an architecture description, so that parameters can be counted.
        priced: Whether the ledger's closed forms hold for the family.
        aliases: Other hub ids with the same shape.
        source: Where the config comes from.
        checked: ISO date.
    """

    key: str
    model_type: str
    params: int
    verified: str
    described: bool
    priced: bool
    aliases: tuple[str, ...]
    source: str
    checked: str


def model_keys() -> tuple[str, ...]:
    """Returns the hub ids of all models in the catalogue, sorted."""
    return tuple(sorted(_hub_id(key) for key in spec_keys(_FOLDER)))


def model_rows() -> tuple[ModelRow, ...]:
    """Returns the whole catalogue for a listing; reads every file."""
    described = set(architecture_keys())
    rows = []
    for key in spec_keys(_FOLDER):
        record = read_spec(_FOLDER, key)
        rows.append(
            ModelRow(
                key=record["name"],
                model_type=record["model_type"],
                params=record["computed_params"]["value"],
                verified=record["verified"],
                described=record["model_type"] in described,
                priced=ledger_described(record["model_type"]),
                aliases=tuple(record["aliases"]),
                source=record["source"],
                checked=record["checked"],
            )
        )
    return tuple(rows)


def load_model(reference: str, *, base_dir: Path) -> ModelFacts:
    """Returns the facts of a model.

    Args:
        reference: A folder that holds config.json, a config file (both relative to `base_dir` unless absolute), or
            the name of a catalogue model, in any case. A folder wins over a catalogue name, as in `from_pretrained`.
        base_dir: Folder that relative paths start from.

    Raises:
        MemcError: ``model-unknown`` for a name that is neither on disk nor in the catalogue,
            ``model-config-missing`` for a folder without config.json, ``model-config-malformed``,
            ``model-config-missing-key``, ``model-config-bad-value``, ``model-type-unknown``,
            ``model-quantized-checkpoint``.
    """
    path = _config_path(reference, base_dir)
    if path is None:
        return _catalogue_model(reference)
    config = load_model_config(reference, base_dir=base_dir)
    name = path.parent.name if path.name == _CONFIG_NAME else path.stem
    return model_from_config(config, key=name or reference, file=str(path), source=str(path), checked="")


@cache
def _catalogue_model(reference: str) -> ModelFacts:
    """Returns the facts of a catalogue model; always the same record, so that what is computed of it is kept."""
    key = _catalogue_key(reference)
    record = _record(key)
    file = f"{_FOLDER}/{spec_file(_FOLDER, key).name}"
    published = str(record.get("checkpoint_quantization") or "").partition(" ")[0]
    return model_from_config(
        _catalogue_config(reference) | ({"quantization_config": {"quant_method": published}} if published else {}),
        key=reference,
        file=file,
        source=f"{file}: {record['source']}",
        checked=record["checked"],
    )


def load_model_config(reference: str, *, base_dir: Path) -> dict[str, Any]:
    """Returns the config.json of a model as it is: from disk, or the catalogue's with the changes of the alias.

    Args:
        reference: As of `load_model`.
        base_dir: Folder that relative paths start from.

    Raises:
        MemcError: ``model-unknown``, ``model-config-missing`` or ``model-config-malformed``.
    """
    path = _config_path(reference, base_dir)
    if path is not None:
        return dict(read_json_object(path.read_text(encoding="utf-8"), name=str(path)))
    return _catalogue_config(reference)


def _catalogue_config(reference: str) -> dict[str, Any]:
    record = _record(_catalogue_key(reference))
    changes = {alias.casefold(): change for alias, change in record.get("alias_changes", {}).items()}
    return {**record["config"], **changes.get(reference.casefold(), {})}


def model_from_config(config: Mapping[str, Any], *, key: str, file: str, source: str, checked: str) -> ModelFacts:
    """Returns the facts that a parsed config.json holds.

    Args:
        config: The object of the file.
        key: Name for the record.
        file: Path for errors.
        source: Where the config comes from.
        checked: ISO date of the check; empty for a file of the user's own.

    Raises:
        MemcError: As `load_model`.
    """
    quantization = _checkpoint_quantization(config, file)
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise usage_error(
            "model-config-missing-key",
            f"{file} has no model_type",
            where=Location(file=file, field="model_type"),
            hint="pass the config.json that save_pretrained or the hub wrote",
        )
    described = describe(config, model_type, file=file)
    if described.architecture.get("part_only"):
        raise usage_error(
            "model-type-unknown",
            f"model_type {model_type!r} is only a part of models",
            where=Location(file=file, field="model_type"),
            hint="name the model that it is a part of",
        )
    architecture, names, main = described.architecture, described.names, main_stack(described)
    others = other_stacks(described)
    _check_heads((*others, main), file)
    vocab = described.main.names.sizes.get("vocab", 0)
    head = architecture["head"]
    tied = bool(names.switches["tied"])
    head_bias = bool(names.switch(head["bias"]))
    head_weight = 0 if tied else names.size(head["weight"])
    tail = program_text(described.main.architecture.get("tail", ""), "tail")
    dtype = _checkpoint_dtype({**described.main.config, **config})
    return ModelFacts(
        key=key,
        model_type=model_type,
        architecture=architecture["built_class"],
        hidden_size=main.hidden_size,
        vocab_size=vocab,
        groups=main.groups,
        final_norm=main.final_norm,
        embedding_params=main.embedding_params,
        head_params=head_weight + (names.size(head.get("outputs", vocab)) if head_bias else 0),
        tied=tied,
        head_bias=head_bias,
        logit_softcap=described.main.names.switch(described.main.architecture["head"].get("logit_softcap")),
        max_position_embeddings=described.main.names.sizes.get("max_positions"),
        checkpoint_bytes_per_param=_BYTES_PER_PARAM.get(dtype, _BYTES_PER_PARAM[_UNSTATED_DTYPE]),
        checkpoint_dtype=dtype,
        checkpoint_quantization=quantization,
        gated_hub=None,
        source=source,
        checked=checked,
        embedding_norms=main.embedding_norms,
        objective=Objective(architecture.get("objective", Objective.CAUSAL_LM)),
        auto_class=architecture.get("auto_class", "AutoModelForCausalLM"),
        sees=main.sees,
        positions_per_item=main.positions_per_item,
        input_elements=main.input_elements,
        outer_linears=main.linears,
        outer_tensors=main.tensors,
        outer_norms=main.norms,
        other_stacks=others,
        before=main.before,
        unpriced=unpriced(architecture, names) or _undescribed(main, *others),
        tail=tail,
        tail_sizes=program_sizes(tail, described.main.names, {}),
        embedding_dropout=bool(described.main.names.switches.get("embedding_dropout")),
        tiled_loss=bool(architecture.get("tiled_loss", True)),
    )


def _check_heads(stacks: Sequence[Stack], file: str) -> None:
    """Raises where attention cannot be computed: heads that key heads do not divide, or that do not make up the width.

    Raises:
        MemcError: ``model-config-bad-value``.
    """
    for block in [group.block for stack in stacks for group in stack.groups if not group.block.attention.linear]:
        heads, keys = block.attention.heads, block.attention.kv_heads
        width = heads * (block.attention.value_head_dim or block.attention.head_dim)
        outputs = [linear for linear in block.linears if linear.reads == "attention_output"]
        problem = f"{heads} heads cannot share {keys} key heads evenly" if keys and heads % keys else ""
        if not problem and any(linear.in_features != width for linear in outputs):
            problem = f"{heads} heads do not divide the width of {outputs[0].in_features}"
        if problem:
            raise usage_error(
                "model-config-bad-value",
                f"the attention that {file} describes cannot be computed: {problem}",
                where=Location(file=file),
                hint="pass the config.json that save_pretrained or the hub wrote",
            )


def _undescribed(*stacks: Stack) -> str:
    """Returns that layers have no program, as the end of a sentence; empty when all of them have one."""
    described = all(group.block.forward for stack in stacks for group in stack.groups)
    return "" if described else "the activations of one of its parts are not described yet"


def _config_path(reference: str, base_dir: Path) -> Path | None:
    """Returns the config file that `reference` names on disk; None when it must be a catalogue name."""
    path = base_dir / Path(reference).expanduser()
    if path.is_dir() and (path / _CONFIG_NAME).is_file():
        return path / _CONFIG_NAME
    if path.is_file():
        return path
    looks_local = reference.startswith((".", "/", "~")) or reference.endswith(".json") or "\\" in reference
    if not looks_local:
        return None
    reason = f"holds no {_CONFIG_NAME}" if path.is_dir() else "does not exist"
    raise usage_error(
        "model-config-missing",
        f"model {reference!r} looks like a path, but {path} {reason}",
        hint=f"write the path of a folder that holds {_CONFIG_NAME}, relative to {base_dir}",
    )


@cache
def _record(key: str) -> Mapping[str, Any]:
    return read_spec(_FOLDER, key)


@cache
def _catalogue_key(reference: str) -> str:
    """Returns the file key of the catalogue model that goes by `reference`.

    Raises:
        MemcError: ``model-unknown`` with the nearest names.
    """
    folded = reference.casefold()
    keys = spec_keys(_FOLDER)
    for key in keys:
        if _hub_id(key).casefold() == folded or key.casefold() == folded:
            return key
    names = {key: read_spec_names(_FOLDER, key) for key in keys}
    for key, known in names.items():
        if folded in {name.casefold() for name in known}:
            return key
    close = nearest(reference, (name for known in names.values() for name in known))
    guess = f"; nearest in the catalogue: {', '.join(close)}" if close else ""
    raise usage_error(
        "model-unknown",
        f"model {reference!r} is neither a folder nor in the catalogue, and nothing is downloaded{guess}",
        hint=f"pass the model's folder or its {_CONFIG_NAME}; memc models lists the catalogue",
    )


def _hub_id(key: str) -> str:
    return key.replace("--", "/", 1)


def _checkpoint_dtype(config: Mapping[str, Any]) -> str:
    """Returns the type of the published weights; float32 when the config names none."""
    dtype = config.get("dtype") or config.get("torch_dtype") or _UNSTATED_DTYPE
    return str(dtype).removeprefix("torch.")


def _checkpoint_quantization(config: Mapping[str, Any], file: str) -> str:
    """Returns the format of weights that are published quantised and can be read as others; empty without.

    Raises:
        MemcError: ``model-quantized-checkpoint`` for a format that stays quantised.
    """
    quantization = config.get("quantization_config")
    if not quantization:
        return ""
    method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
    if method in _DEQUANTISED:
        return str(method)
    raise usage_error(
        "model-quantized-checkpoint",
        f"{file} describes a checkpoint that is already quantised ({method}); training is planned from full weights",
        where=Location(file=file, field="quantization_config"),
        hint="name the unquantised model; method: qlora quantises it to 4 bits while loading",
    )
