"""What ZeRO cannot use at the end of backward and in the step: free memory in parts that are too small.

The embedding's gradient comes last in backward, in one piece, and what is free by then lies between those of layers.
The step flattens this rank's gradients and copies them into the masters' type: two tensors, each in one piece. What the
pass held is free by then, but a cuBLAS workspace of the backward's thread, which came with its first product and stays,
can cut it in two.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

HOLES = "holes"
EMBEDDING = "gradient-of-embedding"
"""Name of the embedding's gradient where it comes after those of all layers, one by one."""
WHOLE, CUT, TIGHT = "step-flat-", "step-flattened-", "step-pair-"
PART, SUB_GROUP = "step-part-", "step-sub-group-"
"""Names of the step's pieces begin with it: of stage 1 with a plain loss and with a chunked one, of stage 2 on two
ranks with a chunked one or a large embedding, of stage 2 otherwise, of stage 3.

In stage 1 they have the place of the whole flat copy of initialisation, and gradients of the pass that of the weights
before they were flattened, which is as large as all flat gradients. On two ranks, of which alone the step is the
largest moment, a piece that this holds leaves as much unused as it takes; the workspace cuts it where the loss is
chunked, whose first product comes among the large blocks, and then none of it is of use. The same holds of stage 2 on
two ranks; and where a norm in fp64 had no room in it, they come where that was. Elsewhere the pieces have room behind
what the pass held, and what the workspace cuts off is a half.
"""
_LOST = {TIGHT: (2, 1), WHOLE: (1, 1), CUT: (2, 1), PART: (1, 2), SUB_GROUP: (1, 2)}
"""The most that is lost, in flat gradients, and by what the pass's memory is divided."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """What comes in one piece each; 0 bytes where there is none.

    Attributes:
        embedding: Bytes of the embedding's gradient at the end of backward.
        flat: Bytes of the step's flat gradients.
        step: Bytes of those and of their copy in the masters' type.
        kind: One of the beginnings of names.
    """

    embedding: int
    flat: int
    step: int
    kind: str


def pieces_of(entries: Iterable[tuple[str, int]]) -> Pieces | None:
    """Returns the pieces that entries, by name and bytes, book; None without any."""
    named = [(name, size) for name, size in entries if size]
    embedding = sum([size for name, size in named if name == EMBEDDING])
    for kind in _LOST:
        sizes = [size for name, size in named if name.startswith(kind)]
        if sizes:
            return Pieces(embedding, min(sizes), sum(sizes), kind)
    return Pieces(embedding, 0, 0, WHOLE) if embedding else None


def embedding_hole_bytes(before_bytes: int, bytes_with_it: int, pieces: Pieces) -> int:
    """Returns what the allocator holds beside the embedding's gradient without being able to use it for that.

    Source: torch CUDACachingAllocator.cpp (a block is one piece).

    Args:
        before_bytes: Bytes that it holds at the largest moment of the pass before.
        bytes_with_it: Bytes that it holds with the gradient.
        pieces: What comes in one piece.
    """
    return max(0, min(before_bytes - (bytes_with_it - pieces.embedding), pieces.embedding))


def step_hole_bytes(pass_bytes: int, backward_bytes: int, step_bytes: int, pieces: Pieces) -> int:
    """Returns what the allocator holds at the step without being able to use it for flat gradients.

    Never less for more: a pass that needs more memory leaves more that is free, in which a piece can have room after
    all; the most that a smaller pass loses is counted.

    Source: torch CUDACachingAllocator.cpp (a block is one piece; get_free_block, find_expandable_block); DeepSpeed
        stage_1_and_2.py step (flatten, then .to of the masters' type), stage3.py _prepare_fp32_grad_for_sub_group.

    Args:
        pass_bytes: Bytes that it holds at the largest moment of forward and backward.
        backward_bytes: Bytes that it holds when backward has come to the lowest layer, or to the embedding.
        step_bytes: Bytes that it holds at the step, the pieces included.
        pieces: What the step allocates.
    """
    most, divided = _LOST[pieces.kind]
    held = backward_bytes if pieces.kind in (WHOLE, CUT) else pass_bytes
    return max(0, min((held - (step_bytes - pieces.step)) // divided, most * pieces.flat))
