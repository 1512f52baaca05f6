"""The diagnostic codes that the source can show, read from its syntax trees, and their table for the site.

A code reaches a diagnostic as an argument called `code`: of a record that has such a field, or of a function that
passes it on. Every call of such a callable is followed back to the texts that it can pass.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pages.text import heading, table

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "compiler" / "memc"
ENTRIES = ROOT / "docs" / "errors.yaml"
CODE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
# Called with an error type of its own, which becomes the code of a diagnostic.
_FOREIGN = {"PydanticCustomError": 0}
# Names that hold codes read elsewhere: pydantic's type of an error that `fault` made; the codes of all findings.
_PASSED_ON = {("spec_errors.py", "kind"), ("sarif.py", "c")}
Function = ast.FunctionDef | ast.AsyncFunctionDef


class UnresolvedCodeError(Exception):
    """A code whose possible texts cannot be read from the source."""


@dataclass
class _Module:
    path: Path
    tree: ast.Module
    owners: dict[int, list[Function]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._own(self.tree, [])

    def _own(self, node: ast.AST, functions: list[Function]) -> None:
        self.owners[id(node)] = functions
        inner = [*functions, node] if isinstance(node, Function) else functions
        for child in ast.iter_child_nodes(node):
            self._own(child, inner)


def source_codes(folder: Path = SOURCE) -> dict[str, tuple[str, ...]]:
    """Returns every code with the files, relative to `folder`, in which it is written.

    Raises:
        UnresolvedCodeError: When a code is passed in a form that this reader does not follow.
    """
    return _Reader(folder).codes()


class _Reader:
    """Follows arguments called `code` through the modules of one package."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules = [_Module(p, ast.parse(p.read_text(encoding="utf-8"))) for p in sorted(folder.rglob("*.py"))]

    def codes(self) -> dict[str, tuple[str, ...]]:
        """Returns code → files."""
        found: defaultdict[str, set[str]] = defaultdict(set)
        for module in self.modules:
            taking = {**_FOREIGN, **self._taking("code", module)}
            for call in ast.walk(module.tree):
                if not isinstance(call, ast.Call) or _called(call) not in taking:
                    continue
                value = _argument(call, "code", taking[_called(call)])
                for text in self._texts(module, value, module.owners[id(call)]) if value is not None else ():
                    found[text].add(module.path.relative_to(self.folder).as_posix())
        return {code: tuple(sorted(files)) for code, files in sorted(found.items())}

    def _taking(self, name: str, seen_from: _Module) -> dict[str, int]:
        """Returns callables with a parameter or field called `name`, and its position (-1: keyword only).

        A function of the module that it is seen from hides those of the same name elsewhere.
        """
        found: dict[str, int] = {}
        for module in sorted(self.modules, key=lambda module: module is seen_from):
            for node in ast.walk(module.tree):
                if module is seen_from and isinstance(node, Function | ast.ClassDef):
                    found.pop(node.name, None)
                if isinstance(node, Function):
                    positional = [a for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in _BOUND]
                    names = [a.arg for a in positional if a.arg != name or _is_text(a)]
                    if name in names:
                        found[node.name] = names.index(name)
                    elif name in (a.arg for a in node.args.kwonlyargs if _is_text(a)):
                        found[node.name] = -1
                elif isinstance(node, ast.ClassDef):
                    fields = [a.target.id for a in node.body if _is_field(a)]
                    if name in fields:
                        found[node.name] = fields.index(name)
        return found

    def _texts(self, module: _Module, value: ast.expr, functions: list[Function]) -> set[str]:
        """Returns the texts that an expression can be; none for a value that a caller passes on as `code`."""
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return {value.value}
        if isinstance(value, ast.IfExp):
            return self._texts(module, value.body, functions) | self._texts(module, value.orelse, functions)
        if isinstance(value, ast.Attribute) and value.attr == "code":
            return set()  # the field of a record, which is read where the record is made
        if isinstance(value, ast.JoinedStr):
            return self._joined(module, value, functions)
        if isinstance(value, ast.Name):
            return self._named(module, value.id, functions)
        if isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name):
            return _mapped(module, value.value.id)
        raise self._unresolved(module, value)

    def _joined(self, module: _Module, value: ast.JoinedStr, functions: list[Function]) -> set[str]:
        texts = {""}
        for part in value.values:
            inner = part.value if isinstance(part, ast.FormattedValue) else part
            ends = self._texts(module, inner, functions)
            texts = {start + end for start in texts for end in ends}
        return texts

    def _named(self, module: _Module, name: str, functions: list[Function]) -> set[str]:
        if (module.path.name, name) in _PASSED_ON:
            return set()
        for function in reversed(functions):
            if name in _parameters(function):
                return set() if name == "code" else self._passed(module, function.name, name)
            texts = self._assigned(module, name, function, functions)
            if texts:
                return texts
        raise self._unresolved(module, ast.Name(id=name, lineno=functions[-1].lineno if functions else 0))

    def _passed(self, owner: _Module, function: str, parameter: str) -> set[str]:
        """Returns what callers pass as a parameter."""
        position, texts = self._taking(parameter, owner)[function], set()
        for module in self.modules:
            if module is not owner and any(
                isinstance(n, Function) and n.name == function for n in ast.walk(module.tree)
            ):
                continue  # that module calls its own function of this name
            for call in ast.walk(module.tree):
                if isinstance(call, ast.Call) and _called(call) == function:
                    value = _argument(call, parameter, position)
                    texts |= set() if value is None else self._texts(module, value, module.owners[id(call)])
        return texts

    def _assigned(self, module: _Module, name: str, function: Function, functions: list[Function]) -> set[str]:
        """Returns the texts that a local name is given, alone or as an item of a tuple."""
        texts: set[str] = set()
        for node in ast.walk(function):
            pairs: list[tuple[ast.expr, ast.expr | None]] = []
            if isinstance(node, ast.Assign):
                pairs = [(target, node.value) for target in node.targets]
            elif isinstance(node, ast.comprehension | ast.For):
                pairs = [(node.target, None)]
            for target, value in pairs:
                if isinstance(target, ast.Name) and target.id == name and value is not None:
                    texts |= self._texts(module, value, functions)
                names = [item.id for item in target.elts if isinstance(item, ast.Name)] if _is_tuple(target) else []
                if name in names:
                    texts |= _items(module, names.index(name), len(names))
        return texts

    def _unresolved(self, module: _Module, value: ast.expr) -> UnresolvedCodeError:
        place = f"{module.path.relative_to(self.folder)}:{value.lineno}"
        return UnresolvedCodeError(f"{place}: cannot read which codes `{ast.unparse(value)}` may be")


_BOUND = ("self", "cls")


def _is_field(node: ast.stmt) -> Any:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def _is_text(argument: ast.arg) -> bool:
    """Whether a parameter takes a text: an exit code is no diagnostic code."""
    return isinstance(argument.annotation, ast.Name) and argument.annotation.id == "str"


def _is_tuple(node: ast.expr) -> Any:
    return isinstance(node, ast.Tuple)


def _called(call: ast.Call) -> str:
    function = call.func
    return (
        function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
    )


def _argument(call: ast.Call, name: str, position: int) -> ast.expr | None:
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    return call.args[position] if 0 <= position < len(call.args) else None


def _parameters(function: Function) -> set[str]:
    arguments = function.args
    return {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}


def _items(module: _Module, index: int, length: int) -> set[str]:
    """Returns the kebab-case texts at one place of the tuples of one length in a module."""
    tuples = (n for n in ast.walk(module.tree) if isinstance(n, ast.Tuple) and len(n.elts) == length)
    values = (t.elts[index] for t in tuples)
    texts = {v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)}
    return {text for text in texts if CODE.fullmatch(text) and "-" in text}


def _mapped(module: _Module, name: str) -> set[str]:
    """Returns the texts that a mapping of the module holds as values."""
    texts = set()
    for node in ast.walk(module.tree):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(t, ast.Name) and t.id == name for t in targets) and isinstance(node.value, ast.Dict):  # type: ignore[attr-defined]
            texts |= {v.value for v in node.value.values if isinstance(v, ast.Constant)}  # type: ignore[attr-defined]
    return texts


def code_entries() -> dict[str, dict[str, str]]:
    """Returns what docs/errors.yaml says: code → meaning, fix, area."""
    document: dict[str, dict[str, str]] = yaml.safe_load(ENTRIES.read_text(encoding="utf-8"))
    return document


def codes_section() -> str:
    """Returns the reference of all codes, by area, each code with an anchor of its own name."""
    areas: defaultdict[str, list[str]] = defaultdict(list)
    for code, entry in sorted(code_entries().items()):
        areas[entry["area"]].append(code)
    entries, parts = code_entries(), []
    for area, codes in areas.items():
        parts.append(heading(2, area))
        for code in codes:
            parts.append(
                f"### `{code}` {{ #{code} }}\n\n{entries[code]['meaning']}\n\n**Do:** {entries[code]['fix']}\n"
            )
    index = table(["code", "area"], [[f"[`{code}`](#{code})", entries[code]["area"]] for code in sorted(entries)])
    return "\n".join([f"{len(entries)} codes.\n", index, *parts])
