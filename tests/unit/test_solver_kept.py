"""What questions share changes none of their answers."""

from __future__ import annotations

import ast
from pathlib import Path

import memc.ladder
import pytest
from memc.advise import Desk
from memc.advise.variations import with_card, with_count
from memc.facts import load_gpu, load_model
from memc.ledger import Estimator, ledger_facts
from memc.solver.kept import CARD_FIELDS
from memc.solver.resolve import resolve
from memc.solver.solve import choose, machine_of
from memc.spec import LoadedSpec, parse_spec

SPEC = """\
model: Qwen/Qwen2.5-1.5B
data: {train: train.jsonl, max_length: 1024, samples: 1000}
method: auto
training: {epochs: 1, global_batch_size: 32}
hardware: {gpu: rtx-4090, count: 1, host_memory: 64GiB}
"""
CARDS = ("rtx-4090", "rtx-3090", "t4", "h100-sxm5-80gb", "mi300x", "rtx-4060-ti-16gb")


def test_techniques_look_at_nothing_of_a_card_that_frames_are_not_kept_by() -> None:
    seen = set()
    for path in Path(memc.ladder.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "gpu":
                seen.add(node.attr)
    assert seen - {"name"} == set(CARD_FIELDS)  # the name is only said


@pytest.mark.parametrize("count", [1, 4])
def test_a_desk_answers_like_one_that_was_asked_nothing_before(count: int) -> None:
    loaded = parse_spec(SPEC, "spec.yaml")
    model = load_model(loaded.spec.model, base_dir=Path())
    desk = Desk(loaded, model, load_gpu(loaded.spec.hardware.gpu), 1000)
    for card in CARDS:
        gpu = load_gpu(card)
        spec = with_count(with_card(loaded.spec, card), count)
        kept = desk.attempt(spec, gpu=gpu).best
        facts = ledger_facts(gpu)
        varied = LoadedSpec(spec=spec, path=loaded.path, text=loaded.text, document=loaded.document)
        alone = choose(machine_of(resolve(varied, model, gpu, facts, 1000), Estimator(model, facts)))
        assert (kept is None) == (alone is None)
        if kept is not None and alone is not None:
            assert kept.config == alone.config
            assert kept.time == alone.time
            assert kept.candidate.price.gpu_required_bytes == alone.candidate.price.gpu_required_bytes
