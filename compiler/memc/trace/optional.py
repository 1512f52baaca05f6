"""Libraries that only some traces need."""

from __future__ import annotations

import importlib
import sys
from types import FunctionType
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


def packages_left_out(model: Any) -> tuple[str, ...]:
    """Returns packages whose kernels a model would run where they are installed, and whose work torch does here.

    Source: transformers/integrations/hub_kernels.py use_kernel_func_from_hub_with_fallback: what it wraps holds the
        package's name, and whether a function of the package took the place of the one in torch.
    """
    found: dict[str, None] = {}
    for module_name in dict.fromkeys(type(module).__module__ for module in model.modules()):
        for value in vars(sys.modules[module_name]).values():
            package = _package_of(value)
            if package is not None:
                found[package] = None
    return tuple(sorted(found))


def _package_of(function: Any) -> str | None:
    """Returns the package that a function of torch stands in for; None when there is none."""
    while isinstance(function, FunctionType):
        held = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if "package" in held and "is_new_implementation" in held:
            return None if held["is_new_implementation"].cell_contents else str(held["package"].cell_contents)
        function = getattr(function, "__wrapped__", None)
    return None
