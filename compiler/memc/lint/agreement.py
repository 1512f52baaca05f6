"""Where files of one run contradict each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memc.facts import load_fact
from memc.lint.context import Context
from memc.lint.records import Document, Kind, Place, Remark, Stated, Weight
from memc.lint.statements import Statements, number, reads_a_deepspeed_file
from memc.lint.world import processes

_OWNED = (
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "gradient_clipping",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "bf16",
    "fp16",
    "max_steps",
    "warmup_steps",
)
"""What the trainer compares between its arguments and DeepSpeed's JSON, and stops at."""
_STATES_ONCE = (
    "zero_stage",
    "offload_optimizer",
    "offload_param",
    "nodes",
    "num_processes",
    "lora_rank",
    "lora_alpha",
    "fsdp_version",
    "wrap_class",
)
_BY_THE_TRAINER = (
    ("train_batch_size",),
    ("train_micro_batch_size_per_gpu",),
    ("gradient_accumulation_steps",),
    ("gradient_clipping",),
    ("optimizer", "params", "lr"),
    ("zero_optimization", "reduce_bucket_size"),
    ("bf16", "enabled"),
    ("fp16", "enabled"),
)
_AUTO = "write auto there, and the trainer fills in its own value"


def agreement_remarks(context: Context) -> Iterator[Remark]:
    """Yields a remark for each value that two files of the run state differently."""
    statements = context.statements
    yield from _engines(statements)
    yield from _missing_files(statements)
    yield from _beside_a_file(statements)
    yield from _owned_by_the_trainer(statements)
    yield from _batch(context)
    yield from _precisions(statements)
    yield from _schedulers(statements)
    yield from _twice(statements)
    yield from _filled_by_nobody(statements)
    yield from _models(statements)


def _differs(one: Stated, other: Stated, hint: str, *, weight: Weight = Weight.ERROR, why: str = "") -> Remark:
    message = f"{_said(one)}, {_said(other)}{why}"
    others = () if other.place == one.place else (other.place,)
    return Remark(code="files-disagree", weight=weight, message=message, hint=hint, place=one.place, others=others)


def _said(stated: Stated) -> str:
    if stated.default:
        return f"{stated.key} is not in {stated.place.path.name}, so its default {shown(stated.value)} counts"
    return f"{stated.key} is {shown(stated.value)} in {stated.place.path.name}"


def shown(value: Any) -> str:
    """Returns a value as a configuration file spells it, at most 80 characters."""
    text = {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)
    text = "".join(char if char.isprintable() else " " for char in text)
    return text if len(text) <= 80 else f"{text[:77]}..."


def same(one: Any, other: Any) -> bool:
    """Whether two values mean the same: numbers by size, text without regard to case."""
    if isinstance(one, bool) or isinstance(other, bool):
        return bool(one is other)
    left, right = number(one), number(other)
    if left is not None and right is not None:
        return left == right or abs(left - right) <= 1e-9 * max(abs(left), abs(right))
    return str(one).strip().lower() == str(other).strip().lower()


def _engines(statements: Statements) -> Iterator[Remark]:
    """Yields a remark when one file starts another engine than the next one configures."""
    stated = [item for item in statements.all("engine") if item.value in ("deepspeed", "fsdp")]
    for item in stated[1:]:
        if item.value != stated[0].value:
            yield _two_engines(stated[0], item)
            return
    plain = [
        item for item in statements.all("engine") if item.value in ("ddp", "single") and item.kind is Kind.ACCELERATE
    ]
    asked = [item for item in stated if item.kind in (Kind.ACCELERATE, Kind.LAUNCH)]
    if plain and asked:
        yield _two_engines(plain[0], asked[0])


def _two_engines(one: Stated, other: Stated) -> Remark:
    names = {"deepspeed": "DeepSpeed", "fsdp": "FSDP", "ddp": "DistributedDataParallel", "single": "one process"}
    said = (f"{item.key} in {item.place.path.name} asks for {names[str(item.value)]}" for item in (one, other))
    return Remark(
        code="files-disagree",
        weight=Weight.ERROR,
        message=f"{', '.join(said)}: a step is run by one engine",
        hint="keep the settings of one engine and remove the others",
        place=one.place,
        others=(other.place,),
    )


def _missing_files(statements: Statements) -> Iterator[Remark]:
    """Yields a remark for a DeepSpeed file that is named and lies neither beside the file, above it nor in the run."""
    read = {document.path.name for document in statements.documents}
    for document in statements.of(Kind.ARGUMENTS, Kind.ACCELERATE, Kind.LAUNCH):
        for steps in (("deepspeed",), ("deepspeed_config", "deepspeed_config_file"), ("deepspeed_config_file",)):
            name = document.value(*steps)
            if not isinstance(name, str) or not name.endswith(".json") or not name.isprintable() or "$" in name:
                continue
            path = Path(name)
            if path.is_absolute() or name.startswith("~") or path.name in read or _lies_by(document.path, path):
                continue
            yield Remark(
                code="deepspeed-file-missing",
                weight=Weight.WARNING,
                message=f"{'.'.join(steps)} is {shown(name)}: no such file lies beside {document.path.name} or above",
                hint="write the path of the DeepSpeed file, from the folder that the run is started in",
                place=document.place(*steps),
            )


def _lies_by(document: Path, named: Path) -> bool:
    """Whether a relative path leads to a file from a document's folder or one above it."""
    try:
        return any((folder / named).is_file() for folder in document.absolute().parents)
    except OSError:
        return False


def _beside_a_file(statements: Statements) -> Iterator[Remark]:
    """Yields a remark for the keys that accelerate refuses when it is told to read a DeepSpeed file."""
    refused = str(load_fact("accelerate.keys_beside_a_deepspeed_file").value).split()
    for document in statements.of(Kind.ACCELERATE, Kind.LAUNCH):
        where = () if document.kind is Kind.LAUNCH else ("deepspeed_config",)
        if not document.has(*where, "deepspeed_config_file"):
            continue
        if document.kind is Kind.LAUNCH and document.dialect != "accelerate":
            continue
        found = [steps for key in refused for steps in _held(document, key, where)]
        if not found:
            continue
        keys = ", ".join(steps[-1] for steps in found)
        yield Remark(
            code="accelerate-keys-beside-a-deepspeed-file",
            weight=Weight.ERROR,
            message=f"accelerate stops: beside deepspeed_config_file, what it decides must not stand ({keys})",
            hint=f"remove {keys} from {document.path.name}: the DeepSpeed file alone says so",
            place=document.place(*found[0]),
            others=(document.place(*where, "deepspeed_config_file"), *(document.place(*steps) for steps in found[1:])),
        )


def _held(document: Document, key: str, where: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yields where a document holds a key that counts; an empty value does not."""
    for steps in ((*where, key), (key,)) if where else ((key,),):
        value = document.value(*steps)
        if key == "mixed_precision" and value is not None and document.kind is Kind.ACCELERATE:
            yield steps  # no stands in the environment like any other
        elif value is not None and value is not False:
            yield steps


def _owned_by_the_trainer(statements: Statements) -> Iterator[Remark]:
    for name in _OWNED:
        engine = [item for item in statements.all(name) if item.kind is Kind.DEEPSPEED and not item.default]
        engine += [item for item in statements.all(name) if item.kind in (Kind.ACCELERATE, Kind.LAUNCH)]
        arguments = sorted(
            (item for item in statements.all(name) if item.kind is Kind.ARGUMENTS), key=lambda item: item.default
        )
        if not arguments or not engine:
            continue
        counts = arguments[0]
        if name == "warmup_steps" and (statements.all("warmup_ratio") or _ratio(counts)):
            continue
        if name == "max_steps" and (counts.value is None or counts.value <= 0):
            yield from _steps_left_to_data(engine[0])
            continue
        for item in engine:
            if not _agree(name, item, counts):
                hint = f"remove {item.key} from the command line" if item.kind is Kind.LAUNCH else _AUTO
                yield _differs(item, counts, hint, why=_reason(item))


def _ratio(stated: Stated) -> bool:
    return isinstance(stated.value, float) and 0 < stated.value < 1


def _agree(name: str, item: Stated, counts: Stated) -> bool:
    if name == "warmup_steps":
        return same(max(1, item.value), max(1, counts.value))  # a JSON without warm-up holds 0 or 1
    if name in ("bf16", "fp16") and item.value is False and counts.default:
        return True
    return same(item.value, counts.value)


def _reason(item: Stated) -> str:
    return ": the trainer stops at the difference" if item.kind is Kind.DEEPSPEED else ": two values for one step"


def _steps_left_to_data(item: Stated) -> Iterator[Remark]:
    """Yields a remark on a literal number of steps where the data decide how many there are."""
    if item.kind is not Kind.DEEPSPEED:
        return
    said = f"{item.key} is {shown(item.value)} in {item.place.path.name}"
    message = f"{said}, but epochs and data decide how many steps there are"
    weight = Weight.ERROR if item.value <= 0 else Weight.WARNING
    yield Remark(code="steps-left-to-data", weight=weight, message=message, hint=_AUTO, place=item.place)


def _batch(context: Context) -> Iterator[Remark]:
    """Yields a remark when a JSON's train_batch_size is not micro-batch x accumulation x processes."""
    statements = context.statements
    total = next((item for item in statements.all("train_batch_size") if item.kind is Kind.DEEPSPEED), None)
    if total is None or total.value is None:
        return
    micro, steps = statements.first("micro_batch_size"), statements.first("gradient_accumulation_steps")
    world = processes(context)
    if micro is None or micro.value <= 0:
        return
    count = steps.value if steps is not None else 1
    places = tuple(item.place for item in (micro, steps) if item is not None and item.place != total.place)
    if world is None:
        if total.value % (micro.value * max(1, count)):
            product = micro.value * count
            message = (
                f"train_batch_size is {shown(total.value)}, no multiple of micro-batch {shown(micro.value)} x "
                f"accumulation {shown(count)} = {shown(product)}"
            )
            yield Remark(
                code="batch-arithmetic",
                weight=Weight.ERROR,
                message=message,
                hint=_AUTO,
                place=total.place,
                others=places,
            )
        return
    product = micro.value * count * world.value
    if product != total.value:
        message = (
            f"train_batch_size is {shown(total.value)} in {total.place.path.name}, but micro-batch "
            f"{shown(micro.value)} x accumulation {shown(count)} x {shown(world.value)} processes is {shown(product)}"
        )
        others = (*places, world.place) if world.place != total.place else places
        yield Remark(
            code="batch-arithmetic",
            weight=Weight.ERROR,
            message=message,
            hint=f"write auto, or {shown(product)}",
            place=total.place,
            others=others,
        )


def _precisions(statements: Statements) -> Iterator[Remark]:
    """Yields remarks on two 16-bit types at once, in one file or in two."""
    for kind in (Kind.DEEPSPEED, Kind.ARGUMENTS):
        both = [
            [item for item in statements.all(name) if item.kind is kind and item.value is True and not item.default]
            for name in ("bf16", "fp16")
        ]
        if both[0] and both[1]:
            yield _differs(both[0][0], both[1][0], "switch one of the two off", why=": one 16-bit type can be used")
    for one, other in (("bf16", "fp16"), ("fp16", "bf16")):
        engine, asked = (
            next((i for i in statements.all(name) if i.kind is kind and i.value is True and not i.default), None)
            for name, kind in ((one, Kind.DEEPSPEED), (other, Kind.ARGUMENTS))
        )
        if engine is not None and asked is not None:
            yield _differs(
                engine,
                asked,
                f"write {one}.enabled: auto in the DeepSpeed file, and {other}.enabled: auto",
                why=": one 16-bit type can be used",
            )
    mixed = next(iter(statements.all("mixed_precision")), None)
    if mixed is None or str(mixed.value).lower() not in ("bf16", "fp16", "no"):
        return
    wanted = str(mixed.value).lower()
    for name in ("bf16", "fp16"):
        for item in statements.all(name):
            if item.kind not in (Kind.ARGUMENTS, Kind.DEEPSPEED) or item.default or item.value is not True:
                continue
            if name != wanted:
                counts = f": {item.key} counts" if item.kind is Kind.ARGUMENTS else ": two precisions for one step"
                yield _differs(mixed, item, f"write mixed_precision: {name}, or remove it", why=counts)
                return


def _schedulers(statements: Statements) -> Iterator[Remark]:
    """Yields remarks when DeepSpeed's JSON has an optimizer or scheduler and the arguments ask for another kind."""
    owner, optimizer = (next(iter(statements.all(name)), None) for name in ("engine_optimizer", "optimizer"))
    other = optimizer is not None and not str(optimizer.value).lower().startswith("adamw_torch")
    if owner is not None and optimizer is not None and other and not same(owner.value, optimizer.value):
        yield _differs(
            owner,
            optimizer,
            f"remove the optimizer from {owner.place.path.name}, or remove {optimizer.key}",
            weight=Weight.WARNING,
            why=": DeepSpeed's optimizer counts",
        )
    engine = next(iter(statements.all("engine_scheduler")), None)
    asked = next((item for item in statements.all("scheduler") if item.kind is Kind.ARGUMENTS), None)
    if engine is None or asked is None:
        return
    meant = {"warmuplr": "constant_with_warmup", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
    if meant.get(str(engine.value).lower()) != str(asked.value).lower():
        yield _differs(
            engine,
            asked,
            f"remove the scheduler from {engine.place.path.name}, or remove {asked.key}",
            weight=Weight.WARNING,
            why=": DeepSpeed's scheduler counts",
        )


def _twice(statements: Statements) -> Iterator[Remark]:
    """Yields remarks on what several files of an engine state for themselves.

    A command line counts over accelerate's file, and a DeepSpeed file that the run reads over both.
    """
    for name in _STATES_ONCE:
        stated = [item for item in statements.all(name) if not item.default and item.kind is not Kind.ARGUMENTS]
        for item in stated[1:]:
            if item.kind is stated[0].kind is Kind.LAUNCH or same(item.value, stated[0].value):
                continue
            weight = Weight.WARNING if stated[0].kind is Kind.LAUNCH else Weight.ERROR
            why = _what_counts(statements, stated[0])
            yield _differs(stated[0], item, "write the same in both, or remove one of the two", weight=weight, why=why)
            break


def _what_counts(statements: Statements, stated: Stated) -> str:
    """Returns which of several statements counts, the first of them, as the end of a sentence; empty when none does."""
    if stated.kind is Kind.LAUNCH:
        return f": the command line counts, so it is {shown(stated.value)}"
    if stated.kind is Kind.DEEPSPEED and reads_a_deepspeed_file(statements.documents):
        return f": {stated.place.path.name} counts, so it is {shown(stated.value)}"
    return ""


def _filled_by_nobody(statements: Statements) -> Iterator[Remark]:
    """Yields a remark when DeepSpeed itself gets a JSON whose values a trainer was to fill in."""
    for document in statements.of(Kind.SCRIPT):
        if not document.has("deepspeed_initialize") or statements.of(Kind.ARGUMENTS) or document.has("trainer"):
            continue
        for config in statements.of(Kind.DEEPSPEED):
            for steps in _BY_THE_TRAINER:
                if config.value(*steps) == "auto":
                    key = ".".join(steps)
                    yield Remark(
                        code="auto-without-trainer",
                        weight=Weight.ERROR,
                        message=f"{key} is auto in {config.path.name}, and deepspeed.initialize fills nothing in",
                        hint=f"write a number for {key}",
                        place=config.place(*steps),
                        others=(document.place("deepspeed_initialize"),),
                    )
                    return


def _models(statements: Statements) -> Iterator[Remark]:
    """Yields a remark when an adapter is made for another model than the one that is trained."""
    adapter = next((item for item in statements.all("model") if item.kind is Kind.ADAPTER), None)
    trained = next((item for item in statements.all("model") if item.kind is Kind.ARGUMENTS), None)
    if adapter is None or trained is None:
        return
    ends = [str(item.value).rstrip("/").rpartition("/")[2].lower() for item in (adapter, trained)]
    if ends[0] != ends[1]:
        yield _differs(adapter, trained, "name the same model in both", weight=Weight.WARNING)


def first_place(*stated: Stated | None) -> Place | None:
    """Returns the place of the first of some statements that is there."""
    return next((item.place for item in stated if item is not None), None)
