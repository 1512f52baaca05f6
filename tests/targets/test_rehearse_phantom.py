"""The phantom card, built from its source and called as torch calls it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from memc.errors import MemcError
from memc.rehearse import build, run, toolchain
from memc.rehearse.build import LIBRARY, MANIFEST, Phantom, phantom
from memc.rehearse.run import _numbers
from memc.rehearse.toolchain import Toolchain, find_toolchain
from memc.verify.lock import read_lock
from planmaker import make_config
from specmaker import compile_folder

GIB = 1 << 30
CARD = f"2|{8 * GIB}|{GIB}|8|9|128|Card of eight"
CODES = {"out_of_memory": 2, "invalid_device": 101}


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Toolchain:
    """The tools of this machine, for no library: only what the source itself answers is built."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    include = toolchain._headers(Path(importlib.util.find_spec("torch").origin).parent)
    assert include is not None, "nvidia-cuda-runtime is among the packages for development"
    return Toolchain(
        torch_version="0", cuda_version="13.0", libraries=(), include=include, compiler="cc", nm="nm", readelf="readelf"
    )


@pytest.fixture
def built(tools: Toolchain) -> Phantom:
    """A phantom of its own."""
    return phantom(tools)


def said(built: Phantom, body: str) -> object:
    """Returns what a process prints as JSON that has the phantom loaded as `cuda`."""
    start = f"import ctypes, json; cuda = ctypes.CDLL({str(built.folder / LIBRARY)!r}); size = ctypes.c_size_t\n"
    environment = {**os.environ, "MEMC_PHANTOM": CARD}
    run = subprocess.run(
        [sys.executable, "-c", start + body], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(run.stdout)


def test_the_card_is_the_one_that_is_named(built: Phantom) -> None:
    body = """
count, free, total, capability = ctypes.c_int(), size(), size(), ctypes.c_int()
cuda.cudaGetDeviceCount(ctypes.byref(count)); cuda.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
cuda.cudaDeviceGetAttribute(ctypes.byref(capability), 75, 0)
print(json.dumps([count.value, free.value, total.value, capability.value, cuda.cudaSetDevice(2)]))
"""
    assert said(built, body) == [2, 7 * GIB, 8 * GIB, 8, CODES["invalid_device"]]


def test_memory_is_taken_in_granules_and_runs_out_at_the_card_s_size(built: Phantom) -> None:
    body = """
def malloc(n):
    place = ctypes.c_void_p(); return cuda.cudaMalloc(ctypes.byref(place), size(n)), place
def free():
    free, total = size(), size(); cuda.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)); return free.value
one, place = malloc(3 << 20); after = free()
too_much, _ = malloc(7 << 30)
cuda.cudaFree(place)
print(json.dumps([one, after, too_much, free(), malloc(7 << 30)[0]]))
"""
    assert said(built, body) == [0, 7 * GIB - (4 << 20), CODES["out_of_memory"], 7 * GIB, 0]


def test_each_card_has_memory_of_its_own(built: Phantom) -> None:
    body = """
place, free, total = ctypes.c_void_p(), size(), size()
first = cuda.cudaMalloc(ctypes.byref(place), size(7 << 30)); cuda.cudaSetDevice(1)
second = cuda.cudaMalloc(ctypes.byref(place), size(7 << 30))
print(json.dumps([first, second, cuda.cudaMalloc(ctypes.byref(place), size(1))]))
"""
    assert said(built, body) == [0, 0, CODES["out_of_memory"]]


COPYING = """
place = ctypes.c_void_p(); cuda.cudaMalloc(ctypes.byref(place), size(8 << 20))
def at(offset): return ctypes.c_void_p(place.value + offset)
def numbers(*values): return (ctypes.c_int64 * len(values))(*values)
def copy(to, of, n): assert cuda.cudaMemcpyAsync(to, of, size(n), 4, None) == 0
def back(offset, n):
    found = numbers(*[9] * n); copy(found, at(offset), 8 * n); return list(found)
"""


def test_small_copies_come_back_whole_and_in_parts_and_from_where_they_were_moved(built: Phantom) -> None:
    body = """
copy(place, numbers(3, 1, 4, 1), 32); copy(at(5 << 20), place, 32)
cuda.cudaMemsetAsync(at(8), 0, size(8), None)
print(json.dumps([back(0, 4), back(8, 2), back(5 << 20, 4)]))
"""
    assert said(built, COPYING + body) == [[3, 0, 4, 1], [0, 4], [3, 1, 4, 1]]


def test_what_nobody_wrote_is_zero_and_what_is_half_known_is_not_known(built: Phantom) -> None:
    body = """
copy(place, numbers(3, 1, 4, 1), 32)
cuda.phantom_mark(at(8), size(8), 0)
large = (ctypes.c_int64 * 16384)(*[7] * 16384)
copy(at(1 << 20), large, 131072)
known = [cuda.phantom_known(at(start), size(n)) for start, n in ((0, 8), (0, 16), (8, 8), (16, 16), (64, 8))]
print(json.dumps([back(0, 1), back(0, 4), back(16, 2), back(64, 1), back(1 << 20, 1), known]))
"""
    assert said(built, COPYING + body) == [[3], [0, 0, 0, 0], [4, 1], [0], [0], [1, 0, 0, 1, 0]]


def test_unmapped_and_freed_memory_is_forgotten(built: Phantom) -> None:
    body = """
address, none = ctypes.c_uint64(), ctypes.c_uint64(0)
cuda.cuMemAddressReserve(ctypes.byref(address), size(8 << 20), size(0), none, none)
place = ctypes.c_void_p(address.value)
copy(place, numbers(5), 8); copy(at(2 << 20), numbers(6), 8)
before = [back(0, 1), back(2 << 20, 1)]
cuda.cuMemUnmap(ctypes.c_uint64(place.value), size(2 << 20))
after = [back(0, 1), back(2 << 20, 1)]
copy(place, numbers(7), 8)
again = back(0, 1)
cuda.cuMemAddressFree(address, size(8 << 20))
print(json.dumps([before, after, again, cuda.phantom_known(place, size(8))]))
"""
    assert said(built, COPYING + body) == [[[5], [6]], [[0], [6]], [7], 0]


def test_expandable_segments_take_memory_when_it_is_mapped_not_when_it_is_reserved(built: Phantom) -> None:
    body = """
address, handle = ctypes.c_uint64(), ctypes.c_uint64()
what = (ctypes.c_uint8 * 64)()  # a zeroed CUmemAllocationProp: on card 0
def free():
    free, total = size(), size(); cuda.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)); return free.value
none = ctypes.c_uint64(0)
reserved = cuda.cuMemAddressReserve(ctypes.byref(address), size(40 << 30), size(0), none, none)
before = free()
created = cuda.cuMemCreate(ctypes.byref(handle), size(20 << 20), what, ctypes.c_uint64(0)); during = free()
too_much = cuda.cuMemCreate(ctypes.byref(ctypes.c_uint64()), size(7 << 30), what, ctypes.c_uint64(0))
cuda.cuMemRelease(handle)
print(json.dumps([reserved, before, created, during, too_much, free()]))
"""
    assert said(built, body) == [0, 7 * GIB, 0, 7 * GIB - (20 << 20), CODES["out_of_memory"], 7 * GIB]


def test_a_card_that_is_not_described_stops_the_process(built: Phantom) -> None:
    loading = f"import ctypes; ctypes.CDLL({str(built.folder / LIBRARY)!r})"
    environment = {**os.environ, "MEMC_PHANTOM": "nonsense"}
    run = subprocess.run([sys.executable, "-c", loading], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "does not describe a card" in run.stderr


def test_what_was_built_is_used_again_and_not_when_it_was_touched(tools: Toolchain, built: Phantom) -> None:
    library = built.folder / LIBRARY
    first = library.stat().st_mtime_ns
    assert phantom(tools) == built
    assert library.stat().st_mtime_ns == first
    content = library.read_bytes()
    library.chmod(0o700)
    library.write_bytes(content + b"x")
    assert phantom(tools).folder == built.folder
    assert library.read_bytes()[-1:] != b"x"


@pytest.mark.parametrize("above", [0, 1])
def test_a_cache_that_others_can_write_to_is_refused(tools: Toolchain, built: Phantom, above: int) -> None:
    built.folder.parents[above].chmod(0o777)
    with pytest.raises(MemcError) as caught:
        phantom(tools)
    assert caught.value.diagnostics[0].code == "rehearse-cache"


@pytest.mark.parametrize("above", [0, 1])
def test_a_cache_that_is_a_link_is_refused(tools: Toolchain, built: Phantom, tmp_path: Path, above: int) -> None:
    folder = built.folder.parents[above]
    elsewhere = tmp_path / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    with pytest.raises(MemcError) as caught:
        phantom(tools)
    assert caught.value.diagnostics[0].code == "rehearse-cache"


def test_only_its_owner_can_look_into_what_is_built(built: Phantom) -> None:
    assert built.folder.parent.stat().st_mode & 0o777 == 0o700
    assert built.folder.stat().st_mode & 0o077 == 0
    assert all(path.lstat().st_mode & 0o022 == 0 for path in built.folder.iterdir())


def test_a_folder_that_is_a_link_is_built_anew_and_its_target_left_alone(
    tools: Toolchain, built: Phantom, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    built.folder.rename(elsewhere)
    built.folder.symlink_to(elsewhere)
    assert phantom(tools).folder == built.folder
    assert not built.folder.is_symlink()
    assert (elsewhere / LIBRARY).is_file()


@pytest.mark.parametrize("planted", ["libcudnn.so.9", "libcuda.so.1"])
def test_a_library_that_nobody_built_is_not_loaded(
    tools: Toolchain, built: Phantom, tmp_path: Path, planted: str
) -> None:
    target = tmp_path / "evil.so"
    target.write_bytes(b"evil")
    place = built.folder / planted
    place.unlink(missing_ok=True)
    place.symlink_to(target)
    assert phantom(tools).folder == built.folder
    assert not place.is_symlink()
    assert target.read_bytes() == b"evil"


def test_functions_that_a_library_lacks_are_answered_and_noted(tools: Toolchain, tmp_path: Path) -> None:
    source = tmp_path / "user.c"
    source.write_text(
        "int cudaStreamDestroy(void *); int cudnnBackendExecute(void);\nint both(void) { return 0; }\n"
        "int (*used[])() = {(int (*)())cudaStreamDestroy, cudnnBackendExecute};\n"
    )
    library = tmp_path / "libuser.so"
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    made = phantom(replace(tools, libraries=(library,)))
    assert made.unmodelled == 2
    notes = tmp_path / "notes"
    calls = f"import ctypes; c = ctypes.CDLL({str(made.folder / LIBRARY)!r}); print("
    calls += "c.cudnnBackendExecute(), c.cudaStreamDestroy(None), c.cudnnBackendExecute())"
    environment = {**os.environ, "MEMC_PHANTOM": CARD, "MEMC_PHANTOM_NOTES": str(notes)}
    run = subprocess.run([sys.executable, "-c", calls], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["0", "0", "0"]
    assert notes.read_text() == "cudnnBackendExecute\n"
    assert "libuser.so" not in json.loads((made.folder / MANIFEST).read_text())["files"]


def test_a_cpu_build_of_torch_is_told_from_one_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_torch", lambda: ("2.13.0+cpu", "", Path("/nowhere")))
    with pytest.raises(MemcError) as caught:
        find_toolchain()
    assert [one.code for one in caught.value.diagnostics] == ["rehearse-without-cuda"]
    assert "memc trace" in caught.value.diagnostics[0].hint


def test_versions_are_read_without_importing_torch() -> None:
    text = "__version__ = '2.14.1+cu130'\ndebug = False\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    found = {name: toolchain._assigned(text, name) for name in ("__version__", "cuda", "hip")}
    assert [match and match[1] for match in found.values()] == ["2.14.1+cu130", "13.0", None]


@pytest.mark.parametrize(("ranks", "numbers"), [(("0", "last"), (0, 7)), (("last",), (7,)), (("3", "3"), (3,))])
def test_ranks_by_number_and_the_last(ranks: tuple[str, ...], numbers: tuple[int, ...]) -> None:
    assert _numbers(ranks, 8) == numbers
    assert _numbers(("0", "last"), 1) == (0,)


@pytest.mark.parametrize("rank", ["8", "-1", "first", ""])
def test_what_is_no_rank(rank: str) -> None:
    with pytest.raises(MemcError) as caught:
        _numbers((rank,), 8)
    assert caught.value.diagnostics[0].code == "rehearse-ranks"


def test_headers_of_the_compiler_s_package_are_stood_in_for(tmp_path: Path) -> None:
    folder = build._host_defines(tmp_path, tmp_path / "without")
    assert "#define __host__" in (folder / "crt" / "host_defines.h").read_text()
    (tmp_path / "with" / "crt").mkdir(parents=True)
    (tmp_path / "with" / "crt" / "host_defines.h").touch()
    assert not (build._host_defines(tmp_path / "b", tmp_path / "with") / "crt").exists()


def test_a_plan_that_swaps_to_a_drive_is_refused(tmp_path: Path) -> None:
    promise = read_lock(compile_folder(tmp_path / "out", make_config(eval_batch_size=0), certify=False))
    run._require_no_drive(promise)
    swapping = replace(promise, settings={**promise.settings, "offload_param": "nvme"})
    with pytest.raises(MemcError) as caught:
        run._require_no_drive(swapping)
    assert caught.value.diagnostics[0].code == "rehearse-drive"
    assert "offload_param" in caught.value.diagnostics[0].message
