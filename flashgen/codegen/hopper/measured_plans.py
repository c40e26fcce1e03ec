"""Hopper's default plans: the fastest of those measured on an H200, by head dim and by what a variant asks for."""

from __future__ import annotations

from functools import partial
from typing import Literal

from flashgen.codegen.demand import Demand, Weight, demand_of, is_clipped
from flashgen.codegen.hopper.pages import has_small_pages
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.targets import Target
from flashgen.codegen.tiling import padded
from flashgen.language.spec import AttentionSpec

Kind = Literal[
    "full", "ranges", "scores", "lists", "costly", "dropout", "tables", "clipped", "ids", "batched", "arrays"
]
"""What a variant has beside scores, probabilities and output, from few registers to many: nothing; a mask of few
operations; a score function of few; a mask whose tiles are listed; many operations; dropout; an array that a score
reads by q - k, also one of which most tiles read one element; one that a mask reads, of one axis or of more; arrays
read anew for each score, or by blocks."""

_Plan, _Turn = HopperPlan, partial(HopperPlan, takes_turns=True)

# By the wider of the padded dims, up to which a column holds. Of 16384 tokens, bfloat16, in turn with each other; none
# of them spills, but for 56 bytes of a clipped bias under a causal mask at 64, where (3, 96), without, is 3% slower.
_WIDTHS = (64, 128, 192, 256)
# fmt: off
_MEASURED: dict[Kind, tuple[HopperPlan, ...]] = {
    "full":    (_Plan(3, 128), _Turn(3, 64),  _Plan(2, 112), _Turn(2, 64)),
    "ranges":  (_Turn(3, 128), _Plan(3, 80),  _Plan(2, 112), _Turn(2, 64)),
    "scores":  (_Turn(3, 128), _Plan(3, 80),  _Plan(2, 96),  _Turn(2, 80)),
    "lists":   (_Turn(3, 128), _Turn(2, 128), _Plan(2, 96),  _Plan(2, 64)),
    "costly":  (_Turn(2, 128), _Turn(2, 128), _Plan(2, 96),  _Plan(2, 64)),
    "dropout": (_Turn(3, 128), _Turn(3, 64),  _Turn(2, 96),  _Plan(2, 64)),
    "tables":  (_Turn(3, 128), _Turn(2, 112), _Plan(2, 96),  _Plan(2, 64)),
    "clipped": (_Turn(3, 128), _Plan(3, 80),  _Plan(2, 96),  _Plan(2, 64)),
    "ids":     (_Turn(2, 128), _Plan(2, 128), _Plan(2, 64),  _Plan(2, 32)),
    "batched": (_Turn(2, 128), _Turn(2, 96),  _Plan(2, 64),  _Plan(2, 32)),
    "arrays":  (_Turn(2, 64),  _Plan(2, 64),  _Plan(2, 64),  _Plan(2, 32)),
}
# Over pages, where a tile is copies of as many keys as divide it and a page: a tile of 80 keys over pages of 64 is
# copies of 16. Measured at 64 and 128 columns.
_OVER_PAGES: dict[Kind, tuple[HopperPlan, ...]] = {
    "full":    (_Plan(3, 128), _Turn(2, 128), _Plan(2, 64),  _Turn(2, 64)),
    "ranges":  (_Plan(3, 128), _Plan(2, 128), _Plan(2, 64),  _Turn(2, 64)),
    "scores":  (_Plan(3, 128), _Plan(2, 128), _Plan(2, 64),  _Turn(2, 64)),
}
# Of pages that are copies of 16 keys anyway: three warpgroups, of fewer keys, leave the warp that loads the registers
# to start five copies together. On an H100 four prompts of 2048 over 8192 keys take 0.92 of the time of (2, 128), 16 of
# 512 over 2048 0.94, one of 2048 1.01, one of 512, which has too few tiles for the card then, 1.27; over pages of 64 it
# is 0.97, 1.01, 1.06, 1.35.
_OVER_SMALL_PAGES = _OVER_PAGES | {"ranges": (_Plan(3, 128), _Plan(3, 80), _Plan(2, 64), _Turn(2, 64))}
# fmt: on


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
    column = next(number for number, width in enumerate(_WIDTHS) if widest <= width)
    kind = kind_of(demand_of(spec))
    if kind == "tables" and not spec.page_size and is_clipped(spec):
        kind = "clipped"
    over_pages = _OVER_SMALL_PAGES if has_small_pages(spec) else _OVER_PAGES if spec.page_size else {}
    return over_pages.get(kind, _MEASURED[kind])[column]
