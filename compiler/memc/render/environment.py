"""The Jinja environment: strict, without escaping of its own, with one filter per language that is written."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from functools import cache
from typing import Any

import yaml
from jinja2 import BaseLoader, Environment, StrictUndefined, TemplateNotFound

from memc.render.bytecode import CompiledTemplates
from memc.resources import templates_root

_LINE_BREAKS_AND_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
_MARKDOWN_MARKS = re.compile(r"([\\`*_\[\]|~$])")
_MARKDOWN_LINE_START = re.compile(r"^(?:([ ])|([#+\-=])|(\d+)([.)]))")
_MARKDOWN_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;"}


class _PackageLoader(BaseLoader):
    """Reads templates from the folder that `memc.resources` names."""

    def get_source(self, environment: Environment, template: str) -> tuple[str, str, Callable[[], bool]]:
        """Returns source, name and an always-true freshness check of `template`.

        Raises:
            TemplateNotFound: When there is no such file.
        """
        path = templates_root().joinpath(*template.split("/"))
        if not path.is_file():
            raise TemplateNotFound(template)
        return path.read_text(encoding="utf-8"), template, lambda: True


@cache
def environment() -> Environment:
    """Returns the one environment that every template is rendered in."""
    # No HTML is written here: each value passes through the filter of the language around it instead.
    jinja = Environment(
        loader=_PackageLoader(),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        newline_sequence="\n",
    )
    jinja.filters.update(json=to_json, yaml=to_yaml, py=to_python, sh=to_shell, comment=to_comment, md=to_markdown)
    jinja.bytecode_cache = CompiledTemplates(jinja)
    return jinja


def to_json(value: Any) -> str:
    """Returns `value` as JSON: sorted keys, two spaces, ASCII only, no NaN.

    Raises:
        ValueError: When a number is not finite.
    """
    return json.dumps(value, sort_keys=True, indent=2, ensure_ascii=True, allow_nan=False)


def to_yaml(value: Any) -> str:
    """Returns `value` as block YAML that `yaml.safe_load` reads back; sorted keys, ASCII only, no final newline."""
    return yaml.safe_dump(value, sort_keys=True, allow_unicode=False, default_flow_style=False, width=4096).rstrip("\n")


def to_python(value: Any) -> str:
    """Returns `value` as a Python literal on one line; strings in double quotes where that needs no escape.

    Raises:
        TypeError: When the value is no plain literal (a record, an enum member): it would not read back.
    """
    if isinstance(value, bool) or value is None or type(value) in (int, float):
        return repr(value)
    if type(value) is str:
        text = ascii(value)
        return f'"{text[1:-1]}"' if text[0] == "'" and '"' not in text and "\\'" not in text else text
    if type(value) in (list, tuple):
        items = ", ".join(to_python(item) for item in value)
        if type(value) is list:
            return f"[{items}]"
        return f"({items},)" if len(value) == 1 else f"({items})"
    if type(value) is dict:
        return "{" + ", ".join(f"{to_python(key)}: {to_python(item)}" for key, item in value.items()) + "}"
    raise TypeError(f"{value!r} is a {type(value).__name__}, which is no plain Python literal")


def to_shell(value: str) -> str:
    """Returns `value` quoted for a POSIX shell."""
    return shlex.quote(value)


def to_comment(value: str) -> str:
    """Returns `value` on one line, for a comment of Python, YAML or shell.

    Line breaks, control characters and marks that reorder text are shown as escapes, so nothing can leave the comment.
    """
    return _LINE_BREAKS_AND_CONTROLS.sub(lambda match: ascii(match.group())[1:-1], str(value))


def to_markdown(value: str) -> str:
    """Returns `value` as plain text of one line in Markdown: no markup, no HTML, no table cell border survives."""
    text = _MARKDOWN_MARKS.sub(r"\\\1", to_comment(value))
    text = "".join(_MARKDOWN_ENTITIES.get(character, character) for character in text)
    return _MARKDOWN_LINE_START.sub(_escape_line_start, text)


def _escape_line_start(match: re.Match[str]) -> str:
    """Returns a line's first mark so that it opens no heading, list or code block."""
    space, mark, number, dot = match.groups()
    if space:
        return "&#32;"
    return f"\\{mark}" if mark else f"{number}\\{dot}"
