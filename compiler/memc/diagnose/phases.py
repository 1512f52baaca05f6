"""What a run was doing when it stopped, from the frames of its traceback and its progress lines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from memc.diagnose.records import Cause
from memc.ledger.entries import Account, Phase

_FRAME = re.compile(r'^\s*(?:\S+ )?File "(?P<file>[^"]*)", line (?P<line>\d+), in (?P<name>\S+)')
_PROGRESS = re.compile(r"(?<![\d.])(\d{1,9})/(\d{1,9}) \[[\d:]+<")
_STEP_WORDS = re.compile(r"[{'\"]loss'?\"?: ?'?[\d.]+|(?:step|iteration|iter)[ =:/]+(\d+)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One frame of a traceback: source file, function, and the line of the text it stands in."""

    file: str
    name: str
    at: int


@dataclass(frozen=True, kw_only=True)
class Doing:
    """What the run was doing.

    Attributes:
        phase, account, cause: As far as the frames tell.
        frame: The frame that tells; None when none does.
        steps: Optimizer steps that progress lines show as done; None without any.
    """

    phase: Phase | None
    account: Account | None
    cause: Cause | None
    frame: Frame | None
    steps: int | None


@dataclass(frozen=True, kw_only=True)
class _Rule:
    name: str
    file: str
    phase: Phase
    account: Account
    cause: Cause


def _rule(name: str, file: str, phase: Phase, account: Account, cause: Cause) -> _Rule:
    return _Rule(name=name, file=file, phase=phase, account=account, cause=cause)


# First match wins, over all frames: saving and evaluation run forward passes too, and come before them.
_RULES = (
    _rule(
        r"_?save_checkpoint|save_pretrained|save_model|_zero3_consolidated.*|_save\b|get_state_dict|save_16bit_model",
        "",
        Phase.SAVE,
        Account.PARAMETERS,
        Cause.GATHER,
    ),
    _rule(
        r"_load_from_checkpoint|load_checkpoint|_load_optimizer_and_scheduler|_load_zero_checkpoint",
        "",
        Phase.RESUME,
        Account.OPTIMIZER_STATES,
        Cause.STATIC,
    ),
    _rule(
        r"evaluation_loop|prediction_step|evaluate|nested_concat|_pad_across_processes",
        "",
        Phase.EVALUATE,
        Account.ACTIVATIONS,
        Cause.EVALUATION,
    ),
    _rule(
        r"generate|_sample|_decode|determine_num_available_blocks|.*kv_cache.*",
        "",
        Phase.EVALUATE,
        Account.WORKSPACE,
        Cause.KV_CACHE,
    ),
    _rule(r"update", "cache_utils", Phase.EVALUATE, Account.WORKSPACE, Cause.KV_CACHE),
    _rule(
        r"initialize_optimizer_states|_create_fp32_partitions|_setup_for_real_optimizer|_configure_.*optimizer",
        "deepspeed",
        Phase.LOAD,
        Account.MASTER_WEIGHTS,
        Cause.MASTERS,
    ),
    _rule(
        r".*(reduce_(ipg|independent|ready)|allreduce_bucket|allgather_bucket|average_tensor|all_gather_dp|flatten).*",
        "deepspeed",
        Phase.BACKWARD,
        Account.WORKSPACE,
        Cause.BUCKETS,
    ),
    _rule(
        r"_init_group|init_state|get_state_buffer|initialize_optimizer_states|zeros_like|_multi_tensor_\w+|_fused_\w+",
        r"optim|deepspeed/runtime/zero",
        Phase.STEP,
        Account.OPTIMIZER_STATES,
        Cause.FIRST_STEP,
    ),
    _rule(
        r"step|update_step|optimizer_step", r"optim|deepspeed", Phase.STEP, Account.OPTIMIZER_STATES, Cause.FIRST_STEP
    ),
    _rule(r"backward|run_backward|_engine_run_backward", "", Phase.BACKWARD, Account.ACTIVATIONS, Cause.BACKWARD),
    _rule(
        r"from_pretrained|_load_.*state_dict.*|_materialize_copy|create_quantized_param|_apply|convert|dispatch_model"
        r"|_move_model_to_device|prepare_model|cuda",
        "",
        Phase.LOAD,
        Account.PARAMETERS,
        Cause.STATIC,
    ),
    _rule(
        r"cross_entropy|ForCausalLMLoss|fixed_cross_entropy|log_softmax|compute_loss_func|selective_log_softmax",
        "",
        Phase.LOSS,
        Account.ACTIVATIONS,
        Cause.LOGITS,
    ),
    _rule(
        r"forward|_call_impl|training_step|sdpa_attention_forward|eager_attention_forward|linear|repeat_kv",
        "",
        Phase.FORWARD,
        Account.ACTIVATIONS,
        Cause.ACTIVATIONS,
    ),
)
_COMPILED = tuple((re.compile(rule.name), re.compile(rule.file), rule) for rule in _RULES)


def frames_of(lines: Sequence[str]) -> tuple[Frame, ...]:
    """Returns the frames of the last traceback in `lines`, outermost first."""
    found: list[Frame] = []
    for at, line in enumerate(lines):
        if "Traceback (most recent call last)" in line:
            found = []
        match = _FRAME.match(line)
        if match:
            found.append(Frame(file=match["file"].replace("\\", "/"), name=match["name"], at=at))
    return tuple(found)


def doing(lines: Sequence[str]) -> Doing:
    """Returns what the run was doing, from the lines before a failure."""
    frames, steps = frames_of(lines), _steps(lines)
    for name, file, rule in _COMPILED:
        frame = next((f for f in frames if name.fullmatch(f.name) and file.search(f.file)), None)
        if frame is None:
            continue
        cause = rule.cause
        if rule.cause is Cause.ACTIVATIONS and _builds_logits(lines, frames):
            return Doing(phase=Phase.LOSS, account=rule.account, cause=Cause.LOGITS, frame=frames[-1], steps=steps)
        return Doing(phase=rule.phase, account=rule.account, cause=cause, frame=frame, steps=steps)
    return Doing(phase=None, account=None, cause=None, frame=None, steps=steps)


def _builds_logits(lines: Sequence[str], frames: Sequence[Frame]) -> bool:
    """Returns whether the source line of one of the innermost frames computes or casts logits."""
    shown = [lines[frame.at + 1] for frame in frames[-5:] if frame.at + 1 < len(lines)]
    return any(re.search(r"lm_head|logits", line) for line in shown)


def _steps(lines: Sequence[str]) -> int | None:
    """Returns the optimizer steps done; a loading bar is none, and the last bar of training counts."""
    for line in reversed(lines):
        match = _PROGRESS.search(line)
        if match and not re.search(r"shard|Loading|Map|Tokeniz|Generating|Downloading|Fetching", line, re.IGNORECASE):
            return int(match.group(1))
        words = _STEP_WORDS.search(line)
        if words:
            return int(words.group(1) or 1)
    return None
