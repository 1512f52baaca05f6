"""A headless Chromium that no page can reach the network from, and pages to open in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from memc import driver
from memc.page import report_page
from openpage import OpenPage
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1100,900",
)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("needs chromium and chromedriver: make browser")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*_FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Service(chromedriver))
    yield chrome
    chrome.quit()


@pytest.fixture(scope="session")
def page(browser: webdriver.Chrome, tmp_path_factory: pytest.TempPathFactory) -> OpenPage:
    """Returns a function that writes the report of a spec (text, and its file's name) and opens it."""
    browser.get("about:blank")
    return OpenPage(browser, tmp_path_factory.mktemp("pages"), _written)


def _written(spec: Path) -> Path:
    solved = driver.answer(spec)
    html = spec.with_name("report.html")
    html.write_text(report_page(solved.result, solved.loaded.spec), encoding="utf-8")
    return html
