"""GPUs and library facts: what is loaded, under which names, and what an unknown name says."""

import pytest
from memc.errors import MemcError
from memc.facts import fact_keys, gpu_keys, gpu_rows, load_fact, load_gpu

MIB = 1024**2


@pytest.mark.parametrize(
    "name", ["rtx-4090", "RTX 4090", "rtx4090", "4090", "NVIDIA GeForce RTX 4090", "GeForce RTX 4090", "rtx_4090"]
)
def test_names_of_one_card(name: str) -> None:
    assert load_gpu(name).key == "rtx-4090"


def test_figures_are_in_base_units() -> None:
    gpu = load_gpu("rtx-4090")
    assert gpu.capacity_bytes == 24081 * MIB
    assert gpu.compute_capability == (8, 9)
    assert gpu.memory_bytes_per_second == 1008e9
    assert gpu.peak_flops_per_second["bf16"] == pytest.approx(165.2e12)
    assert gpu.achieved_flops_per_second["bf16"] == pytest.approx(164.81e12)
    assert gpu.achieved_pcie_bytes_per_second == pytest.approx(25.2e9)
    assert gpu.nvlink_bytes_per_second == 0
    assert gpu.bf16
    assert gpu.flash_attention_2
    assert gpu.usd_per_hour == pytest.approx(0.37)


def test_old_cards_have_no_bf16() -> None:
    assert not load_gpu("t4").bf16
    assert not load_gpu("v100-sxm2-16gb").bf16
    assert not load_gpu("rtx-2080-ti").flash_attention_2


def test_unverified_figures_are_unknown() -> None:
    a10g = load_gpu("a10g")
    assert "bf16" not in a10g.peak_flops_per_second
    assert load_gpu("l40").capacity_bytes is None
    assert load_gpu("rtx-3090").nvlink_bytes_per_second is None


def test_a_name_for_several_cards_lists_them() -> None:
    with pytest.raises(MemcError, match=r"'h100' fits 3 GPUs: h100-nvl-94gb, h100-pcie-80gb, h100-sxm5-80gb"):
        load_gpu("h100")


def test_words_in_any_order_narrow_the_choice() -> None:
    with pytest.raises(MemcError, match="fits 2 GPUs: a100-pcie-80gb, a100-sxm4-80gb"):
        load_gpu("A100 80GB")
    assert load_gpu("80gb sxm4 a100").key == "a100-sxm4-80gb"


def test_a_derived_capacity_says_so() -> None:
    gpu = load_gpu("rtx-4080")
    assert gpu.capacity_bytes == load_gpu("rtx-4080-super").capacity_bytes
    assert "derived, not observed on this card" in gpu.source


@pytest.mark.parametrize("name", ["rtx-4080-supr", "", "NVIDIA"])
def test_unknown_card(name: str) -> None:
    with pytest.raises(MemcError, match="gpu-unknown"):
        load_gpu(name)


def test_unknown_card_names_the_nearest() -> None:
    with pytest.raises(MemcError, match="nearest: rtx-4080-super"):
        load_gpu("rtx-4080-supr")


def test_catalogue_is_consistent() -> None:
    rows = gpu_rows()
    assert [row.key for row in rows] == list(gpu_keys())
    assert len(rows) == 72
    names = [row.name for row in rows]
    for row in rows:
        gpu = row.facts
        if names.count(gpu.name) == 1:
            assert load_gpu(gpu.name).key == gpu.key
        if gpu.capacity_bytes is not None:
            assert 7 * 1024 * MIB < gpu.capacity_bytes < 300 * 1024 * MIB
        if gpu.achieved_memory_bytes_per_second and gpu.memory_bytes_per_second:
            assert 0.4 < gpu.achieved_memory_bytes_per_second / gpu.memory_bytes_per_second < 1.05, gpu.key
        for precision, achieved in gpu.achieved_flops_per_second.items():
            peak = gpu.peak_flops_per_second.get(precision)
            assert peak is None or achieved <= 1.6 * peak, (gpu.key, precision)


def test_library_facts() -> None:
    fact = load_fact("deepspeed.reduce_bucket_elements")
    assert (fact.value, fact.checked) == (500_000_000, "2026-11-29")
    assert "deepspeed" in fact.source
    assert load_fact("bitsandbytes.nf4_double_bytes_per_param").value == 0.5 + 1 / 64 + 4 / (64 * 256)
    assert load_fact("bitsandbytes.adam8bit_state_bytes_per_param").value == 2 + 8 / 256


def test_context_sizes_lie_in_their_band() -> None:
    for key in fact_keys():
        if key.startswith("cuda.context_bytes"):
            value = load_fact(key).value
            low = load_fact(key.replace("context_bytes", "context_low_bytes")).value
            high = load_fact(key.replace("context_bytes", "context_high_bytes")).value
            assert low <= value <= high, key


def test_unknown_fact_names_the_nearest() -> None:
    with pytest.raises(MemcError, match=r"nearest: deepspeed\.sub_group_elements"):
        load_fact("deepspeed.subgroup_elements")


@pytest.mark.parametrize(
    ("name", "runs"),
    [("rtx-4090", True), ("mi300x", True), ("rx-7900-xtx", True), ("gaudi2", False), ("apple-m4-max", False)],
)
def test_cards_that_bitsandbytes_has_kernels_for(name: str, runs: bool) -> None:
    assert load_gpu(name).bitsandbytes is runs


def test_the_releases_that_are_asked_for_bring_kernels_for_amd() -> None:
    since = tuple(int(part) for part in str(load_fact("bitsandbytes.rocm_since").value).split("."))
    least = str(load_fact("stack.bitsandbytes_range").value).partition(",")[0].removeprefix(">=")
    assert tuple(int(part) for part in least.split(".")) >= since[:2]
