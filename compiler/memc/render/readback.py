"""Reads every rendered file back with the parser of its language and compares it with what it was written from."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import yaml

from memc.errors import Diagnostic, ExitCode, MemcError

_BASH_SECONDS = 30


def check_json(name: str, text: str, document: Mapping[str, Any]) -> None:
    """Raises MemcError when `text` is not exactly `document` as JSON."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise _differs(name, str(error)) from error
    if found != document:
        raise _differs(name, f"it reads back as {found!r}")


def check_yaml(name: str, text: str, document: Mapping[str, Any]) -> None:
    """Raises MemcError when `text` is not exactly `document` as YAML."""
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise _differs(name, str(error)) from error
    if found != document:
        raise _differs(name, f"it reads back as {found!r}")


def check_yaml_documents(name: str, text: str, documents: list[dict[str, Any]]) -> None:
    """Raises MemcError when `text` is not exactly these documents as YAML, one after the other."""
    try:
        found = list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        raise _differs(name, str(error)) from error
    if found != documents:
        raise _differs(name, "its documents read back differently")


def check_python(name: str, text: str, constants: Mapping[str, Any]) -> None:
    """Raises MemcError when `text` is no Python or one of its top-level constants is not what it should be."""
    try:
        tree = ast.parse(text, filename=name)
    except (SyntaxError, ValueError) as error:
        raise _differs(name, str(error)) from error
    found: dict[str, Any] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            target = statement.targets[0].id
            if target in constants:
                found[target] = ast.literal_eval(statement.value)
    for target, value in constants.items():
        if target not in found:
            raise _differs(name, f"it does not set {target}")
        if found[target] != value or type(found[target]) is not type(value):
            raise _differs(name, f"{target} reads back as {found[target]!r}, not {value!r}")


def check_shell(name: str, text: str) -> None:
    """Raises MemcError when bash is installed and finds `text` malformed (``bash -n``: nothing is run)."""
    bash = shutil.which("bash")
    if bash is not None and (complaint := _bash_complaint(bash, text)):
        raise _differs(name, complaint)


@lru_cache(maxsize=64)
def _bash_complaint(bash: str, text: str) -> str:
    """Returns what bash says of a script; empty when it parses. Many specs have one launcher: each is asked once."""
    outcome = subprocess.run(
        [bash, "--norc", "-n", "/dev/stdin"], input=text, capture_output=True, text=True, timeout=_BASH_SECONDS
    )
    return (outcome.stderr.strip() or "bash -n refuses it") if outcome.returncode else ""


def check_comment_header(name: str, text: str, lines: tuple[str, ...]) -> None:
    """Raises MemcError when one of `lines` is not a comment line of its own in `text`."""
    present = set(text.split("\n"))
    for line in lines:
        if f"# {line}" not in present:
            raise _differs(name, "its header is not one comment line each")


def _differs(name: str, finding: str) -> MemcError:
    return MemcError(
        (
            Diagnostic(
                code="render-mismatch",
                message=f"{name} as written does not say what the plan says: {finding}",
                hint="This is a defect of memc; nothing was written. Report it with the spec.",
            ),
        ),
        exit_code=ExitCode.INTERNAL,
    )
