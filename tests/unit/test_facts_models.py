"""Models: exact parameter counts from the config alone, and what `load_model` says when it cannot."""

import json
import re
from pathlib import Path

import pytest
import yaml
from memc.errors import ExitCode, MemcError
from memc.facts import (
    Component,
    ModelRow,
    NormKind,
    Objective,
    Sees,
    architecture_keys,
    default_lora_targets,
    ledger_described,
    load_model,
    lora_params,
    model_keys,
    model_rows,
)

CASES = yaml.safe_load((Path(__file__).parents[1] / "cases" / "parameters.yaml").read_text())["cases"]
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def write_config(folder: Path, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    config = {key: value for key, value in {**LLAMA, **changes}.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def error_of(reference: str, base_dir: Path) -> MemcError:
    with pytest.raises(MemcError) as caught:
        load_model(reference, base_dir=base_dir)
    assert caught.value.exit_code is ExitCode.USAGE
    return caught.value


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["model"])
def test_catalogue_counts_are_exact(case: dict, tmp_path: Path) -> None:
    model = load_model(case["model"], base_dir=tmp_path)
    by_component = model.params_by_component()
    assert model.total_params == case["params"]
    assert sum(by_component.values()) == case["params"]
    assert by_component[Component.HEAD] == case["head_params"]
    assert model.tied == case["tied"]
    table = model.vocab_size * model.hidden_size
    assert case["embedding_params"] in (by_component[Component.EMBEDDING], table)


def test_every_catalogue_model_has_its_exact_count(tmp_path: Path) -> None:
    for row in model_rows():
        assert row.described, row.key
        model = load_model(row.key, base_dir=tmp_path)
        assert model.total_params == row.params, row.key
        assert sum(model.params_by_component().values()) == row.params, row.key


def test_listing_names_every_model_once() -> None:
    rows = model_rows()
    assert tuple(sorted(row.key for row in rows)) == model_keys()
    assert len(rows) >= 132
    names = [name.casefold() for row in rows for name in (row.key, *row.aliases)]
    assert len(names) == len(set(names))
    assert all(row.described for row in rows if row.priced)


def test_alias_key_and_case_lead_to_the_same_shape(tmp_path: Path) -> None:
    base = load_model("Qwen/Qwen2.5-7B", base_dir=tmp_path)
    alias = load_model("qwen/qwen2.5-7b-INSTRUCT", base_dir=tmp_path)
    assert alias.groups == base.groups
    assert alias.key == "qwen/qwen2.5-7b-INSTRUCT"
    assert base.checked == "2026-11-29"
    assert "Qwen--Qwen2.5-7B.yaml" in base.source


def test_an_alias_may_differ_in_a_setting(tmp_path: Path) -> None:
    first = load_model("mistralai/Mistral-7B-v0.1", base_dir=tmp_path)
    second = load_model("mistralai/Mistral-7B-Instruct-v0.2", base_dir=tmp_path)
    assert first.groups[0].block.attention.sliding_window == 4096
    assert second.groups[0].block.attention.sliding_window is None
    assert second.total_params == first.total_params


def test_folder_config_file_and_bare_name(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "mine")
    by_folder = load_model("mine", base_dir=tmp_path)
    assert by_folder == load_model("mine/config.json", base_dir=tmp_path)
    assert by_folder == load_model(str(folder), base_dir=Path("/"))
    assert by_folder.key == "mine"
    assert by_folder.num_layers == 3
    assert by_folder.checkpoint_bytes_per_param == 4
    block = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160 + 2 * 64
    assert by_folder.total_params == 2 * 100 * 64 + 64 + 3 * block


def test_a_local_folder_wins_over_the_catalogue(tmp_path: Path) -> None:
    (tmp_path / "Qwen").mkdir()
    write_config(tmp_path / "Qwen" / "Qwen2.5-7B")
    assert load_model("Qwen/Qwen2.5-7B", base_dir=tmp_path).hidden_size == 64


def test_layers_that_differ_form_groups(tmp_path: Path) -> None:
    gemma = load_model("google/gemma-2-2b", base_dir=tmp_path)
    assert [group.count for group in gemma.groups] == [1] * 26
    assert [group.block.attention.sliding_window for group in gemma.groups[:3]] == [4096, None, 4096]
    assert gemma.groups[0].block.attention.logit_softcap == 50.0
    assert gemma.logit_softcap == 30.0
    assert {norm.kind for norm in gemma.groups[0].block.norms} == {NormKind.RMS_FP32_WEIGHT}
    gemma3 = load_model("google/gemma-3-1b-pt", base_dir=tmp_path)
    assert [group.count for group in gemma3.groups] == [5, 1, 5, 1, 5, 1, 5, 1, 2]


@pytest.mark.parametrize("row", [row for row in model_rows() if row.priced], ids=lambda row: row.key)
def test_priced_blocks_have_programs_that_name_all_their_parameters(row: ModelRow, tmp_path: Path) -> None:
    model = load_model(row.key, base_dir=tmp_path)
    for stack in model.stacks:
        for group in stack.groups:
            block = group.block
            words = set(re.findall(r"\w+", block.forward))
            owners = [*(linear.id for linear in block.linears), *(norm.name for norm in block.norms)]
            owners += [tensor.name for tensor in block.tensors if "relative_attention_bias" not in tensor.name]
            assert {owner.replace(".", "_") for owner in owners} <= words
            assert dict(block.sizes)["hidden"] == stack.hidden_size


def test_what_is_only_counted_is_not_priced() -> None:
    assert ledger_described("llama") and ledger_described("mixtral")
    assert not ledger_described("clip")


def test_the_documentation_names_the_priced_families_that_the_catalogue_has_no_model_of() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "models.md").read_text(encoding="utf-8")
    (sentence,) = (part for part in page.split("\n\n") if part.startswith("Families that no model"))
    listed = {row.model_type for row in model_rows()}
    priced = {key for key in architecture_keys() if ledger_described(key)}
    assert set(re.findall(r"`([^`]+)`", sentence)) == priced - listed


def test_trl_tells_layers_and_head_of_most_models_apart(tmp_path: Path) -> None:
    assert load_model("meta-llama/Meta-Llama-3-8B", base_dir=tmp_path).tiled_loss
    assert not load_model("meta-llama/Llama-4-Scout-17B-16E-Instruct", base_dir=tmp_path).tiled_loss


def test_lora_counts(tmp_path: Path) -> None:
    model = load_model("meta-llama/Meta-Llama-3-8B", base_dir=tmp_path)
    targets = default_lora_targets(model, "all-linear")
    assert targets == ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert default_lora_targets(model, "attention") == targets[:4]
    assert lora_params(model, targets, 16) == 41_943_040
    assert lora_params(model, ("q_proj", "v_proj"), 8) == 3_407_872


def test_lora_target_that_does_not_exist(tmp_path: Path) -> None:
    model = load_model("microsoft/Phi-3-mini-4k-instruct", base_dir=tmp_path)
    with pytest.raises(MemcError, match="no linear called 'q_proj'; nearest: qkv_proj"):
        lora_params(model, ("q_proj",), 8)


def test_unknown_hub_id(tmp_path: Path) -> None:
    message = str(error_of("Qwen/Qwen2.5-7B-Instrct", tmp_path))
    assert "model-unknown" in message
    assert "nothing is downloaded" in message
    assert "Qwen/Qwen2.5-7B-Instruct" in message
    assert "pass the model's folder or its config.json" in message


def test_path_that_holds_no_config(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds no config.json" in str(error_of("./empty", tmp_path))
    assert "does not exist" in str(error_of("./absent", tmp_path))
    assert "does not exist" in str(error_of("absent/config.json", tmp_path))


def test_unknown_model_type(tmp_path: Path) -> None:
    write_config(tmp_path / "m", model_type="qwen9")
    message = str(error_of("m", tmp_path))
    assert "model-type-unknown" in message
    assert "'qwen9' has no architecture description (nearest: qwen" in message
    assert "llama, llama4" in message


def test_all_missing_keys_are_named_together(tmp_path: Path) -> None:
    write_config(tmp_path / "m", vocab_size="absent", hidden_size="absent", num_attention_heads=0)
    error = error_of("m", tmp_path)
    assert [(d.code, d.where.field) for d in error.diagnostics if d.where] == [
        ("model-config-missing-key", "hidden_size"),
        ("model-config-bad-value", "num_attention_heads"),
        ("model-config-missing-key", "vocab_size"),
    ]
    assert "m/config.json has no hidden_size" in error.diagnostics[0].message


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"num_attention_heads": 16, "num_key_value_heads": 3}, "16 heads cannot share 3 key heads evenly"),
        (
            {"hidden_size": 1024, "num_attention_heads": 15, "num_key_value_heads": 4},
            "15 heads cannot share 4 key heads",
        ),
        (
            {"model_type": "bert", "hidden_size": 100, "num_attention_heads": 12, "num_key_value_heads": "absent"},
            "12 heads do not divide the width of 100",
        ),
    ],
)
def test_attention_that_cannot_be_computed_is_refused(tmp_path: Path, sizes: dict[str, object], said: str) -> None:
    config = {"max_position_embeddings": 512, "type_vocab_size": 2, "hidden_act": "gelu"} | sizes
    write_config(tmp_path / "m", **config)
    error = error_of("m", tmp_path)
    assert error.diagnostics[0].code == "model-config-bad-value"
    assert said in error.diagnostics[0].message


def test_missing_model_type(tmp_path: Path) -> None:
    write_config(tmp_path / "m", model_type="absent")
    assert "has no model_type" in str(error_of("m", tmp_path))


@pytest.mark.parametrize(("text", "words"), [("{'a': 1}", "is not JSON"), ("[1]", "must hold a JSON object")])
def test_malformed_config(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert words in str(error_of("config.json", tmp_path))


def test_malformed_config_names_the_place(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{\n  "hidden_size": 1,\n  oops\n}')
    where = error_of("config.json", tmp_path).diagnostics[0].where
    assert where is not None
    assert (where.line, where.column) == (3, 3)


def test_quantised_checkpoint_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path / "m", quantization_config={"quant_method": "gptq", "bits": 4})
    message = str(error_of("m", tmp_path))
    assert "already quantised (gptq)" in message
    assert "method: qlora" in message


def test_a_variant_outside_the_description_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "siglip_vision_model"}')
    message = str(error_of("config.json", tmp_path))
    assert "model-config-unsupported" in message
    assert "sets vision_use_head to True" in message


def test_dropout_is_refused_where_the_block_does_not_describe_it(tmp_path: Path) -> None:
    write_config(tmp_path / "m", attention_dropout=0.0)
    assert load_model("m", base_dir=tmp_path).hidden_size == 64
    write_config(tmp_path / "m", attention_dropout=0.1)
    assert "sets attention_dropout to 0.1" in str(error_of("m", tmp_path))


def test_family_without_description(tmp_path: Path) -> None:
    write_config(tmp_path / "m", model_type="t6")
    assert "model_type 't6' has no architecture description (nearest: t5)" in str(error_of("m", tmp_path))


def test_a_part_alone_is_no_model(tmp_path: Path) -> None:
    write_config(tmp_path / "m", model_type="llama4_vision_model")
    assert "model_type 'llama4_vision_model' is only a part of models" in str(error_of("m", tmp_path))


def test_stacks_are_named_in_the_order_in_which_they_run(tmp_path: Path) -> None:
    whisper = load_model("openai/whisper-tiny", base_dir=tmp_path)
    encoder, decoder = whisper.stacks
    assert (encoder.name, encoder.sees, encoder.positions_per_item) == ("model.encoder", Sees.AUDIO, 1500)
    assert (decoder.name, decoder.sees, decoder.num_layers) == ("", Sees.TEXT, 4)
    assert whisper.groups[0].block.cross_attention is not None
    assert whisper.objective is Objective.SPEECH_SEQ2SEQ_LM
    llava = load_model("llava-hf/llava-1.5-7b-hf", base_dir=tmp_path)
    tower, text = llava.stacks
    assert (tower.positions_per_item, tower.text_positions_per_item, tower.hidden_size) == (577, 576, 1024)
    assert text.hidden_size == llava.hidden_size == 4096
    assert [linear.id for linear in llava.outer_linears] == [
        "multi_modal_projector.linear_1",
        "multi_modal_projector.linear_2",
    ]


def test_layers_of_different_kinds_in_one_model(tmp_path: Path) -> None:
    deepseek = load_model("deepseek-ai/DeepSeek-V3", base_dir=tmp_path)
    assert [(group.count, group.block.mlp.experts) for group in deepseek.groups] == [(3, 0), (58, 256)]
    assert deepseek.groups[0].block.attention.value_head_dim == 128
    assert deepseek.groups[1].block.mlp.shared_intermediate == 2048
    assert 37e9 < deepseek.active_params < 38e9
    hybrid = load_model("Qwen/Qwen3-Next-80B-A3B-Instruct", base_dir=tmp_path)
    assert [(group.count, group.block.attention.linear) for group in hybrid.groups[:4]] == [
        (3, True),
        (1, False),
        (3, True),
        (1, False),
    ]


def test_a_name_is_looked_for_in_every_stack(tmp_path: Path) -> None:
    llava = load_model("llava-hf/llava-1.5-7b-hf", base_dir=tmp_path)
    text, tower = 32 * 2 * 4096 * 8, 24 * 2 * 1024 * 8
    assert lora_params(llava, ["q_proj"], 8) == text + tower


def test_names_that_peft_takes_for_experts_are_no_targets(tmp_path: Path) -> None:
    model = load_model("deepseek-ai/DeepSeek-V3", base_dir=tmp_path)
    assert "gate_proj" not in default_lora_targets(model, "all-linear")
    with pytest.raises(MemcError, match="has no linear called 'gate_proj'"):
        lora_params(model, ["gate_proj"], 8)
