"""The page itself: content, style and scripts in one HTML document that opens from a file and fetches nothing."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import memc
from memc.page.bundle import packed_modules, packed_script
from memc.page.content import content
from memc.page.question import knobs, question
from memc.plan import Infeasible, Plan
from memc.render.environment import environment
from memc.resources import templates_root
from memc.spec import Spec


def report_page(answer: Plan | Infeasible, spec: Spec) -> str:
    """Returns the report of a plan or a refusal as one HTML document.

    Everything that comes from the spec is escaped; a policy in the page forbids every request.
    """
    style, script = _text("report.css"), _text("report.js")
    shown = content(answer)
    template = environment().overlay(autoescape=True).get_template("report/report.html.j2")
    return template.render(
        **shown,
        version=memc.__version__,
        knobs=knobs(answer),
        policy=_policy(script, style),
        style=style,
        script=script,
        data=script_json({**shown["charts"], "knobs": knobs(answer)}),
        chart=packed_script("chart"),
        brython=packed_script("brython"),
        modules=packed_modules({"question": f"QUESTION = {question(answer, spec)!r}\n"}),
    )


def script_json(value: Any) -> str:
    """Returns JSON that can stand inside a script element: no text in it can close the element or start another."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _policy(script: str, style: str) -> str:
    """Returns the content security policy: this script, this style, and nothing from anywhere.

    Brython compiles Python to JavaScript and evaluates it, which the policy has to name.
    """
    return (
        f"default-src 'none'; script-src '{_hash(script)}' 'unsafe-eval'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _text(name: str) -> str:
    return templates_root().joinpath("report", name).read_text(encoding="utf-8")
