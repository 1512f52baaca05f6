"""What answers to several questions about one model share: frames with their memory, micro-batches with their time."""

from __future__ import annotations

from collections.abc import Hashable

from memc.clock.estimate import PassTable
from memc.ledger.estimate import Estimator
from memc.solver.enumeration import frames_of
from memc.solver.frames import Frame
from memc.solver.resolve import Question

# What techniques look at of a card; a test holds the ladder to it.
CARD_FIELDS = ("bitsandbytes", "compute_capability")


class Kept:
    """Frames and micro-batches of the questions that were asked so far.

    Cards that techniques cannot tell apart, and whose ledgers are built from the same facts, have the same frames, and
    what these need. Any number of one card computes the same micro-batch in the same time.
    """

    def __init__(self) -> None:
        self._frames: dict[Hashable, tuple[Estimator, list[Frame]]] = {}
        self._micro_batches: dict[Hashable, dict[tuple[object, ...], PassTable]] = {}

    def frames(self, question: Question, estimator: Estimator, places: dict[str, int]) -> list[Frame]:
        """Returns every frame of a question.

        Args:
            question: The question.
            estimator: That of its model and card.
            places: The rung of each technique.
        """
        situation = question.situation
        key = (
            id(estimator),  # kept beside the frames, so that no other one gets its id
            question.asked,
            question.frozen,
            question.forbidden,
            question.required,
            tuple(getattr(situation.gpu, name) for name in CARD_FIELDS),
            (situation.host_bytes, situation.nvme_bytes, situation.methods),
            (situation.lora, situation.zero, situation.fsdp),
            tuple(places.items()),
        )
        found = self._frames.get(key)
        if found is None:
            found = self._frames[key] = estimator, frames_of(question, estimator, places)
        return found[1]

    def micro_batches(self, question: Question) -> dict[tuple[object, ...], PassTable]:
        """Returns the tables of micro-batches of a question's model on its card; more may be added."""
        key = (question.model.key, question.model.source, question.gpu.key, question.asked.precision)
        return self._micro_batches.setdefault(key, {})
