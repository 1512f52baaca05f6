"""Opening reports in a browser and asking them questions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

SPECS = {
    "lora-7b": """
model: Qwen/Qwen2.5-7B-Instruct
data: {train: train.jsonl, eval: eval.jsonl, max_length: 4096, samples: 10000, mean_tokens: 900}
method: lora
training: {epochs: 3, global_batch_size: 16}
hardware: {gpu: rtx-4090, count: 1, host_memory: 64GiB}
""",
    "zero-8b": """
model: meta-llama/Llama-3.1-8B
data: {train: train.jsonl, max_length: 4096, packing: true, samples: 200000, mean_tokens: 800}
method: full
training: {epochs: 2, global_batch_size: 64}
hardware: {gpu: h100-sxm5-80gb, count: 8, host_memory: 1TiB}
""",
    "qlora-14b": """
model: Qwen/Qwen2.5-14B-Instruct
data: {train: train.jsonl, max_length: 2048, samples: 10000, mean_tokens: 900}
method: qlora
training: {epochs: 3, global_batch_size: 24}
hardware: {gpu: rtx-4090, count: 2, host_memory: 64GiB}
""",
    "tied-135m": """
model: HuggingFaceTB/SmolLM2-135M-Instruct
task: pretrain
data: {train: train.jsonl, eval: eval.jsonl, max_length: 512, samples: 4000, mean_tokens: 200}
method: full
training: {epochs: 1, global_batch_size: 32}
hardware: {gpu: rtx-3060-12gb, count: 1, host_memory: 32GiB}
""",
    "refused-7b": """
model: Qwen/Qwen2.5-7B-Instruct
data: {train: train.jsonl, max_length: 4096, samples: 10000, mean_tokens: 900}
method: full
training: {epochs: 3, global_batch_size: 16}
hardware: {gpu: rtx-4090, count: 1, host_memory: 64GiB}
""",
}

_READY = "return window.memcReport ? [memcReport.ready, memcReport.failed] : [false, '']"
_MOVE = """
const knob = document.getElementById("knob-" + arguments[0]);
knob.value = memcReport.answer.choices[arguments[0]].indexOf(arguments[1]);
knob.dispatchEvent(new Event("input"));
"""


@dataclass(kw_only=True)
class Opened:
    """A report that is open and whose sliders answer."""

    browser: webdriver.Chrome
    spec: Path

    def run(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

    def answer(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run("return JSON.stringify(memcReport.answer)"))
        return found

    def move(self, knob: str, value: int) -> None:
        """Moves one slider as a hand would: to a place that it offers."""
        self.run(_MOVE, knob, value)

    def complaints(self) -> list[str]:
        return [line["message"] for line in self.browser.get_log("browser")]

    def requests(self) -> list[str]:
        """Returns the addresses that were asked for since the last call, without those of the browser itself."""
        messages = (json.loads(line["message"])["message"] for line in self.browser.get_log("performance"))
        asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [address for address in asked if not address.startswith("chrome")]

    def device(self, width: int, height: int, *, dark: bool = False, media: str = "") -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": [scheme]})


@dataclass(kw_only=False)
class OpenPage:
    """Opens the report of a spec; each is written once."""

    browser: webdriver.Chrome
    folder: Path
    write: Callable[[Path], Path]
    written: dict[str, Path] = field(default_factory=dict)

    def __call__(self, text: str, name: str = "spec.yaml") -> Opened:
        if text + name not in self.written:
            folder = self.folder / str(len(self.written))
            folder.mkdir()
            (folder / name).write_text(text, encoding="utf-8")
            self.written[text + name] = self.write(folder / name)
        html = self.written[text + name]
        self.browser.get_log("browser")
        self.browser.get_log("performance")
        self.browser.get(html.as_uri())
        WebDriverWait(self.browser, 60).until(lambda chrome: any(chrome.execute_script(_READY)))
        ready, failed = self.browser.execute_script(_READY)
        assert ready, failed
        return Opened(browser=self.browser, spec=html.parent / name)
