"""Hopper's default plans: the fastest of those measured on an H200, by head dim and by what a variant asks for."""

from __future__ import annotations

from functools import partial
from typing import Literal

from flashgen.codegen.demand import Demand, Weight, demand_of
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.targets import Target
from flashgen.codegen.tiling import padded
from flashgen.language.spec import AttentionSpec

Kind = Literal["full", "ranges", "scores", "lists", "costly", "dropout", "tables", "ids", "batched", "arrays"]
"""What a variant has beside scores, probabilities and output, from few registers to many: nothing; a mask of few
operations; a score function of few; a mask whose tiles are listed; many operations; dropout; an array that a score
reads by q - k; one that a mask reads, of one axis or of more; arrays read anew for each score, or by blocks."""

_Turn = partial(HopperPlan, takes_turns=True)

# By the wider of the padded dims, up to which a row holds. Of 16384 tokens, bfloat16, in turn with each other; none of
# them spills.
_MEASURED: tuple[tuple[int, dict[Kind, HopperPlan]], ...] = (
    (
        64,
        {
            "full": HopperPlan(3, 128),
            "ranges": _Turn(3, 128),
            "scores": _Turn(3, 128),
            "lists": _Turn(3, 128),
            "costly": _Turn(2, 128),
            "dropout": _Turn(3, 128),
            "tables": _Turn(3, 128),
            "ids": _Turn(2, 128),
            "batched": _Turn(2, 128),
            "arrays": _Turn(2, 64),
        },
    ),
    (
        128,
        {
            "full": _Turn(3, 64),
            "ranges": HopperPlan(3, 80),
            "scores": HopperPlan(3, 80),
            "lists": _Turn(2, 128),
            "costly": _Turn(2, 128),
            "dropout": _Turn(3, 64),
            "tables": _Turn(2, 112),
            "ids": HopperPlan(2, 128),
            "batched": _Turn(2, 96),
            "arrays": HopperPlan(2, 64),
        },
    ),
    (
        192,
        {
            "full": HopperPlan(2, 112),
            "ranges": HopperPlan(2, 112),
            "scores": HopperPlan(2, 96),
            "lists": HopperPlan(2, 96),
            "costly": HopperPlan(2, 96),
            "dropout": _Turn(2, 96),
            "tables": HopperPlan(2, 96),
            "ids": HopperPlan(2, 64),
            "batched": HopperPlan(2, 64),
            "arrays": HopperPlan(2, 64),
        },
    ),
    (
        256,
        {
            "full": _Turn(2, 64),
            "ranges": _Turn(2, 64),
            "scores": _Turn(2, 80),
            "lists": HopperPlan(2, 64),
            "costly": HopperPlan(2, 64),
            "dropout": HopperPlan(2, 64),
            "tables": HopperPlan(2, 64),
            "ids": HopperPlan(2, 32),
            "batched": HopperPlan(2, 32),
            "arrays": HopperPlan(2, 32),
        },
    ),
)


def kind_of(demand: Demand) -> Kind:
    """The kind of a variant, by what costs it the most registers."""
    if demand.weight == Weight.HEAVY:
        return "arrays"
    if demand.weight == Weight.LOADING and demand.mask_axes:
        return "arrays" if demand.reads_blocks else "batched" if demand.mask_axes > 1 else "ids"
    if demand.weight == Weight.LOADING:
        return "tables"
    if demand.drops:
        return "dropout"
    if demand.weight in (Weight.MODERATE, Weight.COSTLY) or demand.long_score:
        return "costly"
    if demand.weight == Weight.BUSY:
        return "lists" if demand.listed else "scores"
    return "ranges" if demand.weight == Weight.PLAIN else "full"


def choose_hopper_plan(spec: AttentionSpec, target: Target) -> HopperPlan:
    """The default plan of a spec."""
    widest = max(padded(spec.value_dim), padded(spec.head_dim))
    return next(plans for width, plans in _MEASURED if widest <= width)[kind_of(demand_of(spec))]
