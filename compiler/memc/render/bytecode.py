"""Compiled templates: kept beside the templates, where Python keeps compiled modules, and by the same rules."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

import jinja2
from jinja2 import BytecodeCache, Environment
from jinja2.bccache import Bucket

from memc.resources import keep, kept_path, templates_root

_FILTERS_SOURCE = Path(__file__).with_name("environment.py")


class CompiledTemplates(BytecodeCache):
    """Reads and writes the byte code of templates in `__pycache__`.

    Nothing is written where Python would write no byte code (PYTHONDONTWRITEBYTECODE, a folder that is read-only, a
    wheel that is run without being unpacked); PYTHONPYCACHEPREFIX moves it. Byte code is used only while the template,
    the version of Jinja and the filters are what they were: constant expressions are computed when it is made.
    """

    def __init__(self, environment: Environment) -> None:
        options = (environment.trim_blocks, environment.lstrip_blocks, environment.keep_trailing_newline)
        made_by = f"{jinja2.__version__} {options} {sorted(environment.filters)}".encode()
        with contextlib.suppress(OSError):
            made_by += _FILTERS_SOURCE.read_bytes()
        self._made_by = hashlib.sha256(made_by).hexdigest()[:16]

    def get_cache_key(self, name: str, filename: str | None = None) -> str:
        """Returns the name of the template, from which its file follows."""
        return name

    def load_bytecode(self, bucket: Bucket) -> None:
        """Fills `bucket` where there is byte code of the same source; Jinja checks that."""
        path = self._path(bucket.key)
        if path is not None:
            with contextlib.suppress(OSError, ValueError, EOFError, TypeError), path.open("rb") as stream:
                bucket.load_bytecode(stream)

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Writes the byte code of `bucket`, whole or not at all; a folder that cannot be written is left alone."""
        keep(self._path(bucket.key), bucket.bytecode_to_string())

    def _path(self, name: str) -> Path | None:
        """Returns where the byte code of a template lies; None when templates are not files of their own."""
        return kept_path(templates_root().joinpath(*name.split("/")), self._made_by)
