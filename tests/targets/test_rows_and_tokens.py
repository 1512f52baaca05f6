"""What the emitted script makes of its rows: which it leaves out, where a text begins and ends, what it says of it."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from memc.config import Reference, Task
from memc.plan import PreferenceSettings
from planmaker import make_config
from test_guards import TURNS, import_script

ARGS = SimpleNamespace(process_index=0, main_process_first=lambda **words: nullcontext())


def tokenizer(*, begins: bool, ends: bool) -> Any:
    """Returns a tokenizer of single letters; a is 3 and so on, a text begins with 1 and ends with 2."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<begin>": 1, "<end>": 2} | {chr(97 + number): 3 + number for number in range(26)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if begins:
        made.post_processor = processors.TemplateProcessing(single="<begin> $0", special_tokens=[("<begin>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<begin>", eos_token="<end>" if ends else None, pad_token="<unk>"
    )


def pretrain(tmp_path: Path, *, packing: bool) -> ModuleType:
    config = make_config(task=Task.PRETRAIN, packing=packing, max_length=4)
    return import_script(tmp_path / "out", config, train_data="rows.jsonl")


def tokens(script: ModuleType, *texts: str, begins: bool = False, ends: bool = True) -> list[list[int]]:
    from datasets import Dataset

    rows = Dataset.from_dict({"text": list(texts)})
    made = script.tokenize(rows, tokenizer(begins=begins, ends=ends), ARGS)
    assert made.column_names == ["input_ids"]
    return list(made["input_ids"])


def test_a_text_begins_and_ends_as_its_tokenizer_has_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = pretrain(tmp_path, packing=False)
    assert tokens(script, "ab", "c") == [[3, 4, 2], [5, 2]]
    assert tokens(script, "ab", "c", begins=True) == [[1, 3, 4, 2], [1, 5, 2]]
    assert tokens(script, "ab", ends=False) == [[3, 4]]
    assert "train.py:" not in capsys.readouterr().out
    assert tokens(script, "abc", "abcdef", "abcd") == [[3, 4, 5, 2], [3, 4, 5, 6], [3, 4, 5, 6]]
    said = capsys.readouterr().out
    assert "2 of 3 texts are longer than 4 tokens; the 4 tokens beyond, 25.0% of all, are not trained on" in said


def test_packed_texts_are_one_stream(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = pretrain(tmp_path, packing=True)
    assert tokens(script, "abcde", "f", begins=True) == [[1, 3, 4, 5], [6, 7, 2, 1]]
    assert "train.py:" not in capsys.readouterr().out
    with pytest.raises(script.PlanError, match="does not fill one block of 4 tokens"):
        tokens(script, "a")


def test_pairs_without_a_preference_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = import_script(tmp_path / "out", make_config(task=Task.DPO, reference=Reference.ADAPTERS_OFF), **_DPO)
    file = tmp_path / "pairs.jsonl"
    pairs = [{"prompt": "p", "chosen": "a", "rejected": "b"}, {"prompt": "p", "chosen": "a", "rejected": "a"}]
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    assert list(script.load_rows(str(file), ARGS)) == pairs[:1]
    assert f"train.py: 1 of 2 pairs of {file} have equal `chosen` and `rejected`" in capsys.readouterr().out
    file.write_text(json.dumps(pairs[1]))
    with pytest.raises(script.PlanError, match="are the same in every row"):
        script.load_rows(str(file), ARGS)


_DPO: dict[str, Any] = {"dpo": PreferenceSettings(beta=0.1, loss="sigmoid", label_smoothing=0.0)}

ALONE = "data.assistant_only_loss nothing in it could be learned"


@pytest.mark.parametrize(
    ("row", "refused"),
    [
        ({"messages": TURNS}, False),
        ({"prompt": TURNS[:1], "completion": TURNS[1:]}, False),
        ({"messages": TURNS[:1]}, True),
        ({"text": "a"}, True),
        ({"prompt": "a", "completion": "b"}, True),
    ],
)
def test_rows_without_an_assistant_stop_the_run_that_learns_from_it_alone(
    assistant: ModuleType, tmp_path: Path, row: dict[str, Any], refused: bool
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"messages": TURNS}) + "\n" + json.dumps(row) if refused else json.dumps(row))
    if not refused:
        assert list(assistant.read_rows(str(file), 0, 0)) == [row]
        return
    with pytest.raises(assistant.PlanError, match=r"a\.jsonl:2 has"):
        list(assistant.read_rows(str(file), 0, 0))
    with pytest.raises(assistant.PlanError, match=ALONE):
        assistant.check_row(row, "a", None)


@pytest.fixture(scope="module")
def assistant(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    out = tmp_path_factory.mktemp("assistant") / "out"
    return import_script(out, make_config(task=Task.SFT), assistant_only_loss=True)


def test_a_template_must_mark_the_assistants_turns(assistant: ModuleType) -> None:
    from trl.chat_template_utils import qwen3_chat_template

    marked = tokenizer(begins=False, ends=True)
    for template in (
        "{% for m in messages %}{%- generation -%}{{ m.content }}{% endgeneration %}{% endfor %}",
        qwen3_chat_template,
    ):
        marked.chat_template = template
        assistant.check_marks_of_turns(marked)
    marked.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with pytest.raises(
        assistant.PlanError, match=r"marks the assistant's turns with `\{% generation %\}`: that of .* does not"
    ):
        assistant.check_marks_of_turns(marked)
