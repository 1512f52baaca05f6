"""The part of the standard library's functools that the ledger and the clock may use, for a page."""


def cache(function):
    """Returns the function with its answers kept by positional arguments."""
    kept = {}

    def answered(*arguments):
        if arguments not in kept:
            kept[arguments] = function(*arguments)
        return kept[arguments]

    return answered


def lru_cache(maxsize=None):
    """Returns `cache`, with or without a size in brackets."""
    return cache(maxsize) if callable(maxsize) else cache
