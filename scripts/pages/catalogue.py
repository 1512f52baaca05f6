"""The catalogue as tables: every GPU and every model, from the files in specs/."""

from __future__ import annotations

from memc.facts import architecture_keys, gpu_rows, ledger_described, model_rows
from memc.units import GIB

from pages.text import table


def gpu_table() -> str:
    """Returns one line for each card; a dash is a figure that is not known."""
    rows = []
    for row in gpu_rows():
        facts = row.facts
        precision = "bf16" if facts.bf16 else "fp16"
        rows.append(
            [
                f"`{row.key}`",
                row.name,
                None if facts.capacity_bytes is None else f"{facts.capacity_bytes / GIB:.2f}",
                precision,
                _tera(facts.peak_flops_per_second.get(precision)),
                _tera(facts.achieved_flops_per_second.get(precision)),
                _giga(facts.memory_bytes_per_second),
                _giga(facts.nvlink_bytes_per_second),
                None if facts.usd_per_hour is None else f"{facts.usd_per_hour:.2f}",
                facts.checked,
            ]
        )
    columns = ["key", "name", "GiB", "precision", "peak TFLOP/s", "achieved TFLOP/s", "HBM GB/s", "NVLink GB/s"]
    numeric = ["GiB", *columns[4:], "$/h"]
    return f"{len(rows)} cards.\n\n" + table([*columns, "$/h", "checked"], rows, numeric)


def model_table() -> str:
    """Returns one line for each model."""
    rows = [
        [f"`{row.key}`", row.model_type, f"{row.params:,}", row.priced, row.verified, ", ".join(row.aliases)]
        for row in model_rows()
    ]
    priced = sum(row.priced for row in model_rows())
    columns = ["key", "model_type", "parameters", "priced", "verified", "also known as"]
    return f"{len(rows)} models, {priced} of them priced.\n\n" + table(columns, rows, ["parameters"])


def unpriced_sentence() -> str:
    """Returns which of the described families the ledger cannot price, as a sentence."""
    families = architecture_keys()
    unpriced = [f"`{family}`" for family in families if not ledger_described(family)]
    if not unpriced:
        return f"All {len(families)} families that memc knows are priced."
    listed = ", ".join(unpriced)
    why = "[what stands in the way](reference/models.md#what-is-not-priced-and-why)"
    return (
        f"Of {len(families)} families that memc knows, these are counted and not priced by themselves, parts of larger "
        f"models that are priced among them: {listed} ({why})."
    )


def _tera(value: float | None) -> str | None:
    return None if value is None else f"{value / 1e12:.1f}"


def _giga(value: float | None) -> str | None:
    return None if value is None else f"{value / 1e9:,.0f}"
