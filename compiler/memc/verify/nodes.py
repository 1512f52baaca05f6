"""Several machines: each runs the same call, starts its own processes, and answers for its own ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping

from memc.errors import Location, usage_error
from memc.verify.lock import Promise

NODE_VARIABLES = ("MACHINE_RANK", "SLURM_NODEID")
MEETING_VARIABLES = ("MAIN_PROCESS_IP", "MASTER_ADDR")
"""As the emitted launcher reads them."""


def ranks_here(promise: Promise, environment: Mapping[str, str] | None = None) -> range:
    """Returns the ranks that this machine runs.

    Raises:
        MemcError: Exit 2 when the plan has several nodes and the environment does not say which one this is, or where
            they meet.
    """
    given = os.environ if environment is None else environment
    per_node, nodes = promise.gpus_per_node, promise.nodes
    if nodes == 1:
        return range(promise.world_size or 1)
    number = next((given[name] for name in NODE_VARIABLES if given.get(name)), "")
    if not number.isdecimal() or int(number) >= nodes or not any(given.get(name) for name in MEETING_VARIABLES):
        said = f"MACHINE_RANK is {number!r}" if number else "MACHINE_RANK is not set"
        raise usage_error(
            "verify-which-node",
            f"the plan spans {nodes} nodes, and the environment does not say which of them this is and where they "
            f"meet: {said}",
            where=Location(file=str(promise.path)),
            hint=f"run the same call on every node at the same time, with MACHINE_RANK from 0 to {nodes - 1}, "
            "MAIN_PROCESS_IP (the address of node 0) and the same MAIN_PROCESS_PORT",
        )
    return range(int(number) * per_node, (int(number) + 1) * per_node)
