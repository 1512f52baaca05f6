"""Answers the sliders of a page: settings in, the priced configuration as JSON text out."""

from browser import window
from memc.whatif import answered, what_if
from question import QUESTION

_question = what_if(QUESTION)


def _text(value):
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return window.JSON.stringify(str(value))
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ",".join([_text(key) + ":" + _text(item) for key, item in value.items()]) + "}"
    return "[" + ",".join([_text(item) for item in value]) + "]"


def price(cards, micro_batch_size, max_length, lora_rank):
    """Returns what `memc.whatif.answered` does, as JSON text."""
    knobs = {
        "cards": int(cards),
        "micro_batch_size": int(micro_batch_size),
        "max_length": int(max_length),
        "lora_rank": int(lora_rank),
    }
    return _text(answered(_question, knobs))


window.memcPrice = price
