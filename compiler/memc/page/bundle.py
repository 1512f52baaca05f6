"""What travels inside a page: the source of the ledger without its comments, and scripts, compressed."""

from __future__ import annotations

import ast
import base64
import gzip
import json
from collections.abc import Mapping
from importlib.resources.abc import Traversable

from memc.resources import sources_root, templates_root

_MODULES = (
    "config.py",
    "document.py",
    "errors.py",
    "plan.py",
    "transfer.py",
    "units.py",
    "whatif.py",
    "facts/records.py",
)
_PACKAGES = ("clock", "ladder", "ledger")
_IN_BRYTHON = ("browser",)
_ONLY_FOR_TYPES = ("__future__", "collections.abc", "typing")
_VENDOR = {"brython": "brython.min.js", "chart": "chart.umd.min.js"}


def packed_script(name: str) -> str:
    """Returns a vendored script, gzip in base64; `name` is ``brython`` or ``chart``."""
    return _packed(templates_root().joinpath("report", "vendor", _VENDOR[name]).read_bytes())


def packed_modules(more: Mapping[str, str]) -> str:
    """Returns the modules that a page runs, as Brython's virtual file system: JSON, gzip in base64.

    Args:
        more: Source of further modules by name.
    """
    stand_ins = templates_root().joinpath("report", "modules")
    found = {"memc": _package(_source("__init__.py"))}
    for path in _MODULES:
        found[_dotted(path)] = _module(_source(path))
    for package in _PACKAGES:
        for file in sorted(_folder(package).iterdir(), key=lambda item: item.name):
            if file.name.endswith(".py"):
                wrap = _package if file.name == "__init__.py" else _module
                found[_dotted(f"{package}/{file.name}")] = wrap(stripped(file.read_text(encoding="utf-8")))
    found["memc.facts"] = _package(stripped(stand_ins.joinpath("facts.py").read_text(encoding="utf-8")))
    found["page"] = _module(stripped(stand_ins.joinpath("page.py").read_text(encoding="utf-8")))
    found |= {name: _module(source) for name, source in more.items()}
    for name in {name for _, source, *_ in found.values() for name in _imported(str(source))} - found.keys():
        stand_in = stand_ins.joinpath(f"{name}.py")
        if stand_in.is_file():
            found[name] = _module(stripped(stand_in.read_text(encoding="utf-8")))
        elif name not in _IN_BRYTHON:
            found[name] = _module("")
    return _packed(json.dumps(found, sort_keys=True, separators=(",", ":")).encode())


def _imported(source: str) -> set[str]:
    """Returns the modules outside memc that a source imports.

    One that the page has no stand-in for is empty there: it can be imported by what never uses it, and fails where a
    name of it is wanted.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module)
    return {name for name in names if name.split(".")[0] != "memc"}


def stripped(source: str) -> str:
    """Returns Python source without comments, docstrings and annotations, for an interpreter that needs none of them.

    A set display becomes a frozenset, which Brython can combine with others; nothing that is embedded changes one.
    """
    return ast.unparse(ast.fix_missing_locations(_Stripper().visit(ast.parse(source))))


class _Stripper(ast.NodeTransformer):
    """Removes what only people and type checkers read. Annotated fields of classes keep their names."""

    def __init__(self) -> None:
        self._in_class = False

    def visit_Module(self, node: ast.Module) -> ast.AST:
        """Returns the module without its docstring."""
        return self._scope(node, in_class=False)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """Returns the class without its docstring."""
        return self._scope(node, in_class=True)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Returns the function without docstring and annotations."""
        node.returns = None
        return self._scope(node, in_class=False)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        """Returns the argument without its annotation."""
        node.annotation = None
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        """Returns nothing for imports that only annotations use."""
        return None if node.module in _ONLY_FOR_TYPES else node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        """Returns a plain assignment; in a class, the field with an empty annotation."""
        self.generic_visit(node)
        if self._in_class:
            node.annotation = ast.Constant(0)
            return node
        return ast.Assign(targets=[node.target], value=node.value) if node.value is not None else None

    def visit_Set(self, node: ast.Set) -> ast.AST:
        """Returns a frozenset of the same elements."""
        self.generic_visit(node)
        elements = ast.Tuple(elts=node.elts, ctx=ast.Load())
        return ast.Call(func=ast.Name(id="frozenset", ctx=ast.Load()), args=[elements], keywords=[])

    def _scope(self, node: ast.Module | ast.ClassDef | ast.FunctionDef, *, in_class: bool) -> ast.AST:
        outer, self._in_class = self._in_class, in_class
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
        self.generic_visit(node)
        if not node.body and not isinstance(node, ast.Module):
            node.body = [ast.Pass()]
        self._in_class = outer
        return node


def _source(path: str) -> str:
    return stripped(sources_root().joinpath(*path.split("/")).read_text(encoding="utf-8"))


def _folder(package: str) -> Traversable:
    return sources_root().joinpath(package)


def _dotted(path: str) -> str:
    parts = path.removesuffix(".py").split("/")
    return ".".join(["memc", *(part for part in parts if part != "__init__")])


def _module(source: str) -> list[object]:
    return [".py", source, []]


def _package(source: str) -> list[object]:
    return [".py", source, [], 1]


def _packed(content: bytes) -> str:
    return base64.b64encode(gzip.compress(content, compresslevel=9, mtime=0)).decode()
