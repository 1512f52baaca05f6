"""The solver: how a spec becomes a question, what is contradictory, what is chosen and what is said about it."""

from __future__ import annotations

import pytest
from memc.config import AdapterPrecision, Engine, LossHead, Method, Optimizer, Precision
from memc.errors import MemcError
from memc.plan import Infeasible, Verdict
from memc.units import GIB
from planspecs import answer_to, machine_of, plan_of, refusal_of, spec_text


def codes(text: str) -> list[tuple[str, str]]:
    with pytest.raises(MemcError) as caught:
        answer_to(text)
    return [(item.code, item.where.field if item.where else "") for item in caught.value.diagnostics]


@pytest.mark.parametrize(
    ("text", "code", "field"),
    [
        (spec_text(gpu="t4", more="pin: {precision: bf16}"), "no-bf16", "pin.precision"),
        (spec_text(gpu="t4", more="pin: {attention: flash_attention_2}"), "no-flash-attention", "pin.attention"),
        (spec_text(length="200000"), "too-long", "data.max_length"),
        (spec_text(more="ladder: {forbid: [zero-9]}"), "unknown-technique", "ladder.forbid"),
        (spec_text(more="lora: {target_modules: [q_proj, c_attn]}"), "unknown-module", "lora.target_modules"),
        (spec_text(more="lora: {target_modules: [q_proj, lm_head]}"), "unknown-module", "lora.target_modules"),
        (spec_text(more="memory: {reserve: 100GiB}"), "reserve-above-capacity", "memory.reserve"),
        (spec_text(method="qlora", count="2", more="pin: {zero_stage: 3}"), "qlora-under-zero-3", "pin.zero_stage"),
        (
            spec_text(count="2", more="pin: {zero_stage: 2, optimizer: adamw_8bit}"),
            "optimizer-under-deepspeed",
            "pin.optimizer",
        ),
        (
            spec_text(method="full", more="pin: {engine: deepspeed, precision: bf16_pure}"),
            "precision-under-deepspeed",
            "pin.precision",
        ),
    ],
)
def test_what_facts_forbid_is_refused_at_its_field(text: str, code: str, field: str) -> None:
    assert (code, field) in codes(text)


def test_all_contradictions_are_told_at_once() -> None:
    text = spec_text(gpu="t4", length="200000", more="pin: {precision: bf16}\nladder: {require: [magic]}")
    assert {code for code, _ in codes(text)} == {"no-bf16", "too-long", "unknown-technique"}


def test_defaults_are_resolved() -> None:
    asked = machine_of(spec_text(method="auto")).question.asked
    assert (asked.method, asked.precision, asked.engine) == (Method.FULL, Precision.BF16, Engine.SINGLE)
    assert (asked.micro_batch_size, asked.gradient_accumulation_steps, asked.optimizer) == (16, 1, Optimizer.ADAMW)
    spread = machine_of(spec_text(count="4")).question.asked
    assert (spread.micro_batch_size, spread.engine, spread.global_batch_size) == (4, Engine.DDP, 16)


@pytest.mark.parametrize(
    ("pin", "micro", "accumulation"),
    [("micro_batch_size: 2", 2, 8), ("gradient_accumulation_steps: 4", 4, 4)],
)
def test_pinned_batches_keep_the_global_batch(pin: str, micro: int, accumulation: int) -> None:
    asked = machine_of(spec_text(more=f"pin: {{{pin}}}")).question.asked
    assert (asked.micro_batch_size, asked.gradient_accumulation_steps) == (micro, accumulation)


def test_adapters_follow_the_base_under_deepspeed() -> None:
    asked = machine_of(spec_text(count="2", more="pin: {zero_stage: 2}")).question.asked
    assert asked.lora is not None
    assert asked.lora.precision is AdapterPrecision.BASE


def test_a_pinned_choice_is_never_changed() -> None:
    pins = "pin: {activation_checkpointing: 2, optimizer: adamw_torch, micro_batch_size: 1}"
    answer = answer_to(spec_text(more=pins))
    config = plan_of(spec_text(gpu="a100-sxm4-80gb", more=pins)).config
    assert (config.checkpoint_every, config.optimizer, config.micro_batch_size) == (2, Optimizer.ADAMW_FOREACH, 1)
    assert all("pin decides" in step.reason for step in answer.trail if step.rung == 3)


def test_8_bit_states_or_bf16_weights_come_before_both() -> None:
    """Both stand on one rung; the plan takes the one that changes fewer numbers."""
    plan = plan_of(
        spec_text(method="full", model="meta-llama/Llama-2-7b-hf", gpu="a100-sxm4-80gb", length="512", batch="1")
    )
    assert plan.rung == 6
    assert "bf16-adamw-8bit" not in plan.techniques
    assert (plan.config.precision is Precision.BF16_PURE) != (plan.config.optimizer is Optimizer.ADAMW_8BIT)


def test_more_data_than_time_is_a_refusal_that_says_how_long_it_takes() -> None:
    refusal = refusal_of(spec_text(samples="10000000", more="time: {budget: 1h}"))
    assert refusal.binding == "time"
    assert refusal.shortfall_bytes == 0
    assert "the budget is 60.0 min" in refusal.causes[0]
    (needed,) = (item.needed for item in refusal.relaxations if item.input == "time.budget")
    again = plan_of(spec_text(samples="10000000", more=f"time: {{budget: {needed}}}"))
    assert again.clock.total_seconds is not None
    assert any(step.verdict is Verdict.TOO_SLOW for step in refusal.trail)


def test_money_binds_like_time() -> None:
    refusal = refusal_of(spec_text(samples="10000000", more="time: {budget: $1}"))
    assert refusal.binding == "time"
    assert "$" in refusal.causes[0]
    (needed,) = (item.needed for item in refusal.relaxations if item.input == "time.budget")
    assert plan_of(spec_text(samples="10000000", more=f"time: {{budget: {needed}}}")).clock.total_usd


def test_the_fastest_objective_is_not_slower_than_the_lowest_rung() -> None:
    lowest, fastest = (
        plan_of(spec_text(gpu="a100-sxm4-80gb", more=f"objective: {objective}"))
        for objective in ("lowest-rung", "fastest")
    )
    assert fastest.clock.step_seconds <= lowest.clock.step_seconds * 1.03
    assert fastest.rung >= lowest.rung
    for step in fastest.trail:
        assert "the run takes 0.00 s" not in step.reason


def test_samples_of_a_packed_run_become_sequences() -> None:
    packed = spec_text(samples="1000, mean_tokens: 512, packing: true", length="2048", batch="1")
    assert machine_of(packed).question.samples == 250
    assert any("the tokens of a row see those of the samples before" in note for note in plan_of(packed).warnings)
    padded = spec_text(samples="1000, mean_tokens: 512", length="2048")
    assert machine_of(padded).question.length_share == 0.25
    assert not any("data.packing" in note for note in plan_of(padded).warnings)


def test_host_memory_that_is_short_is_named_with_what_would_do() -> None:
    text = spec_text(gpu="l40s", method="full", host="48GiB", more="ladder: {require: [offload-optimizer]}")
    refusal = refusal_of(text)
    assert refusal.binding == "host"
    (needed,) = (item.needed for item in refusal.relaxations if item.input == "hardware.host_memory")
    assert "offload-optimizer" in plan_of(text.replace("48GiB", needed)).techniques


def test_without_host_memory_nothing_offloads_and_the_plan_says_so() -> None:
    plan = plan_of(spec_text())
    assert any("hardware.host_memory is not given" in warning for warning in plan.warnings)
    assert "not given" in {item.now for item in refusal_of(spec_text(method="full")).relaxations}


def test_a_pin_in_the_way_is_offered_for_removal() -> None:
    refusal = refusal_of(spec_text(more="pin: {micro_batch_size: 4, activation_checkpointing: false}"))
    assert "pin.activation_checkpointing" in {item.input for item in refusal.relaxations}
    assert "data.max_length" in {item.input for item in refusal.relaxations}


def test_a_tight_plan_is_told_to_be_tight() -> None:
    plan = plan_of(spec_text())
    tight = plan.ledger.gpu.required_bytes + 1024**2
    again = plan_of(spec_text(more=f"memory: {{target: {tight}B}}"))
    assert again.config == plan.config
    assert again.ledger.gpu.uncertainty_bytes == 0 or any("run memc verify" in text for text in again.warnings)


def test_provenance_counts_what_each_technique_buys() -> None:
    plan = plan_of(spec_text())
    assert plan.rung == 4
    by_technique = {item.technique: item.bytes_saved for item in plan.provenance}
    assert set(by_technique) == set(plan.techniques)
    assert by_technique["checkpoint-every-layer"] > 5 * GIB
    for item in plan.provenance:
        assert item.file
        assert item.key
        assert item.rung >= 2


def test_facts_that_a_plan_rests_on_are_kept() -> None:
    facts = plan_of(spec_text()).facts
    assert facts["models.Qwen/Qwen2.5-7B.params"] == "7615616512"
    assert "gpus.rtx-4090.capacity_bytes" in facts


def test_what_the_spec_has_already_fulfils_a_requirement_and_stays() -> None:
    plan = plan_of(spec_text(method="[lora, qlora]", more="ladder: {require: [lora, chunked-loss]}\n"))
    assert plan.config.method is Method.LORA
    assert plan.config.loss is LossHead.CHUNKED


def test_a_head_among_the_targets_is_named_as_what_it_is() -> None:
    with pytest.raises(MemcError) as refused:
        plan_of(spec_text(more="lora: {target_modules: [q_proj, lm_head, c_attn]}"))
    head, other = refused.value.diagnostics
    assert head.message.startswith("lm_head of Qwen/Qwen2.5-7B stands outside the layers")
    assert "lora.modules_to_save trains it whole" in head.hint
    assert other.message == "Qwen/Qwen2.5-7B has no linear module named c_attn"


def test_leaving_out_requirements_is_offered_only_where_it_helps() -> None:
    helped = answer_to(spec_text(more="ladder: {require: [qlora, zero-2]}\n"))
    assert isinstance(helped, Infeasible)
    assert [item.needed for item in helped.relaxations if item.input == "ladder.require"] == ["nothing"]
    lost = answer_to(spec_text(model="meta-llama/Llama-3.1-70B", more="ladder: {require: [qlora, zero-2]}\n"))
    assert isinstance(lost, Infeasible)
    assert not [item for item in lost.relaxations if item.input == "ladder.require"]


def test_adapters_keep_their_type_while_something_else_on_the_rung_does() -> None:
    """A faster plan on the same rung is no reason to train adapters in 16 bits."""
    spec = {"model": "Qwen/Qwen2.5-14B", "method": "qlora"}
    plan = plan_of(spec_text(host="64GiB", more="memory: {target: 16GiB}\n", **spec))
    assert plan.config.lora is not None
    assert plan.config.lora.precision is AdapterPrecision.FP32
    assert "adapters-in-base-precision" not in plan.techniques


def test_paged_states_that_a_resumed_run_cannot_hold_are_said() -> None:
    """bitsandbytes reads them back as ordinary tensors of the GPU."""
    work = {"method": "full", "gpu": "a100-sxm4-80gb"}
    tight = plan_of(spec_text(more="pin: {optimizer: paged_adamw_8bit}\nmemory: {target: 75GiB}\n", **work))
    small = plan_of(spec_text(model="Qwen/Qwen2.5-0.5B", more="pin: {optimizer: paged_adamw_8bit}\n", **work))
    assert tight.budget.gpu_bytes - tight.ledger.gpu.required_bytes < 2.03125 * 7.6e9
    assert any("RESUMED RUN MAY NOT FIT" in line for line in tight.warnings)
    assert not any("RESUMED RUN" in line for line in small.warnings)


def test_partitioned_experts_are_said_to_be_gathered_whole() -> None:
    """Every parameter is gathered, 8 of 128 experts compute for a token; a dense model and one GPU are told nothing."""
    work = {"gpu": "h100-sxm5-80gb", "count": "8"}
    for pin, engine in (("zero_stage: 3", "ZeRO-3"), ("engine: fsdp", "FSDP")):
        plan = plan_of(spec_text(model="Qwen/Qwen3-30B-A3B", more=f"pin: {{{pin}}}\n", **work))
        said = [line for line in plan.warnings if line.startswith(f"MoE under {engine}")]
        assert len(said) == 1
        assert "total parameters (30.5B)" in said[0]
        assert "active ones (3.4B)" in said[0]
    whole = plan_of(spec_text(model="Qwen/Qwen3-30B-A3B", more="pin: {zero_stage: 2}\n", **work))
    dense = plan_of(spec_text(more="pin: {zero_stage: 3}\n", **work))
    assert not any("MoE" in line for line in (*whole.warnings, *dense.warnings))


def test_a_refusal_says_what_modules_that_train_whole_cost() -> None:
    more = "lora: {modules_to_save: [embed_tokens, lm_head]}\nmemory: {target: 12GiB}\n"
    refusal = refusal_of(spec_text(more=more))
    assert any("trainable_token_indices" in cause and "8.12 GiB" in cause for cause in refusal.causes), refusal.causes
    assert not any(
        "modules_to_save" in cause for cause in refusal_of(spec_text(more="memory: {target: 8GiB}\n")).causes
    )
