"""What the phantom is built from: the CUDA build of torch in this environment, CUDA's headers, a C compiler."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from memc.errors import Diagnostic, ExitCode, MemcError

_LIBRARIES = (
    "c10_cuda",
    "torch_cuda",
    "torch_python",
    "torch_cuda_linalg",
    "torch_nvshmem",
    "caffe2_nvrtc",
    "torch_cpu",
)
_HEADER = "cuda_runtime_api.h"


@dataclass(frozen=True, kw_only=True)
class Toolchain:
    """Where everything is.

    Attributes:
        torch_version: As torch names it.
        cuda_version: CUDA that torch was built for, for example ``13.0``.
        libraries: Shared libraries whose undefined symbols the phantom answers.
        include: Folder of CUDA's headers.
        compiler, nm, readelf: Programs.
        torch: Torch's folder, whose headers and libraries the shadow is built with; None: there will be no shadow.
        cpp: The C++ compiler.
    """

    torch_version: str
    cuda_version: str
    libraries: tuple[Path, ...]
    include: Path
    compiler: str
    nm: str
    readelf: str
    torch: Path | None = None
    cpp: str = ""


def find_toolchain() -> Toolchain:
    """Returns what the phantom can be built from, found without importing torch.

    Raises:
        MemcError: Exit 2, one diagnostic for each thing that is missing.
    """
    problems: list[Diagnostic] = []
    if sys.platform != "linux" or platform.machine() != "x86_64":
        problems.append(
            _lacks("rehearse-platform", f"this machine is {sys.platform} on {platform.machine()}", _PLATFORM)
        )
    version, cuda, folder = _torch()
    if not version:
        problems.append(_lacks("rehearse-without-torch", "torch is not installed beside memc", _TORCH))
    elif not cuda:
        problems.append(
            _lacks("rehearse-without-cuda", f"torch {version} is a CPU build and has no CUDA to rehearse", _TORCH)
        )
    elif importlib.util.find_spec("triton") is None:
        message = "triton is not installed: libraries would take other paths than on the planned machine"
        problems.append(
            _lacks("rehearse-without-triton", message, "`pip install triton`, which torch's CUDA build needs")
        )
    include = _headers(folder)
    if cuda and include is None:
        problems.append(_lacks("rehearse-without-headers", f"{_HEADER} is not found", _HEADERS))
    programs = {name: shutil.which(name) for name in ("nm", "readelf")}
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    cpp = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if compiler is None or cpp is None or None in programs.values():
        problems.append(
            _lacks("rehearse-without-compiler", "no C and C++ compiler with binutils is on the PATH", _COMPILER)
        )
    if problems or include is None or compiler is None or cpp is None or folder is None:
        raise MemcError(tuple(problems), ExitCode.USAGE)
    named = [folder / "lib" / f"lib{name}.so" for name in _LIBRARIES]
    return Toolchain(
        torch_version=version,
        cuda_version=cuda,
        libraries=(*(path for path in named if path.is_file()), *_bitsandbytes(cuda)),
        include=include,
        compiler=compiler,
        nm=str(programs["nm"]),
        readelf=str(programs["readelf"]),
        torch=folder,
        cpp=cpp,
    )


def _torch() -> tuple[str, str, Path | None]:
    """Returns torch's version, its CUDA's version (empty for a CPU build) and its folder; torch is not imported."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return "", "", None
    folder = Path(found.origin).parent
    try:
        text = (folder / "version.py").read_text(encoding="utf-8")
    except OSError:
        return "", "", None
    values = {name: match[1] for name in ("__version__", "cuda") if (match := _assigned(text, name))}
    return values.get("__version__", ""), values.get("cuda", ""), folder


def _assigned(text: str, name: str) -> re.Match[str] | None:
    return re.search(rf"^{name}(?:\s*:[^=]+)?\s*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)


def _headers(torch: Path | None) -> Path | None:
    """Returns the folder of CUDA's headers: those that came with torch, else the toolkit of this machine."""
    beside = sorted(torch.parent.glob(f"nvidia/*/include/{_HEADER}")) if torch is not None else []
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    toolkits = [Path(home) / "include" / _HEADER for home in (*homes, "/usr/local/cuda")]
    return next((path.parent for path in (*beside, *toolkits) if path.is_file()), None)


def _bitsandbytes(cuda: str) -> tuple[Path, ...]:
    """Returns bitsandbytes' library for this CUDA, where there is one."""
    found = importlib.util.find_spec("bitsandbytes")
    if found is None or found.origin is None:
        return ()
    library = Path(found.origin).parent / f"libbitsandbytes_cuda{cuda.replace('.', '')}.so"
    return (library,) if library.is_file() else ()


_PLATFORM = "rehearse on Linux x86-64; `memc trace` needs torch alone and runs everywhere"
_TORCH = (
    "install the CUDA build of torch into the environment of memc (`pip install torch` on Linux), or use `memc trace`"
)
_TRITON = "`pip install triton`: torch's CUDA build needs it"
_HEADERS = "install them beside torch (`pip install nvidia-cuda-runtime`), or set CUDA_HOME to a toolkit"
_COMPILER = "install gcc, g++ and binutils (`apt install build-essential`)"


def _lacks(code: str, message: str, hint: str) -> Diagnostic:
    return Diagnostic(code=code, message=message, hint=hint)
