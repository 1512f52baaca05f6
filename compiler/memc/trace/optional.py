"""Libraries that only some traces need."""

from __future__ import annotations

import importlib
from typing import Any

from memc.errors import usage_error


def library(name: str, purpose: str) -> Any:
    """Returns the imported module `name`.

    Raises:
        MemcError: `trace-library-missing`, when it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as missing:
        package = name.partition(".")[0]
        raise usage_error(
            "trace-library-missing",
            f"tracing {purpose} runs {package}, which cannot be imported here: {missing}",
            hint=f"pip install {package}, or install memc[train]",
        ) from missing
