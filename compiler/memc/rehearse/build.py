"""The phantom's libraries, built for the installed torch on first use and kept in the user's own cache.

Three kinds: `libphantom.so`, which is loaded before everything else and answers for CUDA's runtime, driver, cuBLAS and
their like; an empty library for each name that torch asks the loader for, so that it starts without them; and
`libshadow.so`, which the rehearsed process loads into torch, and which keeps small data true.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from memc.errors import Diagnostic, ExitCode, MemcError
from memc.rehearse.toolchain import Toolchain

SOURCE = "phantom.c"
LIBRARY = "libphantom.so"
SHADOW_SOURCE = "shadow.cpp"
SHADOW = "libshadow.so"
MANIFEST = "manifest.json"
UNMODELLED = "unmodelled.txt"
FLAGS = ("-O1", "-fPIC", "-std=gnu11", "-Wall", "-Werror", "-Wno-unused-parameter")
SHADOW_FLAGS = ("-O1", "-fPIC", "-shared", "-std=c++20", "-w")
ALWAYS = ("libcuda.so.1", "libnvidia-ml.so.1")
"""Names that are asked for while running, not when torch is loaded."""

_EMPTY_DEFINES = (
    "__host__",
    "__device__",
    "__device_builtin__",
    "__device_builtin_texture_type__",
    "__device_builtin_surface_type__",
    "__cudart_builtin__",
    "CUDARTAPI",
    "CUDARTAPI_CDECL",
    "CUDART_CB",
)

_CUDA = re.compile(
    r"(?:__cuda|cuda[A-Z]|cublas|cudnn|cusparse|cufft|curand|cusolver|cupti|cuFile|cu[A-Z]|nccl|nvrtc|nvshmem|nvJit|nvml)\w*$"
)
_CUDA_LIBRARY = re.compile(r"lib(?:cud|cub|cus|cuf|cur|cup|nccl|nvrtc|nvshmem|nvJit|nvtx|nvidia-ml)")
_QUIET = re.compile(
    r"(?:cuda(?:Stream|Event)(?:Destroy|Synchronize|Query|Record\w*|WaitEvent)|cudaDeviceSynchronize|cudaFuncSetAttribute"
    r"|cudaGetLastError|cudaPeekAtLastError|__cuda\w+|cublas\w+)$"
)
"""Functions of which "success" is the whole answer; using any other that is not modelled is noted."""


@dataclass(frozen=True, kw_only=True)
class Phantom:
    """A built phantom.

    Attributes:
        folder: Holds the library and the empty ones.
        unmodelled: How many functions answer "success" without being modelled.
    """

    folder: Path
    unmodelled: int

    def environment(self, inherited: str) -> dict[str, str]:
        """Returns what the loader of the rehearsed process must find; `inherited` is its library path so far."""
        path = os.pathsep.join(filter(None, (str(self.folder), inherited)))
        return {
            "LD_PRELOAD": str(self.folder / LIBRARY),
            "LD_LIBRARY_PATH": path,
            "MEMC_PHANTOM_SHADOW": str(self.folder / SHADOW),
        }


def phantom(toolchain: Toolchain) -> Phantom:
    """Returns the phantom of this toolchain: from the cache when it is there and as it was built, else built.

    Raises:
        MemcError: Exit 2 when it cannot be built or the cache belongs to somebody else.
    """
    source, shadow = (files(__package__).joinpath(name).read_bytes() for name in (SOURCE, SHADOW_SOURCE))
    root = _private_cache()
    folder = root / _digest(toolchain, source + shadow)
    if folder.is_symlink() or folder.is_dir():
        if (known := _checked(folder)) is not None:
            return known
        _remove(folder)
    scratch = Path(tempfile.mkdtemp(dir=root, prefix=".building-"))
    try:
        _build(scratch, toolchain, source)
        _build_shadow(scratch, toolchain, shadow)
        _seal(scratch, toolchain)
        try:
            scratch.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(scratch)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    built = _checked(folder)
    assert built is not None
    return built


def _remove(folder: Path) -> None:
    """Removes what cannot be trusted; of a link, the link alone."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def _private_cache() -> Path:
    """Returns the cache, which only this user may write to.

    Raises:
        MemcError: Exit 2 when it, or memc's folder above it, is a link, belongs to somebody else, or is open to others.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = base / "memc" / "phantom"
    base.mkdir(parents=True, exist_ok=True)
    for folder in (root.parent, root):
        folder.mkdir(exist_ok=True, mode=0o700)
        if not _ours(folder, stat.S_ISDIR):
            message = (
                f"{folder} is a link, belongs to another user or can be written to by others; what lies there would be "
                "loaded as code"
            )
            hint = f"make it a folder of your own (`chmod 700 {folder}`), or set XDG_CACHE_HOME to one"
            raise MemcError((Diagnostic(code="rehearse-cache", message=message, hint=hint),), ExitCode.USAGE)
    return root


def _ours(path: Path, is_kind: Callable[[int], bool]) -> bool:
    """Returns whether a path is of this kind itself (not a link to one), this user's, and closed to others' writing."""
    status = path.lstat()
    return is_kind(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _digest(toolchain: Toolchain, source: bytes) -> str:
    """Returns a name for all that the result depends on."""
    parts = [source.hex(), *FLAGS, *SHADOW_FLAGS, toolchain.torch_version, str(toolchain.include)]
    parts += [toolchain.compiler, toolchain.cpp, str(toolchain.torch)]
    parts += [f"{path}:{(status := path.stat()).st_size}:{status.st_mtime_ns}" for path in toolchain.libraries]
    parts.append(Path(__file__).read_text(encoding="utf-8"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def _checked(folder: Path) -> Phantom | None:
    """Returns the phantom in `folder`; None when a file is not as it was built, is not this user's, or is one more.

    The loader looks for libraries there by name: a file that nobody built must not be found.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        digests = dict(manifest["files"])
        if not _ours(folder, stat.S_ISDIR) or {path.name for path in folder.iterdir()} != {MANIFEST, *digests}:
            return None
        for name, digest in digests.items():
            path = folder / name
            if not _ours(path, stat.S_ISREG) or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
                return None
        return Phantom(folder=folder, unmodelled=int(manifest["unmodelled"]))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None


def _build(folder: Path, toolchain: Toolchain, source: bytes) -> None:
    (folder / SOURCE).write_bytes(source)
    needed, names = _wanted(toolchain)
    include = [f"-I{toolchain.include}", f"-I{_host_defines(folder, toolchain.include)}"]
    _run([toolchain.compiler, *FLAGS, *include, "-c", SOURCE, "-o", "phantom.o"], folder)
    modelled = _symbols(toolchain.nm, folder / "phantom.o", undefined=False)
    rest = sorted(needed - modelled)
    (folder / "rest.c").write_text(_rest(rest), encoding="utf-8")
    _run([toolchain.compiler, "-O1", "-fPIC", "-w", "-fno-builtin", "-c", "rest.c", "-o", "rest.o"], folder)
    shared = [toolchain.compiler, "-shared", "-fPIC"]
    _run([*shared, "phantom.o", "rest.o", "-o", LIBRARY, f"-Wl,-soname,{LIBRARY}", "-lpthread", "-ldl"], folder)
    (folder / "empty.c").write_text("", encoding="utf-8")
    for name in sorted({*names, *ALWAYS}):
        _run([*shared, "empty.c", "-o", name, f"-Wl,-soname,{name}", "-Wl,--no-as-needed", LIBRARY], folder)
    (folder / UNMODELLED).write_text(str(len(rest)), encoding="utf-8")


def _build_shadow(folder: Path, toolchain: Toolchain, source: bytes) -> None:
    """Builds what torch loads beside itself, against its own headers and libraries."""
    if toolchain.torch is None:
        return
    (folder / SHADOW_SOURCE).write_bytes(source)
    include, libraries = toolchain.torch / "include", toolchain.torch / "lib"
    new_strings = b"__cxx11" in (libraries / "libc10.so").read_bytes()
    flags = [*SHADOW_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(new_strings)}"]
    flags += [f"-isystem{include}", f"-isystem{include / 'torch' / 'csrc' / 'api' / 'include'}"]
    _run([toolchain.cpp, *flags, SHADOW_SOURCE, "-o", SHADOW, f"-L{libraries}", "-lc10", "-ltorch_cpu"], folder)


def _seal(folder: Path, toolchain: Toolchain) -> None:
    """Removes what is not needed any more and writes down what is left."""
    unmodelled = int((folder / UNMODELLED).read_text(encoding="utf-8"))
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif ".so" not in path.suffixes:
            path.unlink()
        else:
            path.chmod(0o500)
    kept = sorted(path.name for path in folder.iterdir())
    manifest = {
        "files": {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in kept},
        "unmodelled": unmodelled,
        "torch": toolchain.torch_version,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _host_defines(folder: Path, include: Path) -> Path:
    """Returns a folder whose `crt/host_defines.h` says what the runtime's header takes from the compiler's package."""
    own = folder / "include"
    if not (include / "crt" / "host_defines.h").is_file():
        (own / "crt").mkdir(parents=True)
        empty = [f"#define {name}" for name in _EMPTY_DEFINES]
        aligned = [f"#define {name}(n) __attribute__((aligned(n)))" for name in ("__builtin_align__", "__align__")]
        text = "\n".join(["#pragma once", *empty, *aligned]) + "\n"
        (own / "crt" / "host_defines.h").write_text(text, encoding="utf-8")
    return own


def _wanted(toolchain: Toolchain) -> tuple[set[str], set[str]]:
    """Returns the CUDA functions that the libraries need and do not have, and the libraries that they name."""
    needed: set[str] = set()
    own: set[str] = set()
    names: set[str] = set()
    for library in toolchain.libraries:
        needed |= _symbols(toolchain.nm, library, undefined=True)
        own |= _symbols(toolchain.nm, library, undefined=False)
        dynamic = _run([toolchain.readelf, "--dynamic", str(library)], library.parent)
        names |= {name for name in re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic) if _CUDA_LIBRARY.match(name)}
    return needed - own, names


def _symbols(nm: str, library: Path, *, undefined: bool) -> set[str]:
    """Returns CUDA's functions that a library or an object file lacks, or those that it has."""
    found = set()
    dynamic = ["--dynamic"] if ".so" in library.suffixes else []
    for line in _run([nm, *dynamic, str(library)], library.parent).splitlines():
        *_, kind, name = line.split()
        name = name.partition("@")[0]
        if _CUDA.match(name) and (kind == "U" if undefined else kind in "TW"):
            found.add(name)
    return found


def _rest(names: list[str]) -> str:
    """Returns the source of the functions that answer "success"; the first use of one that should do more is noted."""
    lines = ["extern void phantom_note(const char *);"]
    for name in names:
        note = "" if _QUIET.match(name) else f'static int said; if (!said) {{ said = 1; phantom_note("{name}"); }} '
        lines.append(f'__attribute__((visibility("default"))) long {name}(void) {{ {note}return 0; }}')
    return "\n".join(lines) + "\n"


def _run(command: list[str], folder: Path) -> str:
    """Returns what a program prints.

    Raises:
        MemcError: Exit 2 when it fails.
    """
    finished = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        context = tuple(line for line in finished.stderr.splitlines() if line.strip())[:6]
        message = f"the phantom card cannot be built: {Path(command[0]).name} exited {finished.returncode}"
        hint = "the headers must be those of the CUDA that torch was built for"
        diagnostic = Diagnostic(code="rehearse-build", message=message, context=context, hint=hint)
        raise MemcError((diagnostic,), ExitCode.USAGE)
    return finished.stdout
