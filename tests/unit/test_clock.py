"""The clock: operations counted by hand, parts that add up, and the directions that techniques push it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memc.clock import ClockFacts, RunLength, clock_facts
from memc.clock.collectives import Ring, pass_seconds, waited_for
from memc.clock.flops import micro_batch_flops
from memc.clock.kernels import attention_seconds, filled_share, product_seconds
from memc.clock.microbatch import loss_bytes, micro_batch
from memc.clock.shapes import between, keys_per_query, products_of
from memc.clock.workload import AdamKind, AttentionKernel, Compute, Kernels, adam_bytes, compute_of
from memc.config import Attention, Optimizer, Precision, TrainingConfig
from memc.errors import MemcError
from memc.facts import load_gpu, load_model
from memc.solver.search import Machine
from planspecs import machine_of, spec_text


def machine(**changes: str) -> Machine:
    return machine_of(spec_text(**changes))


def seconds(asked: Machine, config: TrainingConfig) -> float:
    return asked.clock.step_time(config, asked.estimator.counts(config)).step_seconds


def test_full_training_takes_six_operations_per_parameter_and_token_and_attention() -> None:
    """Source: arXiv 2001.08361: 2 forward, 4 backward. The input embedding is a look-up; norms and biases are none."""
    asked = machine(method="full", model="meta-llama/Llama-2-7b-hf")
    config = replace(asked.question.asked, max_length=1, micro_batch_size=1)
    flops = micro_batch_flops(asked.estimator.model, config)
    head, layers = 32000 * 4096, 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    scores = 4 * 4096 * 32
    assert flops.forward == 2 * (layers + head) + scores
    assert flops.backward == 4 * (layers + head) + scores * 5 // 2 + 2 * head
    assert flops.recompute == 0
    assert flops.total == flops.forward + flops.backward


def test_checkpointing_repeats_the_layers_and_not_the_head() -> None:
    asked = machine(model="meta-llama/Llama-2-7b-hf")
    config = replace(asked.question.asked, checkpoint_every=1)
    flops = micro_batch_flops(asked.estimator.model, config)
    assert flops.forward - flops.recompute == 2 * 32000 * 4096 * config.micro_batch_tokens
    half = micro_batch_flops(asked.estimator.model, replace(config, checkpoint_every=2))
    assert half.recompute * 2 == flops.recompute


def test_recomputing_every_layer_costs_the_share_of_time_that_people_report() -> None:
    """Source: the two articles: 20 to 40 % more time."""
    asked = machine(gpu="a100-sxm4-80gb", method="full", batch="1", length="4096")
    config = asked.question.asked
    share = seconds(asked, replace(config, checkpoint_every=1)) / seconds(asked, config)
    assert 1.15 <= share <= 1.42


def test_frozen_weights_save_their_own_gradient() -> None:
    full, lora = machine(method="full"), machine(method="lora")
    ratio = (
        micro_batch_flops(lora.estimator.model, lora.question.asked).total
        / micro_batch_flops(full.estimator.model, full.question.asked).total
    )
    assert 0.6 < ratio < 0.8


def test_eager_attention_computes_the_scores_that_a_causal_kernel_skips() -> None:
    asked = machine(length="8192", batch="1")
    causal = micro_batch_flops(asked.estimator.model, asked.question.asked)
    eager = micro_batch_flops(asked.estimator.model, replace(asked.question.asked, attention=Attention.EAGER))
    assert eager.forward > causal.forward


def test_parts_add_up_and_throughput_follows() -> None:
    asked = machine(gpu="a100-sxm4-80gb", count="8", method="full", batch="64")
    config = asked.question.asked
    time = asked.clock.step_time(config, asked.estimator.counts(config), total_steps=10, usd_per_gpu_hour=2.0)
    parts = (time.compute_seconds, time.bandwidth_seconds, time.communication_seconds, time.offload_seconds)
    assert time.step_seconds == sum(parts)
    assert min(parts) >= 0
    assert time.tokens_per_step == 64 * 2048
    assert time.tokens_per_second_per_gpu * time.step_seconds * 8 == pytest.approx(time.tokens_per_step)
    assert time.total_seconds == pytest.approx(10 * time.step_seconds)
    assert time.total_usd == pytest.approx(time.total_seconds / 3600 * 2.0 * 8)


def test_unknown_amounts_stay_unknown() -> None:
    asked = machine()
    config = asked.question.asked
    time = asked.clock.step_time(config, asked.estimator.counts(config))
    assert (time.total_seconds, time.total_usd) == (None, None)


def test_shorter_samples_shorten_the_run_and_not_the_longest_step() -> None:
    asked = machine(batch="1")
    config, counts = asked.question.asked, asked.estimator.counts(asked.question.asked)
    whole = asked.clock.step_time(config, counts, total_steps=100)
    half = asked.clock.step_time(config, counts, total_steps=100, length_share=0.5)
    assert half.step_seconds == whole.step_seconds
    assert half.total_seconds is not None
    assert whole.total_seconds is not None
    assert 0.4 < half.total_seconds / whole.total_seconds < 0.7


@pytest.mark.parametrize("gpu", ["t4", "v100-sxm2-32gb", "rtx-4090", "a100-sxm4-80gb", "h200-sxm-141gb"])
def test_achievable_rates_stay_below_the_datasheet(gpu: str) -> None:
    facts = load_gpu(gpu)
    precision = Precision.BF16 if facts.bf16 else Precision.FP16
    rates = clock_facts(facts, precision, 1)
    assert 0 < rates.flops_per_second < facts.peak_flops_per_second[precision.value]
    assert facts.memory_bytes_per_second is not None
    assert 0 < rates.memory_bytes_per_second <= facts.memory_bytes_per_second
    assert rates.pcie_bytes_per_second < rates.memory_bytes_per_second


def test_a_rate_that_was_not_measured_is_said_to_be_so() -> None:
    card = replace(load_gpu("rtx-4090"), achieved_flops_per_second={})
    assert any("not measured" in note for note in clock_facts(card, Precision.BF16, 1).assumptions)
    with pytest.raises(MemcError, match=r"no peak_tflops\.bf16 of rtx-4090"):
        clock_facts(replace(card, peak_flops_per_second={}), Precision.BF16, 1)


def test_faster_cards_take_less_time() -> None:
    times = [
        seconds(asked, asked.question.asked)
        for asked in (machine(gpu=gpu, batch="1") for gpu in ("rtx-3090", "a100-sxm4-80gb", "h100-sxm5-80gb"))
    ]
    assert times == sorted(times, reverse=True)


def rates(gpu: str = "a100-sxm4-80gb", ranks: int = 1) -> ClockFacts:
    return clock_facts(load_gpu(gpu), Precision.BF16, ranks)


def test_a_network_that_is_given_is_shared_by_the_cards_of_a_node_and_one_that_is_not_is_said() -> None:
    work = {"gpu": "a100-sxm4-80gb", "method": "full", "count": "4", "nodes": "2"}
    assumed = machine(**work)
    given = machine_of(spec_text(**work).replace("nodes: 2", "nodes: 2, network_gbit_per_second: 10"))
    assert any("network_gbit_per_second" in note for note in assumed.clock.facts.assumptions)
    assert not any("network_gbit_per_second" in note for note in given.clock.facts.assumptions)
    share = given.clock.facts.network_bytes_per_second / (10e9 / 8 / 4)
    assert 0.5 < share <= 1
    config = given.question.asked
    assert seconds(given, config) > seconds(assumed, config)
    assert not any("network" in note for note in machine().clock.facts.assumptions)


def work(**changes: Any) -> Compute:
    base = Compute(
        samples=2,
        length=2048,
        context=2048,
        dtype="bf16",
        stream_bytes=2,
        autocast=False,
        trains=True,
        quantized=False,
    )
    return replace(base, **changes)


LLAMA = "meta-llama/Llama-2-7b-hf"


def test_a_product_takes_its_operations_at_the_rate_of_full_tiles() -> None:
    facts = replace(rates(), multiprocessors=64, memory_bytes_per_second=1e18)
    # 64 tiles of 128 x 256 on 64 multiprocessors: one wave, all of it used
    assert product_seconds(1024, 4096, 2048, facts) == pytest.approx(2 * 1024 * 4096 * 2048 / facts.flops_per_second)


def test_one_tile_too_many_costs_a_wave() -> None:
    assert filled_share(1024, 2048, 1, 64) == 1.0
    assert filled_share(1024, 2049, 1, 64) < 0.9
    assert filled_share(1024, 2049, 1, 0) == 1.0, "unknown multiprocessors: nothing is counted as empty"


def test_a_thin_product_takes_the_time_of_reading_its_weight() -> None:
    facts = rates()
    moved = (1 * 4096 + 4096 * 4096 + 1 * 4096) * 2
    assert product_seconds(1, 4096, 4096, facts) == pytest.approx(moved / facts.memory_bytes_per_second)


def test_keys_of_a_causal_query_are_half_and_a_window_bounds_them() -> None:
    full = load_model(LLAMA, base_dir=Path()).groups[0].block.attention
    assert keys_per_query(full, 4096, skips=True, block_keys=0) == 2048
    assert keys_per_query(full, 4096, skips=False, block_keys=0) == 4096
    window = replace(full, sliding_window=1024)
    assert keys_per_query(window, 4096, skips=True, block_keys=0) == 1024 * (1 - 1024 / 8192)
    assert keys_per_query(window, 512, skips=True, block_keys=0) == 256
    assert keys_per_query(replace(full, causal=False), 4096, skips=True, block_keys=0) == 4096


def test_only_the_experts_that_a_token_is_sent_to_compute() -> None:
    model = load_model("mistralai/Mixtral-8x7B-v0.1", base_dir=Path())
    block = model.groups[0].block
    operations = sum(
        2 * product.inner * product.outer * product.rows_per_token
        for product in products_of(block, model.hidden_size, work())
    )
    norms = sum(norm.params for norm in block.norms)
    routers = sum(tensor.params for tensor in block.tensors if "gate.weight" in tensor.name)
    assert operations == 2 * (block.active_params - norms - routers)


def test_experts_in_one_grouped_product_are_launched_together() -> None:
    block = load_model("Qwen/Qwen3-30B-A3B", base_dir=Path()).groups[0].block
    apart = replace(work(), experts_apart=True)
    few = replace(block, mlp=replace(block.mlp, experts=8))
    assert between(block, 2048, work())[0].kernels == between(few, 2048, work())[0].kernels
    assert between(block, 2048, apart)[0].kernels > between(few, 2048, apart)[0].kernels


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_ring_sends_its_share_in_as_many_hops_as_there_are_other_ranks(ranks: int) -> None:
    facts = rates()
    seconds = pass_seconds(1e9, 2, Ring(ranks, 1), facts)
    if ranks == 1:
        assert seconds == 0.0
        return
    hops = facts.collective_seconds + (ranks - 1) * facts.bus_hop_seconds
    assert seconds == pytest.approx(1e9 * (ranks - 1) / ranks / facts.bus_bytes_per_second + 2 * hops)


def test_between_nodes_the_adapters_of_one_node_bound_a_ring() -> None:
    facts = replace(rates(), network_bytes_per_second=1e9)
    one, eight = (pass_seconds(1e12, 1, Ring(16, 2, per_node), facts) for per_node in (1, 8))
    assert one == pytest.approx(8 * eight, rel=1e-3)


def test_published_collectives_are_met() -> None:
    """Source: github.com/stas00/ml-engineering@744d01e network/benchmarks, 8 x A100: bus bandwidth by payload."""
    facts = rates(ranks=8)
    for payload, published in ((2**26, 171.5e9), (2**29, 222.7e9), (2**34, 234.9e9)):
        seconds = 2 * pass_seconds(float(payload), 1, Ring(8, 1), facts)
        assert 2 * payload * 7 / 8 / seconds == pytest.approx(published, rel=0.25)


def test_what_a_phase_computes_hides_what_it_waits_for() -> None:
    assert waited_for(1.0, 0.1, 5.0, 0.0) == pytest.approx(0.1)
    assert waited_for(1.0, 0.1, 0.5, 0.0) == pytest.approx(0.1 + 0.4)
    assert waited_for(0.0, 0.1, 0.5, 0.2) == 0.0
    assert waited_for(1.0, 0.0, 5.0, 0.2) == pytest.approx(0.2), "a collective takes multiprocessors from products"


def test_bytes_of_an_adam_step_are_counted_by_hand() -> None:
    """fp32: the gradient is read for its norm, scaled (2), read; weight and two moments are read and written."""
    assert adam_bytes(AdamKind.FUSED, weight=4, gradient=4, state=4, master=0) == 12 + 4 + 8 + 16
    assert adam_bytes(AdamKind.FUSED, weight=2, gradient=2, state=4, master=4) == 6 + 2 + 8 + 2 + 16
    assert adam_bytes(AdamKind.EIGHT_BIT, weight=4, gradient=4, state=4, master=0) == 12 + 4 + 8 + 4
    assert adam_bytes(AdamKind.FOREACH, weight=4, gradient=4, state=4, master=0) > 2 * 40


def test_a_fused_loss_moves_a_third_of_what_the_chain_moves() -> None:
    assert sum(loss_bytes(2, fused=True)) == 10
    assert sum(loss_bytes(2, fused=False)) == 6 + 16 + 8 + 6


def test_few_tokens_take_the_time_of_launching_and_compiling_removes_it() -> None:
    model, facts = load_model("meta-llama/Llama-3.2-1B", base_dir=Path()), rates("h100-sxm5-80gb")
    eager = micro_batch(model, work(samples=1, length=128, context=128), facts)
    assert eager.seconds == pytest.approx(eager.forward_launch + eager.backward_launch)
    compiled = micro_batch(model, work(samples=1, length=128, context=128, kernels=Kernels.COMPILED), facts)
    assert compiled.seconds < 0.5 * eager.seconds


def test_one_rank_communicates_nothing() -> None:
    asked = machine(gpu="a100-sxm4-80gb", method="full", batch="1")
    config = asked.question.asked
    assert asked.clock.step_time(config, asked.estimator.counts(config)).communication_seconds == 0.0


def test_evaluation_and_saving_count_in_the_run() -> None:
    asked = machine(batch="1")
    config, counts = asked.question.asked, asked.estimator.counts(asked.question.asked)
    alone = asked.clock.step_time(config, counts, run=RunLength(steps=100))
    whole = asked.clock.step_time(
        config, counts, run=RunLength(steps=100, evaluations=2, evaluation_samples=50, saves=3)
    )
    assert alone.total_seconds is not None
    assert whole.total_seconds is not None
    assert whole.evaluation_seconds > 0
    assert whole.saving_seconds > 0
    assert whole.total_seconds == pytest.approx(alone.total_seconds + whole.evaluation_seconds + whole.saving_seconds)
    assert alone.total_seconds == asked.clock.step_time(config, counts, total_steps=100).total_seconds
    assert whole.gpu_hours == pytest.approx(whole.total_seconds / 3600)


def test_no_step_is_shorter_than_its_passes() -> None:
    asked = machine(gpu="a100-sxm4-80gb", count="8", method="full", batch="64")
    config = asked.question.asked
    time = asked.clock.step_time(config, asked.estimator.counts(config))
    assert asked.clock.least_seconds(config) <= time.step_seconds


def test_a_power_limit_slows_products_and_not_memory() -> None:
    card = load_gpu("h100-sxm5-80gb")
    free, held = (clock_facts(card, Precision.BF16, 1, power_limit_watts=watts) for watts in (None, 350.0))
    assert held.flops_per_second == pytest.approx(free.flops_per_second * 0.5**0.5)
    assert held.memory_bytes_per_second == free.memory_bytes_per_second


def test_pages_and_offloaded_inputs_take_transfers() -> None:
    asked = machine(gpu="a100-sxm4-80gb", method="full", batch="1")
    config = asked.question.asked
    paged = replace(config, optimizer=Optimizer.PAGED_ADAMW_8BIT)
    counts = asked.estimator.counts(config)
    waited = asked.clock.step_time(paged, counts).offload_seconds
    assert waited == pytest.approx(4 * counts.trainable / asked.clock.facts.pcie_bytes_per_second)
    kept = replace(config, checkpoint_every=1)
    moved = replace(kept, checkpoint_offload=True)
    assert asked.clock.step_time(kept, counts).offload_seconds == 0.0
    assert asked.clock.step_time(moved, counts).offload_seconds > 0.0


@given(
    samples=st.integers(1, 8),
    length=st.sampled_from([128, 512, 2048, 8192]),
    more=st.integers(1, 4),
    trains=st.booleans(),
    recompute=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_more_work_is_never_faster(samples: int, length: int, more: int, trains: bool, recompute: float) -> None:
    """More tokens, more layers recomputed and weights that train never take less; a faster card never takes more."""
    model, facts = load_model(LLAMA, base_dir=Path()), rates()

    def seconds(compute: Compute, with_facts: ClockFacts = facts) -> float:
        return micro_batch(model, compute, with_facts).seconds

    one = work(samples=samples, length=length, context=length, trains=trains, recompute=recompute)
    assert seconds(one) <= seconds(replace(one, samples=samples + more))
    assert seconds(one) <= seconds(replace(one, length=length * 2, context=length * 2))
    assert seconds(replace(one, recompute=0.0)) <= seconds(one)
    assert seconds(replace(one, trains=False)) <= seconds(one)
    assert seconds(one, replace(facts, flops_per_second=2 * facts.flops_per_second)) <= seconds(one)
    assert seconds(one, replace(facts, memory_bytes_per_second=2 * facts.memory_bytes_per_second)) <= seconds(one)


def test_a_padding_mask_makes_fused_attention_compute_what_the_causal_mask_hides() -> None:
    gpu = load_gpu("h100-sxm5-80gb")
    facts = clock_facts(gpu, Precision.BF16, 1)
    attention = load_model("Qwen/Qwen2.5-7B", base_dir=Path()).groups[0].block.attention
    asked = machine().question.asked
    kernels = [compute_of(replace(asked, padding_mask=masked, packing=False)).attention for masked in (False, True)]
    assert kernels == [AttentionKernel.FLASH2, AttentionKernel.MASKED]
    long = [work(samples=1, length=16384, context=16384, attention=kernel) for kernel in kernels]
    (skips, skips_back), (all_of_it, all_back) = (attention_seconds(attention, one, facts) for one in long)
    assert 1.9 < all_of_it / skips <= 2
    assert 1.9 < all_back / skips_back <= 2


def test_a_cap_on_scores_costs_the_bytes_of_its_three_operations() -> None:
    facts = clock_facts(load_gpu("h100-sxm5-80gb"), Precision.BF16, 1)
    attention = load_model("Qwen/Qwen2.5-7B", base_dir=Path()).groups[0].block.attention
    eager = work(samples=2, length=2048, context=2048, attention=AttentionKernel.EAGER)
    scores = 2 * 2048 * 2048 * attention.heads
    plain = attention_seconds(attention, eager, facts)
    capped = attention_seconds(replace(attention, logit_softcap=50.0), eager, facts)
    for more, bytes_each in zip((capped[0] - plain[0], capped[1] - plain[1]), (12, 14), strict=True):
        assert more == pytest.approx(bytes_each * scores / facts.memory_bytes_per_second)
