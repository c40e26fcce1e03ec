"""Random variants against a reference of their own: `flashgen verify --random`.

A case is drawn from one integer: a mask and a score function of a grammar over the whole language, captures and
numbers at the ends of their types, calls, a target (`draw`). Its predicates are compared with brute force, its kernels
with standard attention written once more (`meaning`, `standard`), in a process of its own (`runner`); what fails is
made small (`shrink`).
"""

from flashgen.verify.random.check import check
from flashgen.verify.random.draw import Options, recipe_of, targets_of_gpu
from flashgen.verify.random.outcome import KINDS, Outcome
from flashgen.verify.random.recipe import Recipe
from flashgen.verify.random.report import Summary, command, finding_text
from flashgen.verify.random.runner import Result, run

__all__ = [
    "KINDS",
    "Options",
    "Outcome",
    "Recipe",
    "Result",
    "Summary",
    "check",
    "command",
    "finding_text",
    "recipe_of",
    "run",
    "targets_of_gpu",
]
