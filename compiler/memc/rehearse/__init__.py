"""The rehearsal: what was emitted runs unchanged under the CUDA build of torch, on a card that does not exist."""

from memc.rehearse.run import rehearse

__all__ = ["rehearse"]
