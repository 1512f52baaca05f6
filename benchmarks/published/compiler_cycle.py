"""Counts the tensors that torch's compiler leaves alive until Python's collector runs.

The structure is that of Liger's preference losses: a nested function that adds up gradients of chunks is compiled anew
in each forward, and what it adds the loss to is what the autograd function returns. Run with the torch of the time::

    python benchmarks/published/compiler_cycle.py        # torch 2.5.1: weight x2, four samples x2, two samples x1

With torch 2.13 nothing is left. Needs no GPU.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

TOKENS, HIDDEN, VOCAB = 64, 64, 400
BATCHES = (2, 4, 8, 16)
RUNS = 12


class ChunkedLoss(torch.autograd.Function):
    """A head's loss whose gradients are made in forward, a chunk of two samples at a time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Returns the loss; keeps the gradients of input and weight."""
        of_weight = torch.zeros_like(weight)
        loss = torch.zeros(())

        def loss_of(chunk: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            logs = (chunk @ weight.t()).float().log_softmax(-1)
            of_labels = logs.gather(-1, labels.unsqueeze(-1)).mean()
            loss: torch.Tensor = -of_labels / (target.shape[0] // 2)  # another size of the batch is compiled again
            return loss

        def add_chunk(chunk: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            gradients, value = torch.func.grad_and_value(loss_of, argnums=(0, 1))(chunk, weight, labels)
            of_chunk: torch.Tensor = gradients[0]
            of_weight.add_(gradients[1])
            loss.add_(value)
            return of_chunk

        compiled = torch.compile(add_chunk, backend="aot_eager")
        half = len(x) // 2
        made = []
        for first, second in zip(range(half), range(half, 2 * half), strict=True):
            rows = [first, second]
            made.append(compiled(torch.cat([x[row : row + 1] for row in rows]), target[rows]))
        ctx.save_for_backward(torch.cat(made), of_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradients that forward made."""
        of_input, of_weight = ctx.saved_tensors
        return of_input, of_weight, None


def run(samples: int, *, backward: bool) -> None:
    """Runs a batch several times; everything made here goes out of scope."""
    weight = torch.nn.Parameter(torch.randn(VOCAB, HIDDEN, dtype=torch.bfloat16))
    x = torch.randn(samples, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(VOCAB, (samples, TOKENS))
    apply: Callable[..., torch.Tensor] = ChunkedLoss.apply
    for _ in range(RUNS):
        loss = apply(x, weight, target)
        if backward:
            torch.autograd.backward(loss)


def alive() -> dict[str, int]:
    """Returns how many storages of real tensors are still alive, by what they have the size of."""
    names = {2 * VOCAB * HIDDEN: "weight"} | {2 * TOKENS * HIDDEN * n: f"{n} samples" for n in BATCHES}
    found: dict[int, int] = {}
    for item in gc.get_objects():
        if type(item) not in (torch.Tensor, torch.nn.Parameter) or is_functorch_wrapped_tensor(item):
            continue
        if item.device.type == "cpu":
            storage = item.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return dict(Counter(names[size] for size in found.values() if size in names))


def main() -> None:
    """Prints what is alive after each batch, in the benchmark's order, and after a collection."""
    print(f"torch {torch.__version__}")
    for backward in (False, True):
        for samples in BATCHES:
            run(samples, backward=backward)
            print(f"{'forward and backward' if backward else 'forward'}, {samples} samples: {alive() or 'nothing'}")
    gc.collect()
    print(f"after gc.collect(): {alive() or 'nothing'}")


if __name__ == "__main__":
    main()
