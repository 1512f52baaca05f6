"""What the lint says of files that memc never wrote: every rule and every code, from the data."""

from __future__ import annotations

from typing import Any

from memc.lint.settings import TABLES, table
from memc.rules import Rule, Severity, load_rules

from pages.codes import code_entries
from pages.text import heading
from pages.text import table as rows_of

STRANGERS = "Files that memc never wrote"


def lint_section() -> str:
    """Returns the codes, the rules of both files, and the versions that names were read from."""
    codes = {code: entry for code, entry in code_entries().items() if entry["area"] == STRANGERS}
    parts = [heading(2, "Contradictions, names and places")]
    parts.append(
        rows_of(["code", "what", "do"], [[f"`{c}`", e["meaning"], e["fix"]] for c, e in sorted(codes.items())])
    )
    parts.append(heading(2, "Combinations that bite"))
    rules = [rule for rule in load_rules() if rule.severity is not Severity.HANDLED]
    parts += [_rule(rule) for rule in sorted(rules, key=lambda rule: rule.id)]
    parts.append(heading(2, "Versions whose names are known"))
    parts.append(rows_of(["names of", "package", "versions that were read"], [_table(key) for key in TABLES]))
    return "\n".join(parts)


def _rule(rule: Rule) -> str:
    conditions = ", ".join(_condition(test) for test in rule.when)
    versions = "".join(f"; {package} {span}" for package, span in rule.versions.items())
    sentence = rule.sentence.replace("{", "<").replace("}", ">")
    return (
        f"### `{rule.id}` {{ #{rule.id} }}\n\n{rule.severity.capitalize()}: `{sentence}`.\n\n"
        f"**When:** {conditions}{versions}.\n\n**Do:** {rule.file_fix or rule.fix}.\n\n**Source:** {rule.source}.\n"
    )


def _condition(test: Any) -> str:
    name = f"`{test.name}`"
    if test.among:
        return f"{name} is {' or '.join(_shown(value) for value in test.among)}"
    if test.other_than is not None:
        return f"{name} is not {_shown(test.other_than)}"
    bounds = [f"at least {test.least}"] if test.least is not None else []
    bounds += [f"at most {test.most}"] if test.most is not None else []
    return f"{name} is {' and '.join(bounds)}"


def _shown(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def _table(key: str) -> list[object]:
    known = table(key)
    return [key, known.package, f"{len(known.versions)}: {known.versions[0]} to {known.versions[-1]}"]
