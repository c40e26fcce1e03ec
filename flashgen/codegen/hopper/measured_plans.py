"""Default plans of Hopper's forward kernel: the fastest measured on an H200, by head dim and kind of variant."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Literal

import sympy

from flashgen.codegen.demand import Demand, Weight, demand_of, is_clipped
from flashgen.codegen.expressions.row_elements import paired_elements
from flashgen.codegen.hopper.batch_traits import batch_traits
from flashgen.codegen.hopper.pages import has_small_pages
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.padding import MAX_UNSPLIT, is_wide, padded, padded_value_dim
from flashgen.codegen.targets import Target
from flashgen.language.spec import AttentionSpec

Kind = Literal[
    "full",
    "ranges",
    "scores",
    "lists",
    "costly",
    "dropout",
    "tables",
    "clipped",
    "ids",
    "batched",
    "tiles",
    "pairs",
    "arrays",
]
"""What needs registers beside scores, probabilities and output, from few to many:

full: nothing. ranges: a mask of few operations. scores: a score function of few operations. lists: a mask with tile
lists. costly: many operations. dropout: dropout. tables: an array that a score function reads by q - k. clipped: one of
which most tiles read one element. ids, batched: an array of one axis or of more that a mask reads. tiles: an array of
which a score function reads tiles in shared memory, such as a dense bias. pairs: one of 16 bits or less whose elements
are read in pairs. arrays: other arrays that are read for each score, or by blocks.
"""

_PAIRED_BYTES = 2  # of an element, for which the plans of "pairs" were measured
_Plan, _Turn = HopperPlan, partial(HopperPlan, takes_turns=True)

# Each column is for padded dims (the wider of both) up to its width. Measured alternately with 16384 tokens in
# bfloat16. None spills, except 56 bytes for a clipped bias under a causal mask at 64, and up to 48 bytes for a dense
# bias of four axes; (3, 96) and (2, 96), which spill nothing there, are 3% and 14% slower.
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
    "tiles":   (_Turn(2, 128), _Turn(2, 128), _Plan(2, 48),  _Plan(2, 32)),
    "pairs":   (_Plan(2, 128), _Turn(2, 96),  _Plan(2, 48),  _Plan(2, 32)),
    "arrays":  (_Turn(2, 64),  _Plan(2, 64),  _Plan(2, 64),  _Plan(2, 32)),
}
# With pages, a copy has as many keys as divide both the tile and a page: a tile of 80 keys over pages of 64 is loaded
# by copies of 16. Measured at 64 and 128 columns.
_WITH_PAGES: dict[Kind, tuple[HopperPlan, ...]] = {
    "full":    (_Plan(3, 128), _Turn(2, 128), _Plan(2, 64),  _Turn(2, 64)),
    "ranges":  (_Plan(3, 128), _Plan(2, 128), _Plan(2, 64),  _Turn(2, 64)),
    "scores":  (_Plan(3, 128), _Plan(2, 128), _Plan(2, 64),  _Turn(2, 64)),
}
# With small pages copies have at most 16 keys anyway. Three warpgroups with fewer keys leave the producer warp enough
# registers to start five copies together. Times on an H100 relative to (2, 128): 0.92 for four prompts of 2048 over
# 8192 keys, 0.94 for 16 of 512 over 2048, 1.01 for one of 2048, 1.27 for one of 512, which has too few tiles for the
# GPU. With pages of 64 they are 0.97, 1.01, 1.06 and 1.35.
_WITH_SMALL_PAGES = _WITH_PAGES | {"ranges": (_Plan(3, 128), _Plan(3, 80), _Plan(2, 64), _Turn(2, 64))}
# With K and V of 8 bits the producer warpgroup has more registers, and the consumers fewer.
_WITH_8_BITS: dict[Kind, tuple[HopperPlan, ...]] = {
    "full":    (_Plan(3, 96),  _Plan(2, 128), _Plan(2, 64), _Plan(2, 64)),
    "ranges":  (_Plan(3, 96),  _Plan(2, 128), _Plan(2, 64), _Plan(2, 64)),
    "scores":  (_Plan(3, 96),  _Plan(2, 112), _Plan(2, 64), _Plan(2, 48)),
    "lists":   (_Turn(2, 128), _Plan(2, 128), _Plan(2, 64), _Plan(2, 64)),
    "costly":  (_Turn(2, 128), _Plan(2, 96),  _Plan(2, 64), _Plan(2, 48)),
    "dropout": (_Turn(2, 128), _Turn(2, 96),  _Turn(2, 64), _Plan(2, 32)),
    "tables":  (_Turn(2, 128), _Turn(2, 96),  _Plan(2, 64), _Plan(2, 48)),
    "ids":     (_Turn(2, 128), _Plan(2, 96),  _Plan(2, 64), _Plan(2, 32)),
    "batched": (_Plan(2, 96),  _Plan(2, 80), _Plan(2, 64), _Plan(2, 32)),
    "pairs":   (_Plan(2, 128), _Turn(2, 96),  _Plan(2, 48), _Plan(2, 32)),
    "arrays":  (_Turn(2, 64),  _Plan(2, 64),  _Plan(2, 64), _Plan(2, 32, 3)),
}
# fmt: on
_NARROW, _NARROW_TILES = 32, _Plan(3, 128)  # columns of rows so narrow, and their plan of the kind "tiles"
_WIDE_KEYS = (64, 48, 32)  # of a tile, for rows of more than 256 columns, in order of preference
# More keys, for tiles in parts that leave room, by the columns of V. Measured with full and causal masks on an H200.
_MORE_WIDE_KEYS: dict[int, tuple[int, ...]] = {320: (96, 80), 384: (80,), 448: (80,)}
_MAX_WIDE_KEYS: dict[Kind, int] = {"costly": 48, "arrays": 32}  # of a tile, without spills; 64 for other kinds


def kind_of(demand: Demand) -> Kind:
    """Returns the kind of a variant, by what needs the most registers."""
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
    """Returns the default plan of a spec."""
    if is_wide(spec):
        return _wide_plan(spec, target)
    widest = max(padded(spec.value_dim), padded(spec.head_dim))
    column = next(number for number, width in enumerate(_WIDTHS) if widest <= width)
    kind = kind_of(demand_of(spec))
    if kind == "tables" and not spec.of_cache and is_clipped(spec):
        kind = "clipped"
    if kind == "arrays" and any(element.bytes <= _PAIRED_BYTES for element in paired_elements(spec)):
        tiles = not spec.kv_dtype and _MEASURED["tiles"][column].array_stages(spec)
        kind = "tiles" if tiles else "pairs"
    unmasked = spec.mask.expression == sympy.true and batch_traits(spec).spares_registers
    if kind == "tiles" and widest <= _NARROW and unmasked:
        return _NARROW_TILES
    if spec.kv_dtype:
        return _WITH_8_BITS[kind][column]
    over_pages = _WITH_SMALL_PAGES if has_small_pages(spec) else _WITH_PAGES if spec.page_size else {}
    return over_pages.get(kind, _MEASURED[kind])[column]


def wide_keys(spec: AttentionSpec) -> list[int]:
    """Returns the keys of a tile for rows of more than 256 columns, in order of preference."""
    limit = _MAX_WIDE_KEYS.get(kind_of(demand_of(spec)), 64)
    return [keys for keys in _WIDE_KEYS if keys <= limit]


def _wide_plan(spec: AttentionSpec, target: Target) -> HopperPlan:
    """Returns the default plan for rows of more than 256 columns: the first that fits shared memory."""
    split = 2 if padded_value_dim(spec) > MAX_UNSPLIT else 1
    more = [HopperPlan(2, keys, 1, split=split) for keys in _MORE_WIDE_KEYS.get(padded_value_dim(spec), ())]
    plans = [plan for plan in more if plan.tiles_in_parts(spec) and plan.leaves_room(spec)]
    plans += [HopperPlan(2, keys, stages, split=split) for keys, stages in product(wide_keys(spec), (2, 1))]
    return next((plan for plan in plans if not plan.problem(spec, target)), plans[-1])
