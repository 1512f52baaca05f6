"""Images of a spec: their tokens come on top of the text, their number and size are the user's or the processor's."""

from __future__ import annotations

from pathlib import Path

import pytest
from memc import driver
from memc.config import patch_grid
from memc.errors import MemcError
from memc.facts.models import load_model
from memc.plan import Infeasible, Plan
from planspecs import answer_to, machine_of

DYNAMIC, FIXED = "Qwen/Qwen2-VL-2B-Instruct", "llava-hf/llava-1.5-7b-hf"


def spec(model: str, *, data: str = "", gpu: str = "a100-sxm4-80gb", more: str = "pin: {micro_batch_size: 1}") -> str:
    return (
        f"model: {model}\ntask: sft\nmethod: [qlora]\ndata: {{max_length: 2048, samples: 100{data}}}\n"
        f"training: {{global_batch_size: 1}}\nhardware: {{gpu: {gpu}}}\n{more}\n"
    )


@pytest.mark.parametrize(
    ("pixels", "grid"),
    [(448 * 448, (32, 32)), (12845056, (256, 256)), (1, (2, 2)), (28 * 28 * 7, (2, 14)), (1003520, (64, 80))],
)
def test_a_grid_of_patches_has_the_most_positions_that_pixels_allow(pixels: int, grid: tuple[int, int]) -> None:
    assert patch_grid(pixels, 14, 2) == grid


def test_tokens_of_images_come_on_top_of_the_text() -> None:
    asked = machine_of(spec(DYNAMIC, data=", images_per_sample: 2, image_pixels: 200704")).question.asked
    assert (asked.images_per_sample, asked.image_pixels, asked.max_length) == (2, 200704, 2048 + 2 * 256)
    fixed = machine_of(spec(FIXED, data=", images_per_sample: 3", more="")).question.asked
    assert fixed.max_length == 2048 + 3 * 576
    assert not fixed.packing
    assert machine_of(spec(FIXED, data=", images_per_sample: 0", more="")).question.asked.max_length == 2048


def test_an_image_without_a_stated_size_has_all_the_pixels_that_the_processor_allows() -> None:
    question = machine_of(spec(DYNAMIC)).question
    assert question.asked.image_pixels == 12845056
    assert question.asked.max_length == 2048 + 16384
    said = " ".join(question.assumptions)
    assert "every sample has one image" in said
    assert "12,845,056 pixels" in said
    assert "images take 16,384 tokens" in said


@pytest.mark.parametrize(
    ("text", "code", "field"),
    [
        (spec("Qwen/Qwen2.5-0.5B", data=", images_per_sample: 1"), "images-not-seen", "data.images_per_sample"),
        (spec("Qwen/Qwen2.5-0.5B", data=", image_pixels: 9999"), "images-not-seen", "data.image_pixels"),
        (spec(FIXED, data=", image_pixels: 9999"), "image-size-fixed", "data.image_pixels"),
        (spec(FIXED, data=", packing: true"), "images-not-packed", "data.packing"),
    ],
)
def test_what_a_model_does_not_see_is_refused_at_its_field(text: str, code: str, field: str) -> None:
    with pytest.raises(MemcError) as caught:
        answer_to(text)
    assert (code, field) in [(item.code, item.where.field if item.where else "") for item in caught.value.diagnostics]


def test_smaller_images_are_a_way_out_and_fit() -> None:
    refused = answer_to(spec(DYNAMIC, gpu="t4"))
    assert isinstance(refused, Infeasible)
    needed = next(int(item.needed) for item in refused.relaxations if item.input == "data.image_pixels")
    assert 0 < needed < 12845056
    assert not isinstance(answer_to(spec(DYNAMIC, gpu="t4", data=f", image_pixels: {needed}")), Infeasible)
    beyond = needed + 28 * 28 * 8
    assert isinstance(answer_to(spec(DYNAMIC, gpu="t4", data=f", image_pixels: {beyond}")), Infeasible)


def test_a_plan_says_what_images_take() -> None:
    plan = answer_to(spec(DYNAMIC, data=", image_pixels: 1003520"))
    assert isinstance(plan, Plan)
    said = next(text for text in plan.warnings if text.startswith("images take"))
    assert "on text alone" in said
    text_alone = answer_to(spec(DYNAMIC, data=", images_per_sample: 0"))
    assert isinstance(text_alone, Plan)
    assert not any(text.startswith("images take") for text in text_alone.warnings)


def test_more_pixels_and_more_images_never_need_less() -> None:
    def need(data: str) -> int:
        machine = machine_of(spec(DYNAMIC, data=data))
        return machine.estimator.price(machine.question.asked).gpu_required_bytes

    sizes = [need(f", image_pixels: {side * side}") for side in (28, 224, 448, 900)]
    assert sizes == sorted(sizes)
    counts = [need(f", images_per_sample: {count}, image_pixels: 200704") for count in (0, 1, 2, 5)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


@pytest.mark.parametrize("model", [DYNAMIC, FIXED, "google/gemma-3-4b-pt", "Qwen/Qwen3-VL-30B-A3B-Instruct"])
def test_models_that_see_images_are_priced(model: str) -> None:
    assert not load_model(model, base_dir=Path()).unpriced


@pytest.mark.parametrize("model", [DYNAMIC, FIXED, "google/gemma-3-4b-pt"])
def test_the_tower_is_seen_in_evaluation_too(model: str) -> None:
    text = spec(model, data=", eval: eval.jsonl", more="pin: {micro_batch_size: 2, eval_batch_size: 2}")
    machine = machine_of(text.replace("global_batch_size: 1", "global_batch_size: 2"))
    bill = machine.estimator.price(machine.question.asked).ledger().gpu
    assert any(entry.name == "evaluation-working-set" for entry in bill.entries)


def test_adapters_stay_out_of_the_tower_unless_asked_for() -> None:
    def counted(more: str) -> tuple[int, tuple[str, ...]]:
        machine = machine_of(spec(FIXED, more=f"pin: {{micro_batch_size: 1}}\nlora: {{rank: 8{more}}}"))
        lora = machine.question.asked.lora
        assert lora is not None
        return machine.estimator.counts(machine.question.asked).adapters, lora.skipped_stacks

    alone, skipped = counted("")
    both, none = counted(", image_tower: true")
    vicuna = 32 * 8 * (4 * 2 * 4096 + 3 * (4096 + 11008))
    assert (alone, skipped, none) == (vicuna, ("model.vision_tower",), ())
    assert both == vicuna + 24 * 8 * (4 * 2 * 1024 + 2 * (1024 + 4096))


def test_a_module_of_the_tower_alone_names_the_field_that_adapts_it() -> None:
    with pytest.raises(MemcError) as caught:
        answer_to(spec(DYNAMIC, more="lora: {target_modules: [qkv]}"))
    assert "lora.image_tower" in str(caught.value)
    with pytest.raises(MemcError) as refused:
        answer_to(spec("Qwen/Qwen2.5-0.5B", more="lora: {image_tower: true}"))
    assert refused.value.diagnostics[0].code == "images-not-seen"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (("task: sft", "task: pretrain"), "task"),
        ((", samples", ", images_per_sample: 0, samples"), "data.images_per_sample"),
    ],
)
def test_what_is_not_written_for_a_model_of_images_says_where(
    change: tuple[str, str], field: str, tmp_path: Path
) -> None:
    path = tmp_path / "spec.yaml"
    text = spec(DYNAMIC, data=", train: rows.jsonl, image_pixels: 200704")
    path.write_text(text.replace(*change), encoding="utf-8")
    with pytest.raises(MemcError) as caught:
        driver.generate(driver.answer(path), tmp_path / "out", "memc compile spec.yaml")
    found = {(item.code, item.where.field if item.where else "") for item in caught.value.diagnostics}
    assert ("images-not-written", field) in found
    path.write_text(text, encoding="utf-8")
    files = driver.generate(driver.answer(path), tmp_path / "out", "memc compile spec.yaml")
    assert "MAX_PIXELS = 200704 " in files["train.py"]
