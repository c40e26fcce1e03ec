"""How a kernel divides its work: tile sizes, warps, stages. A plan is chosen by spec and target, never by lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace

import sympy

from flashgen.analysis.closed_forms.tile_ranges import key_range
from flashgen.codegen.expressions.operation_text import is_of_longs, is_shift_or_mask
from flashgen.codegen.targets import Target
from flashgen.errors import UnsupportedError
from flashgen.language.operations import KEY, QUERY, FloorDiv, FloorMod, Load, Operation, Sub
from flashgen.language.spec import AttentionSpec

WARP = 32
MMA_ROWS = 16
MOST_THREADS = 1024  # of a block
MMA_DEPTH = 16
DROPOUT_COLUMNS = 32  # that one call of the generator serves
RESERVED_SHARED = 1024  # bytes of each block's shared memory that the system takes


def padded(width: int) -> int:
    """A head dimension rounded up to the depth of an mma: what a row takes in shared memory, in elements."""
    return -(-width // MMA_DEPTH) * MMA_DEPTH


@dataclass(frozen=True)
class ForwardPlan:
    """The forward kernel's plan.

    Attributes:
        tile_q: queries of a tile; each warp owns tile_q / warps rows of it.
        tile_k: keys of a tile.
        warps: warps of a thread block.
        stages: tiles of K, and of V, that shared memory holds at once.
        blocks: thread blocks that should fit on a multiprocessor, which caps their registers.
    """

    tile_q: int
    tile_k: int
    warps: int
    stages: int = 1
    blocks: int = 1

    @property
    def threads(self) -> int:
        return self.warps * WARP

    def summary(self, spec: AttentionSpec) -> str:
        """One line for the kernel's header."""
        return (
            f"{self.tile_q} queries x {self.tile_k} keys, {self.warps} warps, {self.stages} stage(s) of K and V, "
            f"{self.blocks} block(s) per multiprocessor, {self.shared_bytes(spec)} bytes of shared memory"
        )

    def shared_bytes(self, spec: AttentionSpec) -> int:
        """Dynamic shared memory of a block: Q, the stages of K and V; the output reuses it at the end."""
        head, value = padded(spec.head_dim), padded(spec.value_dim)
        tiles = self.tile_q * head + self.stages * self.tile_k * (head + value)
        return 2 * max(tiles, self.tile_q * value)

    def problem(self, spec: AttentionSpec, target: Target) -> str | None:
        """Why the plan contradicts itself, or does not fit the spec or the target; None where it does."""
        if min(self.tile_q, self.tile_k, self.warps, self.blocks) < 1 or self.threads > MOST_THREADS:
            return f"its numbers must be positive, and its warps at most {MOST_THREADS // WARP}"
        if self.tile_q % self.warps or self.tile_q // self.warps % MMA_ROWS:
            return f"tile_q={self.tile_q} must be a multiple of 16 x warps={self.warps}"
        if self.tile_k % MMA_DEPTH or (spec.dropout and self.tile_k % DROPOUT_COLUMNS):
            return f"tile_k={self.tile_k} must be a multiple of 16, of 32 with dropout"
        if self.stages not in (1, 2):
            return f"stages={self.stages} must be 1 or 2"
        if self.stages == 2 and not target.asynchronous_copies:
            return f"stages=2 needs asynchronous copies, which {target.name} has not"
        if self.shared_bytes(spec) > target.shared_per_block:
            return (
                f"it takes {self.shared_bytes(spec)} bytes of shared memory and a block of {target.name} has "
                f"{target.shared_per_block}: take smaller tiles or fewer stages"
            )
        return None

    def check(self, spec: AttentionSpec, target: Target) -> None:
        """UnsupportedError where there is a problem."""
        problem = self.problem(spec, target)
        if problem:
            raise UnsupportedError(f"{self}: {problem}")


# (tile_q, tile_k, warps, stages) in the order of preference: by speed on an H200, then by what smaller GPUs hold.
_PREFERENCE = (
    (128, 128, 4, 2),
    (128, 64, 4, 2),
    (128, 48, 4, 2),
    (128, 32, 4, 2),
    (64, 64, 4, 1),
    (128, 64, 8, 2),
    (64, 64, 4, 2),
    (128, 64, 8, 1),
    (128, 64, 4, 1),
    (128, 32, 4, 1),
    (64, 32, 4, 1),
)
_MOST_BLOCKS = 2
_WARPS_TO_HIDE_LATENCY = 8  # on a multiprocessor

# What a thread can hold without spilling, by how much the variant itself needs: registers that accumulate scores and
# output, and the scores among them (an array element loaded per score takes several registers of its own). Held by a
# test that compiles every kind of spec for every target. sm_90's assembler needs fewer registers for all else, but not
# where K's and V's rows differ in length: each has its own offsets then.
_ACCUMULATORS = {"none": 160, "plain": 160, "busy": 160, "loading": 160, "moderate": 160, "costly": 160, "heavy": 96}
_ACCUMULATORS_SM_90 = _ACCUMULATORS | {"none": 192, "plain": 176, "busy": 176}
# Dropout takes more beside many scores, or beside a score function or a mask that is not plain.
_ACCUMULATORS_WITH_DROPOUT, _SCORES_WITH_DROPOUT = 128, 32
_NEEDS_MORE = 100  # whose assembler takes more registers for the same text, and GPUs after it
_SCORES = {"none": 128, "plain": 128, "busy": 64, "loading": 48, "moderate": 64, "costly": 32, "heavy": 32}
_PLAIN_MASK, _BUSY_SCORE = 8, 8  # operations
_KEPT_HEAD_DIM = 32
_WIDE_TILE = 64  # keys: a mask that divides k by multiples of so many is cheaper in tiles that fit them


def _loads_per_score(expression: sympy.Basic) -> bool:
    """Whether an array is read at indices that differ between the scores of a tile, and not just by its diagonals."""
    distance = sympy.Symbol("distance", integer=True)
    straight = {Sub(KEY, QUERY): distance, Sub(QUERY, KEY): distance}
    return any(load.xreplace(straight).has(QUERY, KEY) for load in expression.atoms(Load))


def weight(spec: AttentionSpec) -> str:
    """How many registers the variant needs beside the accumulators."""
    mask, score = spec.mask.expression, spec.score.expression if spec.score else sympy.S.Zero
    mask_loads, operations = _loads_per_score(mask), _operations(mask)
    if _loads_per_score(score) or (mask_loads and (spec.score or spec.dropout)):
        return "heavy"
    divisions = mask.atoms(FloorDiv, FloorMod)
    if not all(is_shift_or_mask(node) for node in divisions):
        return "heavy" if any(is_of_longs(node) for node in divisions) else "costly"
    if spec.dropout or _operations(score) > _BUSY_SCORE:
        return "moderate"
    if mask_loads or any(load.has(QUERY, KEY) for load in score.atoms(Load)):
        return "loading"
    listed = key_range(mask) is None  # lists take registers of their own
    if spec.score or listed or divisions or operations > _PLAIN_MASK:
        return "busy"
    return "plain" if operations else "none"


def _operations(expression: sympy.Basic) -> int:
    return sum(isinstance(node, Operation) for node in sympy.preorder_traversal(expression))


def reads_blocks(spec: AttentionSpec) -> bool:
    """Whether the mask reads a table of blocks, which tiles of a width that is no power of 2 would cut across."""
    return any(load.has(FloorDiv) for load in spec.mask.expression.atoms(Load))


def _is_power_of_2(number: int) -> bool:
    return number & (number - 1) == 0


def divides_tiles(spec: AttentionSpec, tile_k: int) -> bool:
    """Whether the mask divides k by multiples of a tile's width, a power of 2: a tile has one quotient."""
    divisors = [node.args[1] for node in spec.mask.expression.atoms(FloorDiv, FloorMod) if node.args[0] == KEY]
    return _is_power_of_2(tile_k) and any(isinstance(by, sympy.Integer) and by % tile_k == 0 for by in divisors)


def _accumulators(plan: ForwardPlan, spec: AttentionSpec) -> tuple[int, int]:
    """Registers of a thread that hold scores, and scores and output: its warp's rows over 32 lanes.

    Queries of few mma depths stand beside the output: the compiler keeps in registers what every step reads again.
    """
    rows, head = plan.tile_q // plan.warps, padded(spec.head_dim)
    kept = head if head < _KEPT_HEAD_DIM else 0
    return rows * plan.tile_k // WARP, rows * (plan.tile_k + padded(spec.value_dim) + kept) // WARP


def _candidates(spec: AttentionSpec, target: Target) -> list[ForwardPlan]:
    """The preferred plans that the target has the shared memory for; those that hide latency come first."""
    fitting = []
    for tile_q, tile_k, warps, stages in _PREFERENCE:
        plan = ForwardPlan(tile_q, tile_k, warps, stages)
        cuts_across = not _is_power_of_2(tile_k) and (reads_blocks(spec) or divides_tiles(spec, _WIDE_TILE))
        if plan.problem(spec, target) is None and not cuts_across:
            per_block = plan.shared_bytes(spec) + RESERVED_SHARED
            blocks = min(target.shared_per_multiprocessor // per_block, _WARPS_TO_HIDE_LATENCY // warps, _MOST_BLOCKS)
            fitting.append(replace(plan, blocks=max(blocks, 1)))
    return sorted(fitting, key=lambda plan: plan.blocks * plan.warps < _WARPS_TO_HIDE_LATENCY)


def choose_forward_plan(spec: AttentionSpec, target: Target) -> ForwardPlan:
    """The default plan of a spec on a target: the first preferred one whose accumulators leave registers to spare."""
    candidates = _candidates(spec, target)
    for plan in candidates:
        if _leaves_registers(plan, spec, target):
            return plan
    return min(candidates, key=lambda plan: _accumulators(plan, spec)[1])


def _leaves_registers(plan: ForwardPlan, spec: AttentionSpec, target: Target) -> bool:
    """Whether a thread has registers to spare for what the variant needs."""
    heaviness, (scores, accumulators) = weight(spec), _accumulators(plan, spec)
    lean = target.compute_capability == 90 and padded(spec.head_dim) == padded(spec.value_dim)
    allowance = (_ACCUMULATORS_SM_90 if lean else _ACCUMULATORS)[heaviness]
    most_scores = _SCORES[heaviness]
    crowded = spec.dropout and not _drops_alone(spec)
    if crowded and target.compute_capability >= _NEEDS_MORE:
        most_scores = min(most_scores, _SCORES_WITH_DROPOUT)
    if crowded or (spec.dropout and scores > _SCORES_WITH_DROPOUT):
        allowance = min(allowance, _ACCUMULATORS_WITH_DROPOUT)
    return accumulators <= allowance and scores <= most_scores


def _drops_alone(spec: AttentionSpec) -> bool:
    """Whether dropout is all that a spec has, but for a plain mask."""
    return spec.score is None and weight(replace(spec, dropout=0.0)) in ("none", "plain")
