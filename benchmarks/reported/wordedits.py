"""Edits of the files that memc wrote, as the words of a report describe them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from memc.lint.settings import table

_CONSTRUCTORS = ("TrainingArguments", "SFTConfig", "DPOConfig", "HfDeepSpeedConfig")
_CALLS = ((r"input.?grad|require_grads|the (call|hook)", "enable_input_require_grads"),)
_SWITCHES = {"true": True, "false": False, "on": True, "off": False, "none": None, "null": None}
_PACKAGES = "transformers|trl|accelerate|peft|deepspeed|torch|bitsandbytes"


@dataclass(frozen=True)
class Edit:
    """What words do to a folder.

    Attributes:
        sets: Value by name of a setting.
        deletes: Names of settings.
        uncalls: Names of calls whose statements go.
        moves: Pairs of calls: the statement that leads to the first is put before that of the second.
        versions: Version by package, which is pinned in requirements.txt.
    """

    sets: Mapping[str, Any]
    deletes: tuple[str, ...]
    uncalls: tuple[str, ...]
    moves: tuple[tuple[str, str], ...]
    versions: Mapping[str, str]


def edited_by_words(files: Mapping[str, str], words: str) -> tuple[dict[str, str], str] | None:
    """Returns the files with the edit that words describe, and a name that it is about; None when nothing changes.

    Understood are settings that are set, changed, deleted or removed, calls that are removed, one call that is moved
    before another, and the version of a library, several of them in one sentence.
    """
    edit = edit_of(words)
    names = (
        *edit.uncalls,
        *(name.rpartition(".")[2] for name in (*edit.sets, *edit.deletes)),
        *(m[0] for m in edit.moves),
    )
    if not names:
        return None
    changed = {path: edited(path, text, edit) for path, text in files.items()}
    changed = _with_new(changed, files, edit)
    if all(_same(path, files[path], changed[path]) for path in files):
        return None
    for package, version in edit.versions.items():
        lines = re.sub(rf"(?m)^{re.escape(package)}\b.*\n", "", changed.get("requirements.txt", ""))
        changed["requirements.txt"] = f"{lines}{package}=={version}\n"
    return changed, names[0]


def _with_new(changed: dict[str, str], before: Mapping[str, str], edit: Edit) -> dict[str, str]:
    """Returns the files with the settings that stood nowhere, each where its reader looks for it."""
    for dotted, value in edit.sets.items():
        name = dotted.rpartition(".")[2]
        if any(re.search(rf"\b{re.escape(name)}\b", text) for text in before.values()):
            continue
        if name in table("deepspeed-zero").names and "ds_config.json" in changed:
            document = json.loads(changed["ds_config.json"])
            new = {"device": value} if name.startswith("offload_") else value
            document.setdefault("zero_optimization", {})[name] = new
            changed["ds_config.json"] = json.dumps(document, indent=2)
        elif name in table("accelerate-config").names or name.startswith("fsdp_"):
            document = yaml.safe_load(changed["accelerate.yaml"])
            (document.setdefault("fsdp_config", {}) if name.startswith("fsdp_") else document)[name] = value
            changed["accelerate.yaml"] = yaml.safe_dump(document, sort_keys=False)
        elif name in table("training-arguments").names or name in table("sft-config").names:
            changed["train.py"] = _with_argument(changed["train.py"], name, value)
    return changed


def _with_argument(text: str, name: str, value: Any) -> str:
    """Returns a script whose arguments are given one more."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _called(node) in _CONSTRUCTORS:
            node.keywords.append(ast.keyword(arg=name, value=ast.Constant(value)))
    return ast.unparse(ast.fix_missing_locations(tree))


def _same(path: str, before: str, after: str) -> bool:
    if path.endswith(".py"):
        return ast.dump(ast.parse(before)) == ast.dump(ast.parse(after))
    if path.endswith((".json", ".yaml", ".yml")):
        return bool(yaml.safe_load(before) == yaml.safe_load(after))
    return before == after


def edit_of(words: str) -> Edit:
    """Returns the edit that a report's words describe."""
    text = words.strip()
    versions = dict(
        re.findall(
            r"\b(transformers|trl|accelerate|peft|deepspeed|torch|bitsandbytes)\s*(?:<=|==|=|\s)\s*v?(\d[\d.]*)", text
        )
    )
    moves = tuple(
        (first, second) for first, second in re.findall(r"move\s+(\w+)(?:\(.*?\))?\s+(?:above|before)\s+(\w+)", text)
    )
    sets: dict[str, Any] = {}
    for name, value in re.findall(r"(?:set|change)\s+`?([\w.]+)`?\s+(?:to\s+|=\s*)?`?([\w.+-]+)`?", text):
        if "_" in name or "." in name or name in ("stage", "bf16", "fp16", "lr"):
            sets[name] = _value(value)
    if re.search(r"\breentrant checkpointing", text) and "non-reentrant" not in text:
        sets["use_reentrant"] = True
    deletes = tuple(name for name in re.findall(r"(?:delete|remove|drop|omit)\s+`?([A-Za-z]\w*_\w+)`?", text))
    removing = re.findall(
        r"(?:delete|remove|drop|omit)\s+(?:the\s+)?([\w -]+?)(?:\s+(?:and|with|while|when)\b|$)", text
    )
    uncalls = tuple(called for part in removing for pattern, called in _CALLS if re.search(pattern, f"the {part}"))
    deletes = tuple(name for name in deletes if name not in uncalls and not name.endswith("require_grads"))
    return Edit(sets=sets, deletes=deletes, uncalls=uncalls, moves=moves, versions=versions)


def _value(text: str) -> Any:
    if text.lower() in _SWITCHES:
        return _SWITCHES[text.lower()]
    try:
        return json.loads(text)
    except ValueError:
        return text


def edited(path: str, text: str, edit: Edit) -> str:
    """Returns a file with the edit made wherever it has what the edit is about."""
    if path.endswith(".json"):
        return json.dumps(_in_document(json.loads(text), edit), indent=2)
    if path.endswith((".yaml", ".yml")):
        return yaml.safe_dump(_in_document(yaml.safe_load(text), edit), sort_keys=False)
    return _in_script(text, edit) if path.endswith(".py") else text


def _in_document(value: Any, edit: Edit) -> Any:
    if not isinstance(value, dict):
        return value
    sets = {name.rpartition(".")[2]: new for name, new in edit.sets.items()}
    return {
        key: sets.get(key, _in_document(inner, edit)) if not isinstance(inner, dict) else _in_document(inner, edit)
        for key, inner in value.items()
        if key not in edit.deletes
    }


def _in_script(text: str, edit: Edit) -> str:
    tree = _Editor(edit).visit(ast.parse(text))
    for first, second in edit.moves:
        _move(tree, first, second)
    return ast.unparse(ast.fix_missing_locations(tree))


class _Editor(ast.NodeTransformer):
    """Writes and takes away keyword arguments, keys of dictionaries and statements that are a call."""

    def __init__(self, edit: Edit) -> None:
        self.edit = edit

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        node.keywords = [k for k in node.keywords if k.arg not in self.edit.deletes]
        for keyword in node.keywords:
            if keyword.arg is not None and keyword.arg in self.edit.sets:
                keyword.value = ast.Constant(self.edit.sets[keyword.arg])
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        self.generic_visit(node)
        for index, key in enumerate(node.keys):
            if isinstance(key, ast.Constant) and key.value in self.edit.sets:
                node.values[index] = ast.Constant(self.edit.sets[str(key.value)])
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        self.generic_visit(node)
        return ast.Pass() if isinstance(node.value, ast.Call) and _called(node.value) in self.edit.uncalls else node


def _called(call: ast.Call) -> str:
    function = call.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _move(tree: ast.AST, first: str, second: str) -> None:
    """Puts the statement that leads to a call of `first` before the one that leads to `second`, in their function."""
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    seconds = _CONSTRUCTORS if second in _CONSTRUCTORS else (second,)

    def leads(statement: ast.stmt, names: Iterable[str], depth: int = 0) -> bool:
        for call in (node for node in ast.walk(statement) if isinstance(node, ast.Call)):
            name = _called(call)
            if name in names and (name != "from_pretrained" or "Model" in ast.unparse(call.func)):
                return True
            if name in functions and depth < 4 and any(leads(s, names, depth + 1) for s in functions[name].body):
                return True
        return False

    for function in functions.values():
        places = [
            next((i for i, s in enumerate(function.body) if leads(s, names)), None) for names in (seconds, (first,))
        ]
        if None not in places and places[0] < places[1]:  # type: ignore[operator]
            function.body.insert(places[0], function.body.pop(places[1]))  # type: ignore[arg-type]
