"""An `accelerate` that trains nothing: each start writes what a card would have measured that needs more than promised.

It stands in for the program on the PATH; the emitted launcher starts it as it would start the real one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

PROGRAM = """#!{python}
import json, os, sys, time
from pathlib import Path

arguments = sys.argv[1:]
folder = Path(next(part for part in arguments if part.endswith("train.py"))).parent
probe = Path(arguments[arguments.index("--probe") + 1])
lock = json.loads((folder / "memc.lock").read_text())
gpu, capacity = lock["ledger"]["gpu"], lock["hardware"]["capacity_bytes"]
missed = int(os.environ["MISSED_BYTES"])
reserved, outside = gpu["peak_reserved_bytes"] + missed, gpu["required_bytes"] - gpu["peak_reserved_bytes"]
short = reserved + outside > capacity
if short:
    reserved = capacity - outside
print("started with", " ".join(arguments[arguments.index("--probe"):]), flush=True)
with open(os.environ["STARTS"], "a") as starts:
    starts.write(str(folder) + "\\n")
if "EDIT" in os.environ and str(folder) != os.environ["EDIT"]:
    with open(os.environ["EDIT"] + "/train.py", "a") as script:
        script.write("# a change by hand\\n")
if "CRASH" in os.environ and str(folder) != os.environ["CRASH"]:
    sys.exit("a library broke")
if "HANG" in os.environ and str(folder) != os.environ["HANG"]:
    print("hangs", flush=True)
    time.sleep(600)
phases = ("load", "first_step", "steady", "save")
report = {
    "schema": "memc/probe/1", "rank": 0, "world_size": 1, "device": "cuda",
    "device_name": lock["hardware"]["name"], "capacity_bytes": capacity, "driver": "570.86",
    "phases": {name: {"allocated_bytes": reserved - 1024, "reserved_bytes": reserved} for name in phases},
    "device_used_bytes": reserved + outside, "host_rss_peak_bytes": 1 << 30,
    "step_seconds": [3.0, 2.0, 2.0, 2.0], "tokens_per_second": 1.0, "losses": [2.0, 2.0, 2.0, 2.0],
    "versions": {"torch": "2.13.0"},
    "error": {"kind": "out-of-memory", "phase": "first_step", "message": "CUDA out of memory."} if short else None,
}
(probe / "rank0.json").write_text(json.dumps(report))
sys.exit(1 if short else 0)
"""


def write_card(folder: Path) -> str:
    """Returns a PATH on which `accelerate` is the program above, written into `folder`."""
    folder.mkdir(parents=True)
    program = folder / "accelerate"
    program.write_text(PROGRAM.replace("{python}", sys.executable), encoding="utf-8")
    program.chmod(0o755)
    return os.pathsep.join([str(folder), os.environ.get("PATH", os.defpath)])
