"""Advice: the inverse questions (how long, how large, which card) and the catalogue priced for one spec."""

from memc.advise.desk import Desk
from memc.advise.documents import solution_document, survey_document
from memc.advise.economics import Costs
from memc.advise.hardware import Survey, survey
from memc.advise.inverse import Quantity, Solution, solve_for
from memc.advise.text import solution_lines, survey_lines

__all__ = [
    "Costs",
    "Desk",
    "Quantity",
    "Solution",
    "Survey",
    "solution_document",
    "solution_lines",
    "solve_for",
    "survey",
    "survey_document",
    "survey_lines",
]
