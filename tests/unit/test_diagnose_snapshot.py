"""Memory snapshots: summed by account, and a hostile pickle never runs, never hangs, never fills memory."""

from __future__ import annotations

import builtins
import os
import pickle
import pickletools
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from memc.diagnose import Cause, diagnose
from memc.diagnose.pickles import plain_value
from memc.errors import ExitCode, MemcError
from memc.ledger.entries import Account, Phase

MIB = 2**20
STEP = [
    {"filename": "/v/torch/optim/adamw.py", "line": 160, "name": "_init_group"},
    {"filename": "/v/transformers/trainer.py", "line": 2581, "name": "_inner_training_loop"},
]
BACKWARD = [
    {"filename": "??", "line": 0, "name": "torch::autograd::AccumulateGrad::apply"},
    {"filename": "/v/torch/_tensor.py", "line": 626, "name": "backward"},
]
FORWARD = [
    {"filename": "/v/torch/nn/functional.py", "line": 9, "name": "silu"},
    {"filename": "/v/transformers/models/llama/modeling_llama.py", "line": 176, "name": "forward"},
]
LOAD = [
    {"filename": "/v/torch/nn/modules/module.py", "line": 900, "name": "convert"},
    {"filename": "/w/train.py", "line": 12, "name": "main"},
]
BUCKET = [
    {"filename": "/v/deepspeed/runtime/zero/stage_1_and_2.py", "line": 1, "name": "reduce_independent_p_g_buckets"}
]


def block(mib: int, frames: list[dict[str, Any]] | None, state: str = "active_allocated") -> dict[str, Any]:
    return {"address": 1, "size": mib * MIB, "requested_size": mib * MIB, "state": state, "frames": frames or []}


def snapshot(*blocks: dict[str, Any], oom_mib: int | None = None) -> dict[str, Any]:
    total = sum(item["size"] for item in blocks)
    trace = [{"action": "alloc", "addr": 1, "size": 5, "stream": 0, "frames": FORWARD, "time_us": 1}]
    if oom_mib is not None:
        trace.append({"action": "oom", "addr": 0, "size": oom_mib * MIB, "stream": 0, "frames": [], "device_free": 0})
    return {
        "segments": [{"device": 0, "total_size": total, "segment_pool_id": (0, 0), "blocks": list(blocks)}],
        "device_traces": [trace],
        "allocator_settings": {"expandable_segments": False, "roundup_power2_divisions": {"1": 0}, "gc": 0.0},
        "external_annotations": [],
    }


FULL = snapshot(
    block(4000, LOAD), block(3000, STEP), block(2000, FORWARD), block(900, BACKWARD), block(100, BUCKET), oom_mib=500
)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_blocks_are_summed_by_account(protocol: int) -> None:
    (finding,) = diagnose(pickle.dumps(FULL, protocol=protocol))
    accounts = {Account(name): finding.figures[name] // MIB for name in finding.figures if name in list(Account)}
    assert accounts == {
        Account.PARAMETERS: 4000,
        Account.OPTIMIZER_STATES: 3000,
        Account.ACTIVATIONS: 2000,
        Account.GRADIENTS: 900,
        Account.WORKSPACE: 100,
    }
    assert finding.cause is Cause.STATIC
    assert finding.sentence.startswith("an allocation of 0.49 GiB failed; 9.77 GiB reserved")
    assert "/w/train.py:12 main" in finding.evidence[0].text


def test_the_largest_account_names_cause_and_phase() -> None:
    (finding,) = diagnose(pickle.dumps(snapshot(block(500, LOAD), block(3000, STEP))))
    assert (finding.cause, finding.account, finding.phase) == (Cause.FIRST_STEP, Account.OPTIMIZER_STATES, Phase.STEP)


def test_idle_blocks_beside_a_failure_are_fragments() -> None:
    fragmented = snapshot(block(3000, FORWARD), block(2000, None, "inactive"), oom_mib=700)
    (finding,) = diagnose(pickle.dumps(fragmented))
    assert finding.cause is Cause.FRAGMENTATION
    assert finding.figures["idle"] == 2000 * MIB


def test_a_snapshot_without_frames_says_so() -> None:
    (finding,) = diagnose(pickle.dumps(snapshot(block(3000, None))))
    assert finding.account is None
    assert "no frames were recorded" in finding.evidence[0].text


def test_old_snapshots_keep_frames_in_a_history() -> None:
    old = block(3000, None)
    del old["frames"]
    old["history"] = [{"addr": 1, "real_size": 5, "frames": STEP}]
    (finding,) = diagnose(pickle.dumps([{"total_size": 3000 * MIB, "blocks": [old]}]))
    assert finding.account is Account.OPTIMIZER_STATES


class Calls:
    """Pickles as a call of any function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def hostile(target: Path) -> dict[str, bytes]:
    touch = f"touch {target}"
    nested = b"\x80\x04" + b"]" * 300_000 + b"a" * 299_999 + b"."
    return {
        "os.system": pickle.dumps(Calls(os.system, touch)),
        "eval": pickle.dumps(Calls(builtins.eval, f"open({str(target)!r}, 'w')")),
        "exec": pickle.dumps(Calls(builtins.exec, f"open({str(target)!r}, 'w')")),
        "inside a snapshot": pickle.dumps(
            {**FULL, "segments": [{"total_size": 9, "blocks": [Calls(os.system, touch)]}]}
        ),
        "protocol 2": pickle.dumps(Calls(os.system, touch), protocol=2),
        "GLOBAL": b"\x80\x02cos\nsystem\nq\x00X\x05\x00\x00\x00touch\x85R.",
        "INST": b"\x80\x02(X\x05\x00\x00\x00touchios\nsystem\n.",
        "OBJ": b"\x80\x02(cos\nsystem\nX\x05\x00\x00\x00toucho.",
        "persistent": b"\x80\x04\x8c\x01xQ.",
        "extension": b"\x80\x02\x82\x01.",
        "build": b"\x80\x04}}b.",
        "object": pickle.dumps(Path("x")),
        "set": pickle.dumps({1, 2}),
        "bytearray": pickle.dumps(bytearray(b"x")),
        "huge text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"x.",
        "huge bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"x.",
        "huge number": b"\x80\x04\x8b" + struct.pack("<I", 1 << 31) + b"x.",
        "long number": b"\x80\x04\x8b" + struct.pack("<I", 4000) + b"\x7f" * 4000 + b".",
        "huge memo": b"\x80\x04Nr\xff\xff\xff\x7f.",
        "huge frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 63) + b"N.",
        "deep": nested,
        "empty stack": b"\x80\x04.",
        "lone mark": b"\x80\x04(.",
        "no mark": b"\x80\x04Nt.",
        "mark in a tuple": b"\x80\x04((\x86.",
        "unhashable key": b"\x80\x04}]Ns.",
        "append to None": b"\x80\x04NNa.",
        "protocol 9": b"\x80\x09N.",
        "cut off": pickle.dumps(FULL)[:-40],
        "number": pickle.dumps(7),
        "text": pickle.dumps("segments"),
        "empty": pickle.dumps({}),
        "wrong types": pickle.dumps({"segments": [{"total_size": "9", "blocks": 4}, 5, {"blocks": [{"size": -1}]}]}),
    }


NAMES = list(hostile(Path("x")))


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_pickle_is_refused_and_nothing_runs(name: str, tmp_path: Path) -> None:
    target = tmp_path / "ran"
    data = hostile(target)[name]
    tracemalloc.start()
    try:
        if data.startswith(b"\x80\x09"):
            assert diagnose(data) == []
        else:
            with pytest.raises(MemcError) as caught:
                diagnose(data)
            assert caught.value.exit_code is ExitCode.USAGE
            assert {item.code for item in caught.value.diagnostics} <= {
                "pickle-refused",
                "pickle-broken",
                "pickle-too-large",
                "no-snapshot",
            }
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not target.exists()
    assert peak < 700 * MIB


def test_what_would_call_is_named() -> None:
    with pytest.raises(MemcError, match="imports a name"):
        diagnose(pickle.dumps(Calls(os.system, "true")))


def test_references_that_multiply_are_refused() -> None:
    """A list of lists that share their frames: small in the file, endless to walk."""
    shared: dict[str, Any] = {"total_size": 1, "blocks": [block(1, None)] * 30_000}
    data = pickle.dumps({"segments": [shared] * 30_000})
    assert len(data) < 400_000
    with pytest.raises(MemcError, match="more than 5,000,000"):
        diagnose(data)


def test_every_truncation_and_damage_ends_in_words() -> None:
    data = pickle.dumps(FULL)
    chance = random.Random(7)
    cases = [data[:end] for end in range(2, len(data), 11)]
    for _ in range(600):
        damaged = bytearray(data)
        for _ in range(3):
            damaged[chance.randrange(2, len(damaged))] = chance.randrange(256)
        cases.append(bytes(damaged))
    for case in cases:
        try:
            diagnose(case)
        except MemcError as error:
            assert error.exit_code is ExitCode.USAGE


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_reads_as_the_standard_reads_it(protocol: int) -> None:
    value = {
        "numbers": [0, 1, -1, 255, 256, 65535, 65536, -(2**31), 2**31, 2**62, -(2**63), 2**64],
        "floats": [0.0, 1.5, -1e300],
        "texts": ["", "x" * 300, "模型", "😀", "\ud800"],
        "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
        "others": [None, True, False, {}, [], {1: {"a": [[]]}}],
    }
    if protocol >= 3:
        value["bytes"] = [b"", b"x", b"y" * 300]
    data = pickle.dumps(value, protocol=protocol)
    assert plain_value(data) == pickle.loads(data) == value
    assert plain_value(pickletools.optimize(data)) == value


@pytest.mark.gpu
def test_what_torch_writes_is_read(tmp_path: Path) -> None:
    import torch

    torch.cuda.memory._record_memory_history()
    kept = torch.nn.Linear(4096, 4096, device="cuda")
    torch.cuda.memory._dump_snapshot(str(tmp_path / "s.pickle"))
    torch.cuda.memory._record_memory_history(enabled=None)
    (finding,) = diagnose((tmp_path / "s.pickle").read_bytes())
    assert finding.figures["parameters"] >= sum(p.numel() * 4 for p in kept.parameters())
