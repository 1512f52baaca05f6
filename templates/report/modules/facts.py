"""Stands for memc.facts: a page carries the facts it needs, so there is nothing to load."""

from memc.facts.records import GpuFacts  # noqa: F401


def load_fact(key):
    """Raises: the facts of a page are in its own data."""
    raise LookupError(key)


def gpu_rows():
    """Raises: a page has one card."""
    raise LookupError
