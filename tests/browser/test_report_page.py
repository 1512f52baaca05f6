"""The HTML report in a real browser: its sliders agree with the ledger to the byte, and people can use it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from memc import driver
from memc.ladder import technique_names
from openpage import SPECS, Opened, OpenPage
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

_SETTINGS_EACH = 13
_KNOBS = ("cards", "micro_batch_size", "max_length", "lora_rank")


def explained(opened: Opened, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns what `memc explain --json` says of the spec with these settings pinned and every technique ruled out."""
    spec = yaml.safe_load(opened.spec.read_text(encoding="utf-8"))
    spec["data"]["max_length"] = settings["max_length"]
    spec["data"]["mean_tokens"] = min(spec["data"]["mean_tokens"], settings["max_length"])
    spec["hardware"]["count"] = settings["world_size"]
    spec["method"] = settings["method"]
    spec["ladder"] = {"forbid": list(technique_names())}
    pin: dict[str, Any] = {
        "micro_batch_size": settings["micro_batch_size"],
        "loss": settings["loss"],
        "optimizer": settings["optimizer"],
        "precision": settings["precision"],
        "attention": settings["attention"],
        "engine": settings["engine"],
        "activation_checkpointing": settings["checkpoint_every"],
        "checkpoint_offload": settings["checkpoint_offload"],
    }
    if settings["zero"] is not None:
        pin["zero_stage"] = settings["zero"]["stage"]
        pin["offload_optimizer"] = settings["zero"]["offload_optimizer"]
        pin["offload_param"] = settings["zero"]["offload_param"]
    if settings["lora"] is not None:
        pin["lora_rank"] = settings["lora"]["rank"]
        pin["lora_alpha"] = settings["lora"]["alpha"]
        pin["adapter_precision"] = settings["lora"]["precision"]
    spec["pin"] = pin
    pinned = opened.spec.with_name("pinned.yaml")
    pinned.write_text(yaml.safe_dump(spec), encoding="utf-8")
    return driver.answer(pinned).document()


def without_drive(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns settings without the buffer towards a drive, whose size follows the cards, when nothing goes there."""
    zero = settings["zero"]
    if zero is None or "nvme" in (zero["offload_optimizer"], zero["offload_param"]):
        return settings
    return settings | {"zero": zero | {"nvme_buffer_elements": 0}}


@pytest.mark.parametrize("name", [name for name in SPECS if not name.startswith("refused")])
def test_sliders_agree_with_the_command_line_to_the_byte(page: OpenPage, name: str) -> None:
    opened, draw = page(SPECS[name]), random.Random(name)
    first = opened.answer()
    assert first["ledger"] == driver.answer(opened.spec).document()["ledger"]
    seen = set()
    for _ in range(_SETTINGS_EACH):
        for knob in _KNOBS:
            choices = opened.answer()["choices"][knob]
            if choices:
                opened.move(knob, draw.choice(choices))
        answer = opened.answer()
        settings = answer["settings"]
        document = explained(opened, settings)
        assert document["ledger"] == answer["ledger"], settings
        assert without_drive(document["plan"]["settings"]) == without_drive(settings)
        # Rates are floats in both; Python and the page may differ in the last printed digit.
        for part, seconds in document["clock"].items():
            if isinstance(seconds, float) and not part.startswith("total"):
                assert answer["clock"][part] == pytest.approx(seconds, rel=1e-6, abs=2e-6), part
        assert settings["global_batch_size"] == first["settings"]["global_batch_size"]
        seen.add((settings["world_size"], settings["micro_batch_size"], settings["max_length"]))
    assert len(seen) > _SETTINGS_EACH // 2
    opened.run("document.getElementById('reset').click()")
    assert opened.answer()["ledger"] == first["ledger"]
    assert opened.complaints() == []


def test_the_nearest_configuration_of_a_refusal_can_be_varied(page: OpenPage) -> None:
    opened = page(SPECS["refused-7b"])
    assert opened.answer()["ledger"] == driver.answer(opened.spec).document()["ledger"]
    text = opened.run("return document.body.innerText")
    assert "DOES NOT FIT:" in text
    assert "One of these changes alone makes it fit" in text
    assert "over the budget" in opened.run("return document.getElementById('whatif-verdict').textContent")


def test_nothing_is_requested_and_nothing_complains(page: OpenPage) -> None:
    opened = page(SPECS["lora-7b"])
    assert opened.complaints() == []
    asked = opened.requests()
    assert [address for address in asked if not address.startswith(("file:", "data:"))] == []
    assert len([address for address in asked if address.startswith("file:")]) == 1


def test_the_policy_of_the_page_stops_requests(page: OpenPage) -> None:
    opened = page(SPECS["lora-7b"])
    script = "const done = arguments[0]; fetch('http://127.0.0.1:9/').then(() => done('sent'), e => done(String(e)))"
    assert "TypeError" in opened.browser.execute_async_script(script)
    assert any("Content Security Policy" in line for line in opened.complaints())


def test_sliders_answer_to_the_keyboard(page: OpenPage) -> None:
    opened = page(SPECS["lora-7b"])
    opened.device(1100, 900)
    keys = ActionChains(opened.browser)
    keys.send_keys(Keys.TAB).perform()
    assert opened.run("return document.activeElement.className") == "skip"
    keys.send_keys(Keys.ENTER).perform()
    assert opened.run("return document.activeElement.id") == "main"
    for _ in range(20):
        if opened.run("return document.activeElement.id") == "knob-micro_batch_size":
            break
        ActionChains(opened.browser).send_keys(Keys.TAB).perform()
    assert opened.run("return document.activeElement.id") == "knob-micro_batch_size"
    assert opened.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    start = opened.answer()
    before, size = start["ledger"]["gpu"]["required_bytes"], start["settings"]["micro_batch_size"]
    ActionChains(opened.browser).send_keys(Keys.ARROW_RIGHT).perform()
    after = opened.answer()
    assert after["settings"]["micro_batch_size"] == 2 * size
    assert after["ledger"]["gpu"]["required_bytes"] > before
    assert opened.run("return document.activeElement.getAttribute('aria-valuetext')") == f"{2 * size} samples"
    ActionChains(opened.browser).send_keys(Keys.END).perform()
    assert opened.answer()["settings"]["micro_batch_size"] == 16
    ActionChains(opened.browser).send_keys(Keys.HOME).perform()
    assert opened.answer()["settings"]["micro_batch_size"] == 1


def test_every_part_has_a_name_that_can_be_read_out(page: OpenPage) -> None:
    opened = page(SPECS["zero-8b"])
    assert opened.run("return [...document.querySelectorAll('input')].filter(i => !i.labels.length).length") == 0
    assert opened.run("return document.documentElement.lang") == "en"
    unnamed = "return [...document.querySelectorAll('canvas')].filter(c => !c.getAttribute('aria-label')).length"
    assert opened.run(unnamed) == 0
    headless = (
        "return [...document.querySelectorAll('table')].filter(t => !t.querySelector('thead th[scope=col]')).length"
    )
    assert opened.run(headless) == 0
    rows = "return [...document.querySelectorAll('tbody tr')].filter(r => !r.querySelector('th[scope=row]')).length"
    assert opened.run(rows) == 0
    levels = opened.run("return [...document.querySelectorAll('h1,h2,h3')].map(h => h.tagName)")
    assert levels.count("H1") == 1
    ids = opened.run("return [...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", ["lora-7b", "zero-8b", "refused-7b"])
def test_a_phone_scrolls_in_one_direction_only(page: OpenPage, name: str) -> None:
    opened = page(SPECS[name])
    opened.device(360, 740)
    # Charts follow the width once the browser has told them of it.
    narrow = "return [...document.querySelectorAll('canvas')].every(c => c.getBoundingClientRect().right <= 361)"
    WebDriverWait(opened.browser, 10).until(lambda _: opened.run(narrow))
    assert opened.run("return document.documentElement.scrollWidth") <= 360
    wide = """return [...document.querySelectorAll('body *')].filter(e =>
        !e.closest('.scroll') && !e.matches('.skip') && e.getBoundingClientRect().right > 361).length"""
    assert opened.run(wide) == 0
    assert (
        opened.run("return Math.min(...[...document.querySelectorAll('#knobs input')].map(i => i.clientHeight))") >= 36
    )
    opened.device(1100, 900)


_CONTRAST = """
const rgb = (c) => c.match(/[\\d.]+/g).slice(0, 3).map(Number);
const lum = (c) => rgb(c).map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
  .reduce((s, v, i) => s + v * [.2126, .7152, .0722][i], 0);
const behind = (e) => { for (; e; e = e.parentElement) {
  const c = getComputedStyle(e).backgroundColor; if (!/, 0\\)$/.test(c) && c !== 'transparent') return c; } };
return [...document.querySelectorAll('h1, h2, p, li, th, td, label, output, button, caption, summary, strong')]
  .filter(e => e.textContent.trim() && e.getClientRects().length && !e.matches('.quiet')).map(e => {
    const [a, b] = [lum(getComputedStyle(e).color), lum(behind(e))].sort((x, y) => y - x);
    return [(a + .05) / (b + .05), e.tagName + ' ' + e.textContent.slice(0, 40)]; })
  .sort((x, y) => x[0] - y[0])[0];
"""


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read_in_both_colour_schemes(page: OpenPage, dark: bool) -> None:
    opened = page(SPECS["refused-7b"])
    opened.device(1100, 900, dark=dark)
    ratio, where = opened.run(_CONTRAST)
    assert ratio >= 4.5, where
    background = opened.run("return getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(20, 22, 26)") == dark
    opened.device(1100, 900)


def test_paper_gets_neither_sliders_nor_shades(page: OpenPage) -> None:
    opened = page(SPECS["lora-7b"])
    opened.device(1100, 900, dark=True, media="print")
    assert opened.run("return getComputedStyle(document.getElementById('knobs')).display") == "none"
    assert opened.run("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert opened.run("return Chart.getChart('chart-memory').options.scales.y.ticks.color") == "#000"
    opened.device(1100, 900)


def test_names_from_the_spec_stay_text(page: OpenPage, tmp_path: Path) -> None:
    """A file and a model folder whose names are HTML and script: shown as they are, never run."""
    name = """<img src=x onerror="window.hacked=1">'"&<!--<script>"""
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 1024, '
        '"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 4, "vocab_size": 32000, '
        '"max_position_embeddings": 4096, "tie_word_embeddings": false, "torch_dtype": "bfloat16"}',
        encoding="utf-8",
    )
    spec = yaml.safe_load(SPECS["tied-135m"]) | {"model": str(folder)}
    opened = page(yaml.safe_dump(spec), f"{name}.yaml")
    assert opened.run("return window.hacked === undefined && document.images.length === 0")
    assert name in opened.run("return document.querySelector('h1').textContent")
    assert f"{name}.yaml" in opened.run("return document.title")
    assert opened.complaints() == []
