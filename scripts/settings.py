"""Reads names and defaults of settings from wheels and writes specs/settings: `python scripts/settings.py WHEELS...`.

Each argument is a wheel, a source archive, or a folder that packages are installed in. Only syntax trees are read;
nothing is imported. A table keeps for each name the versions that have it, and its default where that is a plain value.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = ROOT / "specs" / "settings"
Names = dict[str, Any]
UNKNOWN = object()
"""A default that is no plain value."""


def main() -> int:
    """Returns 0; rewrites every table that the arguments hold a package for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", nargs="+", type=Path)
    parser.add_argument("--checked", required=True, help="today, YYYY-MM-DD")
    options = parser.parse_args()
    releases = sorted(
        (release for source in options.sources for release in _releases(source)), key=lambda item: _order(item[1])
    )
    SETTINGS.mkdir(exist_ok=True)
    for table, (package, read) in TABLES.items():
        by_version = {
            version: names
            for name, version, source_of in releases
            if name == package and (names := read(source_of)) is not None
        }
        if by_version:
            document = _table(package, by_version, table, options.checked)
            text = yaml.safe_dump(document, sort_keys=False, width=110, allow_unicode=True)
            (SETTINGS / f"{table}.yaml").write_text(text, encoding="utf-8")
            print(f"{table}: {len(document['names'])} names in {len(by_version)} versions of {package}")
    return 0


Sources = Callable[[str], str | None]
"""Text of a module by its path in the package; None when it is not there."""


def _releases(source: Path) -> Iterator[tuple[str, str, Sources]]:
    """Yields package, version and reader for a wheel, a source archive or each package of an installation."""
    if source.is_dir():
        for package in sorted({package for package, _ in TABLES.values()}):
            for info in source.glob(f"{package}-*.dist-info"):
                version = info.name.removesuffix(".dist-info").split("-")[1]
                yield package, version, lambda path: _file(source / path)
    elif source.suffix == ".whl":
        package, version = source.name.split("-")[:2]
        wheel = zipfile.ZipFile(source)
        present = frozenset(wheel.namelist())
        yield package, version, lambda path: wheel.read(path).decode() if path in present else None
    else:
        package, version = re.fullmatch(r"(\w+)-([\d.]+)\.tar\.gz", source.name).groups()  # type: ignore[union-attr]
        archive = tarfile.open(source)  # noqa: SIM115 (read as long as the generator lives)
        members = {name.partition("/")[2]: name for name in archive.getnames()}
        yield (
            package,
            version,
            lambda path: (
                archive.extractfile(members[path]).read().decode() if path in members else None  # type: ignore[union-attr]
            ),
        )


def _file(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _table(package: str, by_version: Mapping[str, Names], table: str, checked: str) -> dict[str, Any]:
    versions = list(by_version)
    every = sorted({name for names in by_version.values() for name in names})
    return {
        "source": f"{WHERE[table]}, read from the syntax trees of {len(versions)} releases of {package}",
        "checked": checked,
        "package": package,
        "versions": versions,
        "names": {name: _entry(name, by_version, versions) for name in every},
    }


def _entry(name: str, by_version: Mapping[str, Names], versions: list[str]) -> dict[str, Any]:
    """Returns the spans of versions that have a name, where not all have it, and its defaults by first version."""
    has = [name in by_version[version] for version in versions]
    entry: dict[str, Any] = {}
    if not all(has):
        spans, start = [], None
        for index, present in enumerate([*has, False]):
            if present and start is None:
                start = index
            elif not present and start is not None:
                spans.append([versions[start], versions[index - 1]])
                start = None
        entry["spans"] = spans
    defaults: dict[str, Any] = {}
    last: Any = UNKNOWN
    for version in versions:
        if name not in by_version[version]:
            continue
        value = by_version[version][name]
        if value is not UNKNOWN and (last is UNKNOWN or type(value) is not type(last) or value != last):
            defaults[version] = value
        last = value
    if defaults:
        entry["defaults"] = defaults
    return entry


def _classes(source_of: Sources, path: str) -> dict[str, ast.ClassDef]:
    text = source_of(path)
    tree = ast.parse(text) if text else ast.Module(body=[], type_ignores=[])
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _fields(record: ast.ClassDef | None) -> Names:
    """Returns the fields of a dataclass or pydantic model with their defaults."""
    found: Names = {}
    for node in record.body if record is not None else ():
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if node.target.id.startswith("_") or "ClassVar" in ast.unparse(node.annotation):
                continue
            found[node.target.id] = _default(node.value)
            for alias in _keyword(node.value, "alias"):
                found[alias] = found[node.target.id]
    return found


def _default(value: ast.expr | None) -> Any:
    if value is None:
        return UNKNOWN
    if isinstance(value, ast.Call):
        stated = [keyword.value for keyword in value.keywords if keyword.arg == "default"]
        called = ast.unparse(value.func)
        if called not in ("field", "Field", "pp_int"):
            return UNKNOWN
        if not stated and called != "field" and value.args:
            stated = [value.args[0]]
        return _default(stated[0]) if stated else UNKNOWN
    try:
        plain = ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError):
        return UNKNOWN
    return plain if plain is None or isinstance(plain, bool | int | float | str) else UNKNOWN


def _keyword(value: ast.expr | None, name: str) -> Iterator[str]:
    for keyword in value.keywords if isinstance(value, ast.Call) else ():
        if keyword.arg == name and isinstance(keyword.value, ast.Constant):
            yield str(keyword.value.value)


def _of_classes(*places: tuple[str, str]) -> Callable[[Sources], Names | None]:
    """Returns a reader of the fields of classes, the first being the one that must be there."""

    def read(source_of: Sources) -> Names | None:
        found: Names = {}
        for number, (path, name) in enumerate(places):
            record = _classes(source_of, path).get(name)
            if record is None and number == 0:
                return None
            found = {**_fields(record), **found}
        return found or None

    return read


def _parameters(path: str, name: str) -> Callable[[Sources], Names | None]:
    """Returns a reader of the parameters of a class's constructor."""

    def read(source_of: Sources) -> Names | None:
        record = _classes(source_of, path).get(name)
        made = next((n for n in record.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None) \
            if record else None  # fmt: skip
        if made is None:
            return None
        names = [argument.arg for argument in made.args.args if argument.arg != "self"]
        defaults = [UNKNOWN] * (len(names) - len(made.args.defaults)) + [_default(d) for d in made.args.defaults]
        return dict(zip(names, defaults, strict=True))

    return read


def _keys_of(path: str, attribute: str) -> Callable[[Sources], Names | None]:
    """Returns a reader of the texts that an attribute of `self` is subscripted, asked or tested with."""

    def read(source_of: Sources) -> Names | None:
        text = source_of(path)
        if text is None:
            return None
        found: Names = {}
        for node in ast.walk(ast.parse(text)):
            key: ast.expr | None = None
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == attribute:
                key = node.slice
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                key = node.args[0] if ast.unparse(node.func.value) == attribute else None
            elif isinstance(node, ast.Compare) and any(ast.unparse(c) == attribute for c in node.comparators):
                key = node.left
            if isinstance(key, ast.Constant) and isinstance(key.value, str) and not key.value.startswith("fsdp_"):
                found[key.value] = UNKNOWN
        for node in ast.walk(ast.parse(text)):  # `for option in ["a", "b"]: if option in self.fsdp_config`
            if isinstance(node, ast.For) and attribute in ast.unparse(node) and isinstance(node.iter, ast.List):
                texts = (e.value for e in node.iter.elts if isinstance(e, ast.Constant))
                found |= {text.removeprefix("fsdp_"): UNKNOWN for text in texts if isinstance(text, str)}
        return found or None

    return read


def _flags(path: str) -> Callable[[Sources], Names | None]:
    """Returns a reader of the long flags that an argument parser is given, dashes as underscores."""

    def read(source_of: Sources) -> Names | None:
        text = source_of(path)
        if text is None:
            return None
        found: Names = {}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
                defaults = [keyword.value for keyword in node.keywords if keyword.arg == "default"]
                for argument in node.args:
                    if isinstance(argument, ast.Constant) and str(argument.value).startswith("--"):
                        name = str(argument.value)[2:].replace("-", "_")
                        found[name] = _default(defaults[0]) if defaults else None
        return found or None

    return read


def _deepspeed(source_of: Sources) -> Names | None:
    """Returns the keys at the top of DeepSpeed's JSON: texts that its readers ask the document for."""
    text = source_of("deepspeed/runtime/config.py")
    if text is None:
        return None
    constants: dict[str, str] = {}
    for path in _DEEPSPEED_CONSTANTS:
        for node in ast.parse(source_of(path) or "").body:
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                constants |= {target.id: node.value.value for target in node.targets if isinstance(target, ast.Name)}
    found: Names = {}
    for path in _DEEPSPEED_READERS:
        for part in ast.walk(ast.parse(source_of(path) or "")):
            for key in _asked(part):
                value = key.value if isinstance(key, ast.Constant) else constants.get(ast.unparse(key))
                if isinstance(value, str):
                    found[value] = UNKNOWN
    listed = {value: UNKNOWN for name, value in constants.items() if not name.endswith("_DEFAULT")}
    monitors = _fields(_classes(source_of, "deepspeed/monitor/config.py").get("DeepSpeedMonitorConfig"))
    names = {**listed, **dict.fromkeys(monitors, UNKNOWN), **found}
    return {name: value for name, value in names.items() if re.fullmatch(r"[a-z][a-z0-9_]+", name) and name != "value"}


def _asked(node: ast.AST) -> Iterator[ast.expr]:
    documents = ("param_dict", "self._param_dict", "ds_config", "pd")
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) in documents:
        yield node.slice
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        if node.func.attr == "get" and ast.unparse(node.func.value) in documents:
            yield node.args[0]
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "get_scalar_param" and len(node.args) > 1:
        if ast.unparse(node.args[0]) in documents:
            yield node.args[1]
    elif isinstance(node, ast.Compare):
        named = (ast.unparse(side).removesuffix(".keys()") for side in node.comparators)
        if any(name in documents for name in named):
            yield node.left


_DEEPSPEED_CONSTANTS = (
    "deepspeed/runtime/constants.py",
    "deepspeed/runtime/config.py",
    "deepspeed/runtime/zero/config.py",
    "deepspeed/runtime/activation_checkpointing/config.py",
    "deepspeed/runtime/swap_tensor/constants.py",
    "deepspeed/profiling/constants.py",
    "deepspeed/comm/constants.py",
    "deepspeed/elasticity/constants.py",
    "deepspeed/autotuning/constants.py",
    "deepspeed/compression/constants.py",
    "deepspeed/runtime/data_pipeline/constants.py",
    "deepspeed/monitor/constants.py",
    "deepspeed/nebula/constants.py",
    "deepspeed/runtime/tensor_parallel/config.py",
)
_DEEPSPEED_READERS = (
    *_DEEPSPEED_CONSTANTS,
    "deepspeed/runtime/precision_config.py",
    "deepspeed/monitor/config.py",
    "deepspeed/runtime/activation_checkpointing/config.py",
    "deepspeed/profiling/config.py",
    "deepspeed/comm/config.py",
    "deepspeed/runtime/swap_tensor/aio_config.py",
    "deepspeed/runtime/data_pipeline/config.py",
    "deepspeed/compression/config.py",
    "deepspeed/autotuning/config.py",
    "deepspeed/nebula/config.py",
    "deepspeed/runtime/eigenvalue.py",
)
_BASE = "trl/trainer/base_config.py"
TABLES: dict[str, tuple[str, Callable[[Sources], Names | None]]] = {
    "training-arguments": (
        "transformers",
        _of_classes(("transformers/training_args.py", "TrainingArguments")),
    ),
    "fsdp-config": ("transformers", _keys_of("transformers/training_args.py", "self.fsdp_config")),
    "quantization-config": (
        "transformers",
        _parameters("transformers/utils/quantization_config.py", "BitsAndBytesConfig"),
    ),
    "accelerate-config": (
        "accelerate",
        _of_classes(
            ("accelerate/commands/config/config_args.py", "ClusterConfig"),
            ("accelerate/commands/config/config_args.py", "BaseConfig"),
        ),
    ),
    "accelerate-launch": ("accelerate", _flags("accelerate/commands/launch.py")),
    "adapter-config": (
        "peft",
        _of_classes(
            ("peft/tuners/lora/config.py", "LoraConfig"),
            ("peft/config.py", "PeftConfig"),
            ("peft/config.py", "PeftConfigMixin"),
        ),
    ),
    "deepspeed": ("deepspeed", _deepspeed),
    "deepspeed-zero": ("deepspeed", _of_classes(("deepspeed/runtime/zero/config.py", "DeepSpeedZeroConfig"))),
    "deepspeed-offload-param": (
        "deepspeed",
        _of_classes(("deepspeed/runtime/zero/offload_config.py", "DeepSpeedZeroOffloadParamConfig")),
    ),
    "deepspeed-offload-optimizer": (
        "deepspeed",
        _of_classes(("deepspeed/runtime/zero/offload_config.py", "DeepSpeedZeroOffloadOptimizerConfig")),
    ),
    "model-config": ("trl", _of_classes(("trl/trainer/model_config.py", "ModelConfig"))),
    "script-arguments": (
        "trl",
        _of_classes(("trl/scripts/utils.py", "ScriptArguments"), ("trl/scripts/utils.py", "DatasetMixtureConfig")),
    ),
    **{
        f"{name}-config": (
            "trl",
            _of_classes((f"trl/trainer/{name}_config.py", f"{called}Config"), (_BASE, "_BaseConfig")),
        )
        for name, called in (("sft", "SFT"), ("dpo", "DPO"), ("grpo", "GRPO"), ("reward", "Reward"), ("kto", "KTO"))
    },
}
WHERE = {
    "training-arguments": "fields of TrainingArguments (training_args.py)",
    "fsdp-config": "keys that TrainingArguments reads in fsdp_config (training_args.py)",
    "quantization-config": "parameters of BitsAndBytesConfig (utils/quantization_config.py)",
    "accelerate-config": "fields of ClusterConfig (commands/config/config_args.py)",
    "accelerate-launch": "flags of accelerate launch (commands/launch.py)",
    "adapter-config": "fields of LoraConfig and its bases (tuners/lora/config.py, config.py)",
    "deepspeed": "names in the modules that read the JSON, those of inner sections among them (runtime/config.py)",
    "deepspeed-zero": "fields of DeepSpeedZeroConfig (runtime/zero/config.py)",
    "deepspeed-offload-param": "fields of DeepSpeedZeroOffloadParamConfig (runtime/zero/offload_config.py)",
    "deepspeed-offload-optimizer": "fields of DeepSpeedZeroOffloadOptimizerConfig (runtime/zero/offload_config.py)",
    "model-config": "fields of ModelConfig (trainer/model_config.py)",
    "script-arguments": "fields of ScriptArguments (scripts/utils.py)",
    **{
        f"{name}-config": f"fields that the config class of {name} adds (trainer/{name}_config.py)"
        for name in ("sft", "dpo", "grpo", "reward", "kto")
    },
}

if __name__ == "__main__":
    sys.exit(main())
