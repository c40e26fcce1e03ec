"""What a variant asks of a thread beside the products: registers, and instructions for each score."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache

import sympy

from flashgen.analysis.closed_forms.distances import depends_on_difference
from flashgen.analysis.closed_forms.uniform_tiles import uniform_condition
from flashgen.codegen.expressions.operation_text import is_of_longs, is_shift_or_mask
from flashgen.codegen.visited import visited_keys
from flashgen.language.operations import HEAD, KEY, QUERY, Capture, FloorDiv, FloorMod, Load, Operation, Tanh
from flashgen.language.spec import AttentionSpec


class Weight(IntEnum):
    """How many registers a variant takes beside scores, probabilities and output, from few to many."""

    NONE = 0  # nothing but the softmax
    PLAIN = 1  # a mask of few operations
    BUSY = 2  # a short score function, divisions by powers of 2, or tiles from lists
    LOADING = 3  # an array element for each score, or for each distance q - k
    MODERATE = 4  # dropout, or a long score function
    COSTLY = 5  # divisions by other numbers
    HEAVY = 6  # an element for each score beside more, or divisions of 64 bits


_INSTRUCTIONS = (5, 5, 7, 9, 10, 14, 14)  # for each score, by weight
_PLAIN_MASK, _BUSY_SCORE = 8, 8  # operations


@dataclass(frozen=True)
class Demand:
    """What plans are chosen by, of a spec.

    Attributes:
        weight: how many registers the variant takes.
        listed: tiles of keys come from lists, as no closed form describes them.
        drops, drops_alone: there is dropout; and nothing beside it but a plain mask.
        long_score: the score function has operations of many instructions, or numbers known only at a launch.
        reads_blocks: the mask reads a table of blocks, which tiles of a width that is no power of 2 would cut across.
        mask_axes: the most axes of an array that the mask reads; 0 where it reads none.
        reads_by_head: the score function reads an array by head; reads_by_head_and_position: and by query or key, too.
    """

    weight: Weight
    listed: bool
    drops: bool
    drops_alone: bool
    long_score: bool
    reads_blocks: bool
    mask_axes: int
    reads_by_head: bool
    reads_by_head_and_position: bool

    @property
    def instructions(self) -> int:
        """For each score, beside its products and its exponential: scaling, maximum, sum, conversion; the variant's."""
        return _INSTRUCTIONS[self.weight]


@lru_cache(maxsize=128)
def demand_of(spec: AttentionSpec) -> Demand:
    """The demand of a spec."""
    mask, score = spec.mask.expression, spec.score.expression if spec.score else sympy.S.Zero
    loads = mask.atoms(Load)
    by_head = [load for load in score.atoms(Load) if load.has(HEAD)]
    return Demand(
        weight=_weight(spec),
        listed=visited_keys(spec) is None,
        drops=bool(spec.dropout),
        drops_alone=bool(spec.dropout and not spec.score and _weight(replace(spec, dropout=0.0)) <= Weight.PLAIN),
        long_score=score.has(Tanh) or any(capture.ndim == 0 for capture in score.atoms(Capture)),
        reads_blocks=any(load.has(FloorDiv) for load in loads),
        mask_axes=max((len(load.indices) for load in loads), default=0),
        reads_by_head=bool(by_head),
        reads_by_head_and_position=any(load.has(QUERY, KEY) for load in by_head),
    )


def _weight(spec: AttentionSpec) -> Weight:
    mask, score = spec.mask.expression, spec.score.expression if spec.score else sympy.S.Zero
    mask_loads, operations = _loads_per_score(mask), _operations(mask)
    if _loads_per_score(score) or (mask_loads and (spec.score or spec.dropout)):
        return Weight.HEAVY
    divisions = mask.atoms(FloorDiv, FloorMod)
    if not all(is_shift_or_mask(node) for node in divisions):
        return Weight.HEAVY if any(is_of_longs(node) for node in divisions) else Weight.COSTLY
    if spec.dropout or _operations(score) > _BUSY_SCORE:
        return Weight.MODERATE
    if mask_loads or any(load.has(QUERY, KEY) for load in score.atoms(Load)):
        return Weight.LOADING
    listed = visited_keys(spec) is None  # lists take registers of their own
    if spec.score or listed or divisions or operations > _PLAIN_MASK:
        return Weight.BUSY
    return Weight.PLAIN if operations else Weight.NONE


def _loads_per_score(expression: sympy.Basic) -> bool:
    """Whether an array is read at indices that differ between the scores of a tile, and not just by its diagonals."""
    return not all(map(depends_on_difference, expression.atoms(Load)))


def _operations(expression: sympy.Basic) -> int:
    return sum(isinstance(node, Operation) for node in sympy.preorder_traversal(expression))


def is_clipped(spec: AttentionSpec) -> bool:
    """Whether it is proven when all scores of a tile read the same elements of arrays, as most do of a clipped bias."""
    return spec.score is not None and uniform_condition(spec.score.expression) is not None


def is_power_of_2(number: int) -> bool:
    """Of a positive number."""
    return number & (number - 1) == 0


def divides_tiles(spec: AttentionSpec, tile: int, index: Operation = KEY) -> bool:
    """Whether the mask divides k, or q, by multiples of a tile's width, a power of 2: a tile has one quotient."""
    divisors = [node.args[1] for node in spec.mask.expression.atoms(FloorDiv, FloorMod) if node.args[0] == index]
    return is_power_of_2(tile) and any(isinstance(by, sympy.Integer) and by % tile == 0 for by in divisors)
