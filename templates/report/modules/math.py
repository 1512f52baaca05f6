"""The part of the standard library's math that the ledger and the clock may use, for a page."""

inf = float("inf")


def ceil(value):
    """Returns the smallest integer not below `value`."""
    whole = int(value)
    return whole + 1 if whole < value else whole


def floor(value):
    """Returns the largest integer not above `value`."""
    whole = int(value)
    return whole - 1 if whole > value else whole


def prod(values):
    """Returns the product of `values`."""
    result = 1
    for value in values:
        result = result * value
    return result
