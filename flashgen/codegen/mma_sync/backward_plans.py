"""Tile sizes and warps of the backward kernels. A plan depends on spec and target, never on sequence lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, TypeVar

from flashgen.analysis.closed_forms.inequalities import K_FIRST, K_LAST
from flashgen.analysis.closed_forms.tile_ranges import query_range
from flashgen.codegen.demand import Weight, demand_of
from flashgen.codegen.expressions.derivative_text import score_gradient
from flashgen.codegen.mma_sync.forward_plans import MMA_ROWS
from flashgen.codegen.padding import (
    DROPOUT_COLUMNS,
    MAX_THREADS,
    MMA_K,
    RESERVED_SHARED,
    WARP,
    element_sizes,
    head_extent,
    is_wide,
    output_gradient_extent,
    padded_head_dim,
    padded_output_gradient,
)
from flashgen.codegen.plan import Checked, shared_memory_problem, too_wide
from flashgen.codegen.shared_memory import FLOAT2, Buffer, Extent, SharedMemoryLayout
from flashgen.codegen.targets import Target
from flashgen.language.spec import AttentionSpec

AnyPlan = TypeVar("AnyPlan", "BackwardPlan", "QueriesPlan")


@dataclass(frozen=True)
class _LoopPlan:
    """The plan of a kernel in which a CTA owns a tile of queries or of keys, and loops over the tiles of the other.

    Attributes:
        tile_q: queries of a tile.
        tile_k: keys of a tile.
        warps: warps of a CTA.
        split: warps that share the same rows of scores. Each has a part of their columns, and a part of the columns of
            the gradients.
        stages: stages of the pipeline for each array that the loop reads.
        blocks: CTAs that should fit on an SM at once, which limits the registers of a thread.
    """

    tile_q: int
    tile_k: int
    warps: int
    split: int = 1
    stages: int = 2
    blocks: int = 1
    streamed: ClassVar[str]
    heads_apart: ClassVar[bool] = False
    in_turns: ClassVar[bool] = False
    persistent: ClassVar[bool] = False

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def score_columns(self) -> int:
        """The columns of a tile of scores, which the `split` warps of a group divide."""
        raise NotImplementedError

    @property
    def reads_all_scores(self) -> bool:
        """Whether a warp reads all of P and dS from shared memory, because its own part is not as deep as an mma."""
        return self.score_columns // self.split < MMA_K

    def summary(self, shared_bytes: int) -> str:
        """Returns the line that the kernel's header has about the plan."""
        shared = f", {self.split} of which share rows" if self.split > 1 else ""
        return (
            f"{self.tile_q} queries x {self.tile_k} keys, {self.warps} warps{shared}, {self.stages} stage(s) of "
            f"{self.streamed}, {self.blocks} CTA(s) per multiprocessor, {shared_bytes} bytes of shared memory"
        )


@dataclass(frozen=True)
class BackwardPlan(Checked, _LoopPlan):
    """The plan of the kernel whose CTAs loop over the queries of a tile of keys. Warps that share keys split dK and dV.

    Its fields are `tile_q`, `tile_k`, `warps`, `split`, `stages` and `blocks`.
    """

    streamed = "Q and dO"

    def head_columns(self, spec: AttentionSpec) -> int:
        """Returns the columns of a row of the dQ accumulator."""
        return padded_head_dim(spec)

    def gradient_warps(self, spec: AttentionSpec) -> tuple[int, int]:
        """Returns how many warps divide a tile of dQ along its rows and along its columns.

        As many warps take part as get equal numbers of mma tiles. Among equal counts the parts closest to square win,
        because they read the least shared memory.
        """
        rows, columns = self.tile_q // MMA_ROWS, padded_head_dim(spec) // MMA_K
        found = [
            (r, c)
            for r in range(1, self.warps + 1)
            for c in range(1, self.warps // r + 1)
            if rows % r == 0 and columns % c == 0
        ]
        return max(found, key=lambda pair: (pair[0] * pair[1], -abs(rows / pair[0] - columns / pair[1])))

    def dq_tiles_at_once(self, spec: AttentionSpec) -> int:
        """Returns how many column tiles of its part of dQ a warp accumulates at once; 0 for all of them.

        Beside the accumulators of wide dK and dV there are registers for few.
        """
        if not is_wide(spec):
            return 0
        row_warps, column_warps = self.gradient_warps(spec)
        own_rows, own_columns = self.tile_q // MMA_ROWS // row_warps, padded_head_dim(spec) // 8 // column_warps
        limit = max(_WIDE_DQ_ACCUMULATORS // (4 * own_rows), 2)
        return max(count for count in range(2, limit + 1, 2) if own_columns % count == 0)

    def shared_memory(self, spec: AttentionSpec, deterministic: bool = False) -> SharedMemoryLayout:
        """Returns the layout: K and V, the stages of Q, dO, LSE and D, then exchanged tiles of dS and P.

        dS and P are in shared memory only where a warp reads tiles of other warps. In the epilogue dK and dV overlay K
        and V.
        """
        element, kv_element = element_sizes(spec)
        queries, keys = Extent("kTileQ", self.tile_q), Extent("kTileK", self.tile_k)
        head, value, stages = head_extent(spec), output_gradient_extent(spec), Extent("kStages", self.stages)
        shared_scores = [Buffer("Score", "dS", (keys, queries), element)] if self.split > 1 or not deterministic else []
        shared_scores += [Buffer("Probability", "P", (keys, queries), element)] if self.split > 1 else []
        return SharedMemoryLayout(
            (
                Buffer("Key", "K", (keys, head), kv_element),
                *([] if spec.shared_kv else [Buffer("Value", "V", (keys, value), kv_element)]),
                Buffer("Query", "Q", (queries, head), element, copies=stages),
                Buffer("Do", "dO", (queries, value), element, copies=stages),
                Buffer("LseAndD", "L, D", (queries,), FLOAT2, copies=stages),
                *shared_scores,
                Buffer("Dk", "dK", (keys, head), element, overlays="Key"),
                *([] if spec.shared_kv else [Buffer("Dv", "dV", (keys, value), element, overlays="Value")]),
            )
        )

    @property
    def score_columns(self) -> int:
        return self.tile_q

    def problem(self, spec: AttentionSpec, target: Target, deterministic: bool = False) -> str | None:
        """Returns why the plan is inconsistent or does not fit the spec or the target; None if it is valid."""
        needed = self.shared_bytes(spec, deterministic)
        return _problem(self, ("tile_k", self.tile_k), ("tile_q", self.tile_q), needed, spec, target)


@dataclass(frozen=True)
class QueriesPlan(Checked, _LoopPlan):
    """The plan of the kernel whose CTAs loop over the keys of a tile of queries. Warps that share queries split dQ.

    Its fields are `tile_q`, `tile_k`, `warps`, `split`, `stages` and `blocks`.
    """

    streamed = "K and V"

    @property
    def score_columns(self) -> int:
        return self.tile_k

    def shared_memory(self, spec: AttentionSpec) -> SharedMemoryLayout:
        """Returns the layout: Q and dO, the stages of K and of V, and dS if warps read tiles of other warps.

        In the epilogue dQ overlays Q.
        """
        element, kv_element = element_sizes(spec)
        queries, keys = Extent("kTileQ", self.tile_q), Extent("kTileK", self.tile_k)
        head, value, stages = head_extent(spec), output_gradient_extent(spec), Extent("kStages", self.stages)
        return SharedMemoryLayout(
            (
                Buffer("Query", "Q", (queries, head), element),
                Buffer("Do", "dO", (queries, value), element),
                Buffer("Key", "K", (keys, head), kv_element, copies=stages),
                *([] if spec.shared_kv else [Buffer("Value", "V", (keys, value), kv_element, copies=stages)]),
                *([Buffer("Score", "dS", (queries, keys), element)] if self.split > 1 else []),
                Buffer("QueryGradient", "dQ", (queries, head), element, overlays="Query"),
            )
        )

    def problem(self, spec: AttentionSpec, target: Target) -> str | None:
        """Returns why the plan is inconsistent or does not fit the spec or the target; None if it is valid."""
        if self.tile_k % DROPOUT_COLUMNS and spec.dropout:
            return f"tile_k={self.tile_k} must be a multiple of 32 with dropout"
        if self.split > 1 and spec.dropout and self.tile_k // self.split % DROPOUT_COLUMNS:
            return f"tile_k={self.tile_k} must be a multiple of 32 x split={self.split} with dropout"
        return _problem(self, ("tile_q", self.tile_q), ("tile_k", self.tile_k), self.shared_bytes(spec), spec, target)


def _problem(
    plan: _LoopPlan,
    rows: tuple[str, int],
    columns: tuple[str, int],
    shared_bytes: int,
    spec: AttentionSpec,
    target: Target,
) -> str | None:
    """Returns why a plan is not valid, or None.

    Args:
        rows: name and size of the side of a score tile that all groups of warps divide.
        columns: name and size of the side that the `split` warps of a group divide.
    """
    warps, split = plan.warps, plan.split
    if min(plan.tile_q, plan.tile_k, warps, split, plan.blocks) < 1 or plan.threads > MAX_THREADS:
        return f"its numbers must be positive, and its warps at most {MAX_THREADS // WARP}"
    if warps % split or rows[1] % (warps // split * MMA_ROWS):
        return f"{rows[0]}={rows[1]} must be a multiple of 16 x warps={warps} / split={split}"
    if split > 1 and rows[1] // (warps // split) % split:
        return f"{rows[0]}={rows[1]} must be a multiple of warps={warps}, which divide its rows to write them"
    depth = MMA_K // 2 if is_wide(spec) and split > 1 and not spec.dropout else MMA_K
    if columns[1] % (depth * split) or columns[1] % MMA_K:
        return f"{columns[0]}={columns[1]} must be a multiple of {depth} x split={split}"
    if padded_head_dim(spec) % (MMA_K * split) or padded_output_gradient(spec) % (MMA_K * split):
        return f"split={split} must divide head and value dims into multiples of 16"
    if plan.stages not in (1, 2):
        return f"stages={plan.stages} must be 1 or 2"
    if plan.stages == 2 and not target.asynchronous_copies:
        return f"stages=2 needs asynchronous copies, which {target.name} has not"
    return shared_memory_problem(shared_bytes, target, "take smaller tiles or fewer stages")


# (tile_q, tile_k, warps, split, stages) in order of preference: the fastest on an H200 first, then those that fit
# smaller GPUs. A warp of 32 keys reads half as much shared memory as one of 16, so two warps share their keys and split
# dK and dV.
_PREFERENCE = (
    (64, 128, 8, 2, 2),
    (128, 64, 8, 4, 1),
    (64, 64, 8, 2, 2),
    (64, 64, 8, 2, 1),
    (64, 64, 4, 2, 2),
    (64, 64, 4, 2, 1),
    (32, 64, 4, 1, 1),
    (32, 64, 8, 2, 1),
    (32, 64, 4, 2, 1),
    (32, 32, 4, 2, 1),
    (32, 16, 2, 2, 1),
    (16, 32, 2, 1, 1),
)
# Small CTAs, several on an SM, suit small head dims, short loops, as the prologue and epilogue of one CTA overlap the
# mainloop of another, and kernels that accumulate nothing in global memory.
_SMALL_CTA_PREFERENCE = ((64, 64, 4, 2, 2), *_PREFERENCE)
_SMALL_HEAD_DIM = 64
# The same of specs with more than MAX_UNSPLIT columns, in order of preference.
_WIDE_PREFERENCE = (
    (64, 64, 8, 4, 1),
    (64, 32, 8, 4, 1),
    (32, 32, 8, 4, 1),
    (64, 16, 4, 4, 1),
    (32, 16, 4, 4, 1),
    (32, 16, 2, 2, 1),
    (16, 16, 2, 2, 1),
)
_WIDE_QUERIES_PREFERENCE = (
    (64, 64, 8, 2, 1),
    (64, 32, 8, 2, 1),
    (32, 64, 4, 2, 1),
    (32, 32, 4, 2, 1),
    (32, 16, 4, 2, 1),
    (16, 64, 2, 2, 1),
    (16, 32, 2, 2, 1),
    (16, 16, 2, 2, 1),
)
# (tile_q, tile_k, warps, split, stages)
_QUERIES_PREFERENCE = (
    (128, 64, 4, 1, 2),
    (128, 48, 4, 1, 2),
    (128, 32, 4, 1, 2),
    (128, 64, 8, 2, 1),
    (128, 64, 8, 1, 1),
    (64, 64, 4, 1, 1),
    (128, 32, 4, 1, 1),
    (64, 32, 4, 1, 1),
    (32, 32, 2, 1, 1),
    (32, 16, 2, 1, 1),
)
_MAX_ACCUMULATORS = 200  # registers of a thread that may hold accumulators
_MAX_WIDE_ACCUMULATORS = 176  # the same if rows are wide, or K and V share them
_WIDE_DQ_ACCUMULATORS = 16  # those of an addend of dQ, if rows are wide and it has few rows
# Registers of a thread beside the accumulators: of variants that load no captured arrays, of others, and of heavy score
# functions with dropout.
_OTHER_REGISTERS, _OTHER_REGISTERS_WITH_LOADS, _OTHER_REGISTERS_HEAVY_DROPOUT = 40, 60, 76


def _accumulators(plan: BackwardPlan | QueriesPlan, spec: AttentionSpec) -> int:
    """Returns the registers of a thread that hold gradients, and the scores and score gradients of one iteration."""
    head, value = padded_head_dim(spec), 0 if spec.shared_kv else padded_output_gradient(spec)
    if isinstance(plan, QueriesPlan):
        return plan.tile_q // plan.warps * (head + 2 * plan.tile_k) // WARP  # independent of split
    rows = plan.tile_k * plan.split // plan.warps
    return rows * (head + value + 2 * plan.tile_q) // plan.split // WARP


def _with_blocks(plan: AnyPlan, shared_bytes: int, spec: AttentionSpec, target: Target) -> AnyPlan:
    """Returns the plan with as many CTAs per SM as its shared memory and registers allow."""
    demand = demand_of(spec)
    others = _OTHER_REGISTERS if demand.weight < Weight.LOADING else _OTHER_REGISTERS_WITH_LOADS
    if demand.weight == Weight.HEAVY and demand.drops:
        others = _OTHER_REGISTERS_HEAVY_DROPOUT
    registers = _accumulators(plan, spec) + others
    by_memory = target.shared_per_multiprocessor // (shared_bytes + RESERVED_SHARED)
    by_registers = target.registers_per_multiprocessor // (plan.threads * registers)
    return replace(plan, blocks=max(min(by_memory, by_registers), 1))


def _max_accumulators(spec: AttentionSpec) -> int:
    """Returns the registers of a thread that may hold accumulators.

    Heavy score functions with dropout and with gradients of captured arrays leave fewer for them.
    """
    demand, gradient = demand_of(spec), score_gradient(spec)
    gathers = bool(gradient and gradient.gathers)
    if demand.weight == Weight.HEAVY and demand.drops and gathers:
        return Target.registers_per_thread - _OTHER_REGISTERS_HEAVY_DROPOUT
    return _MAX_WIDE_ACCUMULATORS if is_wide(spec) or spec.shared_kv else _MAX_ACCUMULATORS


def _first_that_fits_registers(plans: list[AnyPlan], spec: AttentionSpec) -> AnyPlan | None:
    """Returns the first plan whose accumulators fit the registers, or the one with the fewest if none does.

    Wide rows need a plan that fits: None if there is none.
    """
    limit = _max_accumulators(spec)
    fitting = [plan for plan in plans if _accumulators(plan, spec) <= limit]
    if fitting or is_wide(spec):
        return fitting[0] if fitting else None
    return min(plans, key=lambda plan: _accumulators(plan, spec))


def _has_bounded_query_range(spec: AttentionSpec) -> bool:
    """Whether the number of queries that attend to a tile of keys does not grow with the length.

    Also true where tiles are listed, as their number is not known.
    """
    tiles = query_range(spec.mask.expression)
    return tiles is None or (tiles.begin.has(K_FIRST, K_LAST) and tiles.end.has(K_FIRST, K_LAST))


def choose_backward_plan(spec: AttentionSpec, target: Target, deterministic: bool = False) -> BackwardPlan:
    """Returns the default plan of the kernel that computes dK and dV."""
    return _required(partial(_default_keys_plan, target=target, deterministic=deterministic), spec, target)


def _default_keys_plan(spec: AttentionSpec, target: Target, deterministic: bool) -> BackwardPlan | None:
    """Returns the default plan of the kernel that computes dK and dV, or None if none fits."""
    plans = [BackwardPlan(*sizes) for sizes in _preferred(spec, deterministic)]
    return _first_that_fits_registers(
        [
            _with_blocks(plan, plan.shared_bytes(spec, deterministic), spec, target)
            for plan in plans
            if plan.problem(spec, target, deterministic) is None
        ],
        spec,
    )


def _preferred(spec: AttentionSpec, deterministic: bool) -> tuple[tuple[int, int, int, int, int], ...]:
    """Returns (tile_q, tile_k, warps, split, stages) of the preferred plans of the kernel that computes dK and dV."""
    if is_wide(spec):
        return _WIDE_PREFERENCE
    small = deterministic or _has_bounded_query_range(spec) or spec.max_dim <= _SMALL_HEAD_DIM
    return _SMALL_CTA_PREFERENCE if small else _PREFERENCE


def _required(choose: Callable[[AttentionSpec], AnyPlan | None], spec: AttentionSpec, target: Target) -> AnyPlan:
    """Returns the plan that `choose` returns for the spec. Raises UnsupportedError if that is None."""
    plan = choose(spec)
    if plan is None:
        raise too_wide("backward", spec, target, lambda narrower: choose(narrower) is not None)
    return plan


def every_backward_plan(spec: AttentionSpec, target: Target) -> Iterator[BackwardPlan]:
    """Yields the plans that tuning of the dK and dV kernel may choose from, including plans that do not fit."""
    for sizes in _WIDE_PREFERENCE if is_wide(spec) else _PREFERENCE:
        plan = BackwardPlan(*sizes)
        yield _with_blocks(plan, plan.shared_bytes(spec), spec, target)


def choose_queries_plan(spec: AttentionSpec, target: Target) -> QueriesPlan:
    """Returns the default plan of the kernel that computes dQ."""
    return _required(partial(_default_queries_plan, target=target), spec, target)


def _default_queries_plan(spec: AttentionSpec, target: Target) -> QueriesPlan | None:
    """Returns the default plan of the kernel that computes dQ, or None if none fits."""
    plans = [QueriesPlan(*sizes) for sizes in (_WIDE_QUERIES_PREFERENCE if is_wide(spec) else _QUERIES_PREFERENCE)]
    return _first_that_fits_registers(
        [
            _with_blocks(plan, plan.shared_bytes(spec), spec, target)
            for plan in plans
            if plan.problem(spec, target) is None
        ],
        spec,
    )
