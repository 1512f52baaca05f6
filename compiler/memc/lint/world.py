"""How many processes a run starts, by launcher, accelerate, Slurm and what is said to be there."""

from __future__ import annotations

import re
from collections.abc import Iterator

from memc.lint.context import Context
from memc.lint.records import Document, Kind, Place, Remark, Stated, Weight
from memc.lint.scripts import UNRESOLVED
from memc.lint.statements import Statements

_COUNTS = ("num_processes", "num_machines", "nproc_per_node", "nnodes", "num_gpus", "num_nodes")
"""Flags of launchers that count processes and machines."""


def processes(context: Context) -> Stated | None:
    """Returns the number of processes over all nodes, with the place that says so; None when nothing does."""
    statements = context.statements
    if any(document.value(flag) is UNRESOLVED for document in statements.of(Kind.LAUNCH) for flag in _COUNTS):
        return None
    per_node, nodes = statements.first("processes_per_node"), statements.first("nodes")
    if per_node is not None and _whole(per_node.value):
        count = nodes.value if nodes is not None and _whole(nodes.value) else 1
        return Stated(
            name="num_processes",
            value=per_node.value * count,
            place=per_node.place,
            key=per_node.key,
            kind=per_node.kind,
        )
    stated = statements.first("num_processes")
    return stated if stated is not None and _whole(stated.value) else None


def _whole(value: object) -> bool:
    return isinstance(value, int) and value > 0


def world_remarks(context: Context) -> Iterator[Remark]:
    """Yields remarks on launchers, files and machines that do not add up."""
    statements = context.statements
    yield from _available(context)
    yield from _visible(statements)
    yield from _several_machines(statements)
    yield from _one_rank_for_all(statements)
    yield from _slurm(statements)


def _available(context: Context) -> Iterator[Remark]:
    """Yields a remark when there are other GPUs than processes."""
    statements, given = context.statements, context.given
    nodes = given.nodes or _number(statements, "slurm_nodes")
    cards = given.gpus_per_node or _slurm_cards(statements)
    started = processes(context)
    told = statements.first("nodes")
    if nodes is None and told is not None and _whole(told.value):
        nodes = told.value
    if started is None or cards is None:
        if started is not None and told is not None and _whole(told.value) and started.value % told.value:
            message = f"{started.key} is {started.value} over {told.value} nodes, which does not divide evenly"
            yield Remark(
                code="world-size",
                weight=Weight.ERROR,
                message=message,
                hint=f"write a multiple of {told.value}: it counts the processes of all nodes",
                place=started.place,
                others=(told.place,),
            )
        return
    total = cards * (nodes or 1)
    if started.value == total:
        return
    source = given.told if given.gpus_per_node else "the Slurm directives"
    message = (
        f"{started.key} starts {started.value} processes in all, but {source} give {nodes or 1} "
        f"{'node' if (nodes or 1) == 1 else 'nodes'} of {cards} GPUs: {total}"
    )
    per_node = started.kind is Kind.LAUNCH and started.key in ("nproc_per_node", "num_gpus", "include")
    hint = (
        f"start {cards} processes on each of {nodes or 1} nodes (nnodes, nproc_per_node)"
        if per_node
        else f"write {started.key}: {total}, which counts the processes of all nodes"
    )
    yield Remark(
        code="world-size",
        weight=Weight.ERROR if started.value > total or (nodes or 1) > 1 else Weight.WARNING,
        message=message,
        hint=hint,
        place=started.place,
        others=_places(statements, "slurm_nodes", "slurm_gpus_per_node"),
    )


def _visible(statements: Statements) -> Iterator[Remark]:
    visible, per_node = statements.first("visible_gpus"), statements.first("processes_per_node")
    total, nodes = statements.first("num_processes"), statements.first("nodes")
    if per_node is None and total is not None and (nodes is None or nodes.value == 1):
        per_node = total
    if visible is None or per_node is None or not _whole(per_node.value) or per_node.value <= visible.value:
        return
    message = f"{per_node.key} is {per_node.value}, but CUDA_VISIBLE_DEVICES shows {visible.value} GPUs"
    yield Remark(
        code="world-size",
        weight=Weight.ERROR,
        message=message,
        hint="show as many GPUs as there are processes",
        place=per_node.place,
        others=(visible.place,),
    )


def _several_machines(statements: Statements) -> Iterator[Remark]:
    """Yields remarks on runs over several machines whose processes would not find each other."""
    nodes = statements.first("nodes")
    if nodes is None or not _whole(nodes.value) or nodes.value < 2:
        return
    launcher = statements.first("multinode_launcher")
    accelerate = statements.of(Kind.ACCELERATE)
    deepspeed = any(item.value == "deepspeed" for item in statements.all("engine") if item.kind is not Kind.ARGUMENTS)
    by_ssh = launcher is None or str(launcher.value).lower() in ("pdsh", "openmpi", "mvapich", "mpich")
    if accelerate and deepspeed and by_ssh and statements.first("hostfile") is None:
        name = "pdsh" if launcher is None else str(launcher.value)
        default = " (the default)" if launcher is None else ""
        message = (
            f"deepspeed_multinode_launcher is {name}{default}, and no deepspeed_hostfile names the {nodes.value} "
            "machines: each would start a run of its own"
        )
        hint = "write deepspeed_multinode_launcher: standard and start it on every node, or name a deepspeed_hostfile"
        place = launcher.place if launcher is not None else nodes.place
        yield Remark(
            code="launcher-needs-hostfile",
            weight=Weight.ERROR,
            message=message,
            hint=hint,
            place=place,
            others=() if launcher is None else (nodes.place,),
        )
        return
    for document in (*accelerate, *statements.of(Kind.LAUNCH)):
        for name in ("main_process_ip", "master_addr"):
            if str(document.value(name)).lower() in ("localhost", "127.0.0.1", "::1", "0.0.0.0"):
                message = f"{name} is {document.value(name)}, where every one of {nodes.value} machines finds itself"
                yield Remark(
                    code="no-rendezvous",
                    weight=Weight.ERROR,
                    message=message,
                    place=document.place(name),
                    hint="write the address of the first machine",
                    others=(nodes.place,),
                )
                return
    for document in (*statements.of(Kind.LAUNCH), *(accelerate if not statements.of(Kind.LAUNCH) else ())):
        if not _meets(document, statements):
            message = (
                f"{nodes.key} is {nodes.value}, and nothing says where the first machine is: each waits for itself"
            )
            option = {"torchrun": "--rdzv_endpoint host:port"}.get(document.dialect, "main_process_ip")
            yield Remark(
                code="no-rendezvous", weight=Weight.WARNING, message=message, hint=f"add {option}", place=nodes.place
            )
            return


def _one_rank_for_all(statements: Statements) -> Iterator[Remark]:
    """Yields a remark when srun starts accelerate on several machines with one and the same rank of the machine.

    Source: accelerate 1.15.0, utils/launch.py (node_rank is machine_rank) and commands/launch.py (the rendezvous is
    static by default, and takes that rank).
    """
    nodes, rank = statements.first("nodes"), statements.first("machine_rank")
    if nodes is None or rank is None or not _whole(nodes.value) or nodes.value < 2:
        return
    for document in statements.of(Kind.LAUNCH):
        backends = [item.value("rdzv_backend") for item in (document, *statements.of(Kind.ACCELERATE))]
        static = all(backend is None or str(backend).lower() == "static" for backend in backends)
        if document.dialect != "accelerate" or not document.extra.get("srun") or not static:
            continue
        if document.value("machine_rank") is UNRESOLVED:
            continue
        yield Remark(
            code="one-rank-for-all",
            weight=Weight.ERROR,
            message=f"srun starts this line on {nodes.value} nodes, and machine_rank is {rank.value} on each of them: "
            "they wait for a machine that never comes",
            hint="start it with srun bash -c '... --machine_rank $SLURM_NODEID ...', in single quotes",
            place=rank.place,
            others=(document.place(),),
        )
        return


def _meets(document: Document, statements: Statements) -> bool:
    if document.dialect == "deepspeed" or document.extra.get("open"):
        return True
    names = ("rdzv_endpoint", "master_addr", "main_process_ip", "rdzv_id", "standalone", "rdzv_conf")
    both = (document, *statements.of(Kind.ACCELERATE))
    return any(item.has(name) for item in both for name in names) or bool(
        document.extra.get("environment", {}).get("MASTER_ADDR")
    )


def _slurm(statements: Statements) -> Iterator[Remark]:
    """Yields remarks on launchers that Slurm starts too often, or on one machine of several."""
    tasks, nodes = statements.first("slurm_tasks_per_node"), statements.first("slurm_nodes")
    for document in statements.of(Kind.LAUNCH):
        per_node = statements.first("processes_per_node") or statements.first("num_processes")
        srun = bool(document.extra.get("srun"))
        if srun and tasks is not None and _whole(tasks.value) and tasks.value > 1 and per_node is not None:
            message = (
                f"ntasks-per-node is {tasks.value}, and each task starts {per_node.value} processes by itself: "
                f"{tasks.value} launchers on one machine"
            )
            yield Remark(
                code="launcher-per-task",
                weight=Weight.ERROR,
                message=message,
                hint="write --ntasks-per-node=1",
                place=tasks.place,
                others=(document.place(),),
            )
        if (
            not srun
            and nodes is not None
            and _whole(nodes.value)
            and nodes.value > 1
            and document.dialect != "deepspeed"
            and document.path == nodes.place.path
        ):
            message = f"Slurm gives {nodes.value} nodes, but without srun the launcher starts on the first alone"
            yield Remark(
                code="launcher-without-srun",
                weight=Weight.WARNING,
                message=message,
                hint="begin the line with srun",
                place=document.place(),
                others=(nodes.place,),
            )
        return


def _slurm_cards(statements: Statements) -> int | None:
    """Returns the GPUs of one machine that Slurm is asked for."""
    for name in ("slurm_gpus_per_node", "slurm_gres"):
        found = statements.first(name)
        if found is None:
            continue
        if _whole(found.value):
            return int(found.value)
        match = re.search(r"(?:gpu|^)(?::[\w.-]+)?:?(\d+)(?:\(|$|,)", str(found.value))
        if match:
            return int(match[1]) or None
    return None


def _number(statements: Statements, name: str) -> int | None:
    value = statements.value(name)
    return value if _whole(value) else None


def _places(statements: Statements, *names: str) -> tuple[Place, ...]:
    return tuple(found.place for name in names if (found := statements.first(name)) is not None)
