"""Enumerate, cost, choose: from a spec and its facts to a plan, or to the proof that there is none."""

from memc.solver.solve import solve

__all__ = ["solve"]
