"""The demand of a variant: registers of a thread, and instructions per score, in addition to the matrix products."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache

import sympy

from flashgen.analysis.closed_forms.distances import depends_on_difference
from flashgen.analysis.closed_forms.uniform_tiles import uniform_condition
from flashgen.codegen.expressions.operation_text import is_64_bit, is_shift_or_mask
from flashgen.codegen.visited import visited_keys
from flashgen.language.operations import HEAD, KEY, QUERY, Capture, FloorDiv, FloorMod, Load, Operation, Tanh
from flashgen.language.spec import AttentionSpec


class Weight(IntEnum):
    """How many registers a variant needs in addition to scores, probabilities and output, in ascending order."""

    NONE = 0  # softmax only
    PLAIN = 1  # a mask of few operations
    BUSY = 2  # a short score function, divisions by powers of 2, or tiles from lists
    LOADING = 3  # the mask loads an array element per score, or the score function one per distance q - k
    MODERATE = 4  # dropout, or a long score function
    COSTLY = 5  # divisions by other numbers
    HEAVY = 6  # an element per score for the score function, or for the mask beside one or dropout; 64-bit divisions


_INSTRUCTIONS = (5, 5, 7, 9, 10, 14, 14)  # per score, by weight
_PLAIN_MASK, _BUSY_SCORE = 8, 8  # operations


@dataclass(frozen=True)
class Demand:
    """The properties of a spec by which plans are chosen.

    Attributes:
        weight: How many registers the variant needs.
        listed: Whether tiles of keys are read from lists, because no closed form describes them.
        drops: Whether there is dropout.
        drops_alone: Whether there is dropout, without a score function, and with a plain mask or none.
        long_score: Whether the score function has operations of many instructions, or scalars known only at launch.
        reads_blocks: Whether the mask reads a table of blocks. Tiles straddle these blocks unless their width is a
            power of 2.
        mask_axes: The maximum number of axes of an array that the mask reads; 0 if it reads none.
        reads_by_head: Whether the score function reads an array by head.
        reads_by_head_and_position: Whether it reads one by head and by query or key.
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
        """Estimated instructions per score, without matrix products and the exponential."""
        return _INSTRUCTIONS[self.weight]


@lru_cache(maxsize=128)
def demand_of(spec: AttentionSpec) -> Demand:
    """Returns the demand of a spec."""
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
        return Weight.HEAVY if any(is_64_bit(node) for node in divisions) else Weight.COSTLY
    if spec.dropout or _operations(score) > _BUSY_SCORE:
        return Weight.MODERATE
    if mask_loads or any(load.has(QUERY, KEY) for load in score.atoms(Load)):
        return Weight.LOADING
    listed = visited_keys(spec) is None  # reading lists takes registers
    if spec.score or listed or divisions or operations > _PLAIN_MASK:
        return Weight.BUSY
    return Weight.PLAIN if operations else Weight.NONE


def _loads_per_score(expression: sympy.Basic) -> bool:
    """Whether an array is read at indices that depend on more than the distance q - k within a tile."""
    return not all(map(depends_on_difference, expression.atoms(Load)))


def _operations(expression: sympy.Basic) -> int:
    return sum(isinstance(node, Operation) for node in sympy.preorder_traversal(expression))


def is_clipped(spec: AttentionSpec) -> bool:
    """Whether a condition tells when all scores of a tile read the same elements, as with a clipped relative bias."""
    return spec.score is not None and uniform_condition(spec.score.expression) is not None


def is_power_of_2(number: int) -> bool:
    """Whether a positive number is a power of 2."""
    return number & (number - 1) == 0


def divides_tiles(spec: AttentionSpec, tile: int, index: Operation = KEY) -> bool:
    """Whether the mask divides `index` by a multiple of a tile width that is a power of 2: a tile has one quotient."""
    divisors = [node.args[1] for node in spec.mask.expression.atoms(FloorDiv, FloorMod) if node.args[0] == index]
    return is_power_of_2(tile) and any(isinstance(by, sympy.Integer) and by % tile == 0 for by in divisors)
