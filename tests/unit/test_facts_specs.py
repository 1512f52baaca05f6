"""The fact files themselves: each says where it comes from, and no code knows a card or a model by name."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from memc.errors import MemcError
from memc.facts import gpu_keys, model_keys
from memc.facts.documents import parse_spec, read_names
from memc.facts.expressions import evaluate

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "specs").rglob("*.yaml"))


def figures(value: Any) -> Iterator[dict]:
    """Yields every mapping below `value` that carries a figure."""
    if isinstance(value, dict):
        if "value" in value:
            yield value
        else:
            for below in value.values():
                yield from figures(below)
    elif isinstance(value, list):
        for below in value:
            yield from figures(below)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_fact_file_is_sourced(path: Path) -> None:
    document = parse_spec(path.read_text(encoding="utf-8"), name=path.name)
    for figure in figures({key: value for key, value in document.items() if key != "config"}):
        assert str(figure.get("source") or "").strip(), figure
        assert not re.search(r"\brecall", figure["source"]) or path.parent.name == "models", figure
    if path.parent.name in ("libraries", "links"):
        assert all(fact.get("checked") for fact in document["facts"].values())


@pytest.mark.parametrize("field", ["source", "checked"])
def test_a_record_without_source_or_date_is_refused(field: str) -> None:
    lines = {"source": "source: a page", "checked": "checked: '2026-11-29'"}
    del lines[field]
    with pytest.raises(MemcError, match=f"fact-unsourced.*x.yaml has no {field}"):
        parse_spec("\n".join([*lines.values(), "name: x"]), name="x.yaml")


def test_a_malformed_fact_file_is_named() -> None:
    with pytest.raises(MemcError, match="fact-file-malformed"):
        parse_spec("a: [", name="x.yaml")
    with pytest.raises(MemcError, match="must hold a mapping"):
        parse_spec("- a", name="x.yaml")


@pytest.mark.parametrize("folder", ["gpus", "models"])
def test_names_are_read_without_the_rest(folder: str) -> None:
    for path in (ROOT / "specs" / folder).glob("*.yaml"):
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert read_names(folder, path.stem) == (document["name"], *document["aliases"])


def test_file_names_are_keys() -> None:
    for path in (ROOT / "specs" / "models").glob("*.yaml"):
        assert yaml.safe_load(path.read_text(encoding="utf-8"))["name"].replace("/", "--") == path.stem
    for path in (ROOT / "specs" / "architectures").glob("*.yaml"):
        assert yaml.safe_load(path.read_text(encoding="utf-8"))["model_type"] == path.stem


def test_no_code_knows_a_card_or_a_model() -> None:
    cards = [key for key in gpu_keys() if len(key) > 4]
    models = [name.split("/")[1] for name in model_keys() if len(name.split("/")[1]) > 7]
    names = re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, cards + models))})(?![\w-])", re.IGNORECASE)
    found = []
    for path in (ROOT / "compiler").rglob("*.py"):
        prose = r'""".*?"""|\bexamples=\[.*?\]'  # what people read, in docstrings and in the schema
        code = re.sub(prose, "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        found += [f"{path.name}: {match}" for match in names.findall(code)]
    assert not found


def test_loading_needs_no_framework() -> None:
    script = (
        "import sys; from pathlib import Path; import memc.facts as f; f.load_gpu('rtx-4090');"
        "f.load_model('Qwen/Qwen3-8B', base_dir=Path('.'));"
        "assert not {'torch', 'transformers', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_expressions() -> None:
    names = {"query": 8, "key": 2, "hidden": 9}
    assert evaluate("query + 2 * key", names) == 12
    assert evaluate("hidden / key", names) == 4
    assert evaluate("(query - key) * 2", names) == 12
    for bad in ("unknown", "query ** 2", "__import__('os')", "query.real", "'text'"):
        with pytest.raises(ValueError, match="cannot evaluate"):
            evaluate(bad, names)
