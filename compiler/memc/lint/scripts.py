"""Settings in Python scripts: calls of the classes that hold them, read from the syntax tree. Nothing is run."""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from memc.lint.records import Document, Kind, Place, leaf, section
from memc.spec_source import Node, Position

_CLASSES: dict[str, tuple[Kind, str]] = {
    "TrainingArguments": (Kind.ARGUMENTS, "class"),
    "Seq2SeqTrainingArguments": (Kind.ARGUMENTS, "section"),
    "SFTConfig": (Kind.ARGUMENTS, "sft"),
    "DPOConfig": (Kind.ARGUMENTS, "dpo"),
    "GRPOConfig": (Kind.ARGUMENTS, "grpo"),
    "RewardConfig": (Kind.ARGUMENTS, "reward"),
    "KTOConfig": (Kind.ARGUMENTS, "kto"),
    "LoraConfig": (Kind.ADAPTER, ""),
    "BitsAndBytesConfig": (Kind.QUANTIZATION, ""),
}
WORDS = (*(name.encode() for name in _CLASSES), b"from_pretrained", b"HfDeepSpeedConfig", b"deepspeed.initialize")
"""One of these stands in every script that is read further."""
_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_LIBRARIES = ("transformers", "trl", "peft", "unsloth")
_TRAINERS = ("Trainer", "SFTTrainer", "DPOTrainer", "RewardTrainer", "GRPOTrainer", "KTOTrainer", "Seq2SeqTrainer")
_DEPTH = 6
_MAX_EVENTS = 4000


class Unresolved:
    """The value of an expression that only a run can tell."""

    def __repr__(self) -> str:
        return "something that only a run can tell"


UNRESOLVED = Unresolved()


def script_documents(path: Path, text: str) -> tuple[Document, ...]:
    """Returns a document per call that holds settings and one of what the script does; none for what is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    reader = _Script(path, tree)
    calls = tuple(reader.documents())
    does = reader.behaviour()
    return (*calls, does) if calls or does.node.keys else ()


class _Script:
    def __init__(self, path: Path, tree: ast.Module) -> None:
        self.path = path
        self.tree = tree
        self.constants = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        nodes = list(ast.walk(tree))
        self.imported = {
            alias.asname or alias.name.partition(".")[0]: (node.module or "")
            if isinstance(node, ast.ImportFrom)
            else alias.name
            for node in nodes
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        self.starred = any(
            isinstance(node, ast.ImportFrom)
            and (node.module or "").partition(".")[0] in _LIBRARIES
            and any(alias.name == "*" for alias in node.names)
            for node in nodes
        )
        self.own = frozenset(node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef))
        self.calls = [node for node in nodes if isinstance(node, ast.Call)]
        self.loads = [call for call in self.calls if _is_model_load(call)]
        self.functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}

    def _from_a_library(self, call: ast.Call) -> bool:
        """Whether what is called is imported from a library, and is no class of the same name of somebody's own."""
        function = call.func
        name = function.id if isinstance(function, ast.Name) else ""
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            name = function.value.id
        if name not in self.imported and isinstance(function, ast.Name):
            return self.starred and name not in self.own
        return self.imported.get(name, "").partition(".")[0] in _LIBRARIES

    def documents(self) -> Iterator[Document]:
        for call in self.calls:
            kind, dialect = _CLASSES.get(_called(call), (None, ""))
            if kind is None or not self._from_a_library(call):
                continue
            keys, open_ended = self._keywords(call)
            if not keys and open_ended:
                continue
            document = Document(
                kind=kind,
                path=self.path,
                node=section(keys, _position(call)),
                dialect=dialect,
                names=tuple(
                    str(keys[n][1].value)
                    for n in ("deepspeed", "fsdp_config")
                    if n in keys and isinstance(keys[n][1].value, str)
                ),
                extra={"open": open_ended or bool(call.args), "script": True},
            )
            yield document
            for name, inside in (("deepspeed", Kind.DEEPSPEED), ("fsdp_config", Kind.FSDP)):
                if kind is Kind.ARGUMENTS and name in keys and keys[name][1].keys:
                    yield Document(
                        kind=inside, path=self.path, node=keys[name][1], owner=document, extra={"section": name}
                    )

    def _keywords(self, call: ast.Call) -> tuple[dict[str, tuple[Position, Node]], bool]:
        """Returns the keywords of a call with their values, and whether it takes more than can be read."""
        keys: dict[str, tuple[Position, Node]] = {}
        open_ended = False
        for keyword in call.keywords:
            position = _position(keyword)
            if keyword.arg is None:
                open_ended = True
                continue
            keys[keyword.arg] = (position, self._node(keyword.value, 0))
        return keys, open_ended

    def _node(self, value: ast.expr, depth: int) -> Node:
        position = _position(value)
        if isinstance(value, ast.Name) and value.id in self.constants and depth < _DEPTH:
            return self._node(self.constants[value.id], depth + 1)
        if isinstance(value, ast.Dict) and depth < _DEPTH:
            keys = {
                str(key.value): (_position(key), self._node(inner, depth + 1))
                for key, inner in zip(value.keys, value.values, strict=True)
                if isinstance(key, ast.Constant)
            }
            return section(keys, position)
        if isinstance(value, ast.Attribute):  # torch.bfloat16
            return leaf(value.attr, position)
        if isinstance(value, ast.Compare | ast.BoolOp | ast.UnaryOp):
            return leaf(self._truth(value, depth), position)
        try:
            plain = ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return leaf(UNRESOLVED, position)
        plain = list(plain) if isinstance(plain, tuple | set) else plain
        return leaf(plain, position)

    def _truth(self, value: ast.expr, depth: int) -> Any:
        """Returns what a comparison or a combination of such comes to, as far as constants of the script decide it."""
        if depth >= _DEPTH:
            return UNRESOLVED
        if isinstance(value, ast.BoolOp):
            decided = [self._node(part, depth + 1).value for part in value.values]
            ends = not isinstance(value.op, ast.And)
            if any(part is ends for part in decided):
                return ends
            return UNRESOLVED if any(part is UNRESOLVED for part in decided) else not ends
        if isinstance(value, ast.UnaryOp):
            if isinstance(value.op, ast.Not):
                inner = self._node(value.operand, depth + 1).value
                return UNRESOLVED if inner is UNRESOLVED else not inner
            try:
                return ast.literal_eval(value)
            except (ValueError, TypeError):
                return UNRESOLVED
        assert isinstance(value, ast.Compare)
        sides = [self._node(side, depth + 1).value for side in (value.left, *value.comparators)]
        compare = _COMPARED.get(type(value.ops[0])) if len(sides) == 2 else None
        plain = all(side is None or isinstance(side, bool | int | float | str) for side in sides)
        try:
            return bool(compare(*sides)) if compare is not None and plain else UNRESOLVED
        except TypeError:
            return UNRESOLVED

    def behaviour(self) -> Document:
        """Returns what the script does beside settings: its calls, and whether it loads before it sets up."""
        keys: dict[str, tuple[Position, Node]] = {}
        called = {_called(call): call for call in reversed(self.calls)}
        for name in (
            "enable_input_require_grads",
            "get_peft_model",
            "prepare_model_for_kbit_training",
            "gradient_checkpointing_enable",
            "resize_token_embeddings",
            "HfDeepSpeedConfig",
            "LoraConfig",
        ):
            if name in called:
                keys[name] = (_position(called[name]), leaf(True, _position(called[name])))
        started = next(
            (call for call in self.calls if _called(call) == "initialize" and _owner(call) == "deepspeed"), None
        )
        if started is not None:
            keys["deepspeed_initialize"] = (_position(started), leaf(True, _position(started)))
        trainer = next((called[name] for name in _TRAINERS if name in called), None)
        if trainer is not None:
            inner, _ = self._keywords(trainer)
            keys["trainer"] = (_position(trainer), leaf(_called(trainer), _position(trainer)))
            keys["trainer_arguments"] = (_position(trainer), section(inner, _position(trainer)))
        for load in self.loads:
            inner, _ = self._keywords(load)
            if load.args:
                inner["pretrained_model_name_or_path"] = (_position(load.args[0]), self._node(load.args[0], 0))
            keys["from_pretrained"] = (_position(load), section(inner, _position(load)))
            break
        enable = called.get("gradient_checkpointing_enable")
        if enable is not None:
            inner, _ = self._keywords(enable)
            keys["gradient_checkpointing_enable"] = (_position(enable), section(inner, _position(enable)))
        early = self._loads_before_arguments()
        return Document(
            kind=Kind.SCRIPT,
            path=self.path,
            node=section(keys, Position(line=1, column=1)),
            extra={"early_load": early, "frozen_adapters": self._freezes_adapters()},
        )

    def _loads_before_arguments(self) -> tuple[Place, Place] | None:
        """Returns the places of a model load and of the arguments, when the load runs first; None otherwise."""
        load: ast.Call | None = None
        for call in self._in_order(self.tree.body, 0, [0]):
            name = _called(call)
            sets_up = _CLASSES.get(name, (None, ""))[0] is Kind.ARGUMENTS
            if sets_up or name in ("HfDeepSpeedConfig", "parse_args_into_dataclasses", "parse_args_and_config"):
                return (_place(self.path, load), _place(self.path, call)) if load is not None else None
            if load is None and _is_model_load(call):
                load = call
        return None

    def _freezes_adapters(self) -> tuple[Place, Place] | None:
        """Returns the places of `prepare_model_for_kbit_training` and of a `get_peft_model` before it, else None."""
        wrapped: ast.Call | None = None
        for call in self._in_order(self.tree.body, 0, [0]):
            name = _called(call)
            if name == "prepare_model_for_kbit_training":
                return (_place(self.path, call), _place(self.path, wrapped)) if wrapped is not None else None
            if wrapped is None and name == "get_peft_model":
                wrapped = call
        return None

    def _in_order(self, body: list[ast.stmt], depth: int, count: list[int]) -> Iterator[ast.Call]:
        """Yields calls in the order in which they run, those of the script's own functions followed."""
        for statement in body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            for call in sorted((n for n in ast.walk(statement) if isinstance(n, ast.Call)), key=_end):
                count[0] += 1
                if count[0] > _MAX_EVENTS:
                    return
                function = self.functions.get(call.func.id) if isinstance(call.func, ast.Name) else None
                if function is not None and depth < _DEPTH:
                    yield from self._in_order(function.body, depth + 1, count)
                else:
                    yield call


def _is_model_load(call: ast.Call) -> bool:
    """Whether a call is `from_pretrained` of a model class."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "from_pretrained":
        return False
    owner = _name(call.func.value)
    return "Model" in owner and "Peft" not in owner and "Config" not in owner


def _called(call: ast.Call) -> str:
    return _name(call.func)


def _owner(call: ast.Call) -> str:
    return _name(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _end(call: ast.Call) -> tuple[int, int]:
    return (call.end_lineno or 0, call.end_col_offset or 0)


def _position(node: Any) -> Position:
    return Position(line=int(node.lineno), column=int(node.col_offset) + 1)


def _place(path: Path, node: ast.AST) -> Place:
    position = _position(node)
    return Place(path=path, line=position.line, column=position.column)
