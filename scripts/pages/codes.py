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
    """One file: its nodes, the functions around each, the parameters of what it defines, and what lies in functions."""

    path: Path
    tree: ast.Module
    nodes: list[ast.AST] = field(default_factory=list)
    owners: dict[int, list[Function]] = field(default_factory=dict)
    definitions: dict[str, dict[str, int]] = field(default_factory=dict)
    inner: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._own(self.tree, [])
        for node in self.nodes:
            if isinstance(node, Function):
                self.definitions[node.name] = _text_parameters(node)
                if self.owners[id(node)]:
                    self.inner.add(node.name)
            elif isinstance(node, ast.ClassDef):
                self.definitions[node.name] = {name: at for at, name in enumerate(_field_names(node))}

    def _own(self, node: ast.AST, functions: list[Function]) -> None:
        self.nodes.append(node)
        self.owners[id(node)] = functions
        inner = [*functions, node] if isinstance(node, Function) else functions
        for child in ast.iter_child_nodes(node):
            self._own(child, inner)

    def calls(self) -> list[ast.Call]:
        """Returns all calls."""
        return [node for node in self.nodes if isinstance(node, ast.Call)]


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
            for call in module.calls():
                if _called(call) not in taking:
                    continue
                value = _argument(call, "code", taking[_called(call)])
                for text in self._texts(module, value, module.owners[id(call)]) if value is not None else ():
                    found[text].add(module.path.relative_to(self.folder).as_posix())
        return {code: tuple(sorted(files)) for code, files in sorted(found.items())}

    def _taking(self, name: str, seen_from: _Module) -> dict[str, int]:
        """Returns callables with a parameter or field called `name`, and its position (-1: keyword only).

        What the module that it is seen from defines hides everything of the same name elsewhere; a function inside a
        function is seen in its own module alone.
        """
        others = (module for module in self.modules if module is not seen_from)
        found = {
            called: names[name]
            for module in others
            for called, names in module.definitions.items()
            if name in names and called not in seen_from.definitions and called not in module.inner
        }
        own = seen_from.definitions.items()
        return found | {called: names[name] for called, names in own if name in names}

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
        position, texts = owner.definitions[function][parameter], set()
        for module in self.modules:
            if module is not owner and function in module.definitions:
                continue  # that module calls its own function of this name
            for call in module.calls():
                value = _argument(call, parameter, position) if _called(call) == function else None
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
                names = _tuple_names(target)
                if name in names:
                    texts |= _items(module, names.index(name), len(names))
        return texts

    def _unresolved(self, module: _Module, value: ast.expr) -> UnresolvedCodeError:
        place = f"{module.path.relative_to(self.folder)}:{value.lineno}"
        return UnresolvedCodeError(f"{place}: cannot read which codes `{ast.unparse(value)}` may be")


_BOUND = ("self", "cls")


def _field_names(record: ast.ClassDef) -> list[str]:
    targets = [node.target for node in record.body if isinstance(node, ast.AnnAssign)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _text_parameters(function: Function) -> dict[str, int]:
    """Returns the parameters that take a text and their positions; an exit code is no diagnostic code."""
    arguments = function.args
    positional = [a for a in (*arguments.posonlyargs, *arguments.args) if a.arg not in _BOUND]
    found = {a.arg: at for at, a in enumerate(positional) if _is_text(a)}
    return found | {a.arg: -1 for a in arguments.kwonlyargs if _is_text(a)}


def _is_text(argument: ast.arg) -> bool:
    return isinstance(argument.annotation, ast.Name) and argument.annotation.id == "str"


def _tuple_names(target: ast.expr) -> list[str]:
    """Returns the names that a target unpacks to; none when it is no tuple."""
    items = target.elts if isinstance(target, ast.Tuple) else []
    return [item.id for item in items if isinstance(item, ast.Name)]


def _called(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


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
    tuples = (n for n in module.nodes if isinstance(n, ast.Tuple) and len(n.elts) == length)
    values = (t.elts[index] for t in tuples)
    texts = {v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)}
    return {text for text in texts if CODE.fullmatch(text) and "-" in text}


def _mapped(module: _Module, name: str) -> set[str]:
    """Returns the texts that a mapping of the module holds as values."""
    texts: set[str] = set()
    for node in module.nodes:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, ast.Dict):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if name in [target.id for target in targets if isinstance(target, ast.Name)]:
            texts |= {v.value for v in node.value.values if isinstance(v, ast.Constant) and isinstance(v.value, str)}
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
        parts += [_entry(code, entries[code]) for code in codes]
    index = table(["code", "area"], [[f"[`{code}`](#{code})", entries[code]["area"]] for code in sorted(entries)])
    return "\n".join([f"{len(entries)} codes.\n", index, *parts])


def _entry(code: str, entry: dict[str, str]) -> str:
    return f"### `{code}` {{ #{code} }}\n\n{entry['meaning']}\n\n**Do:** {entry['fix']}\n"
