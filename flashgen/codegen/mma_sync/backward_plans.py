"""How the backward kernels divide their work. A plan is chosen by spec and target, never by lengths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from flashgen.analysis.closed_forms.inequalities import K_FIRST, K_LAST
from flashgen.analysis.closed_forms.tile_ranges import query_range
from flashgen.codegen.demand import Weight, demand_of
from flashgen.codegen.expressions.derivative_text import score_gradient
from flashgen.codegen.mma_sync.forward_plans import MMA_ROWS
from flashgen.codegen.plan import Checked, shared_memory_problem
from flashgen.codegen.shared_memory import FLOAT2, Buffer, Extent, SharedMemoryLayout
from flashgen.codegen.targets import Target
from flashgen.codegen.tiling import (
    DROPOUT_COLUMNS,
    MAX_THREADS,
    MMA_DEPTH,
    RESERVED_SHARED,
    WARP,
    head_extent,
    padded,
    value_extent,
)
from flashgen.language.spec import AttentionSpec

AnyPlan = TypeVar("AnyPlan", "BackwardPlan", "QueriesPlan")


@dataclass(frozen=True)
class _WalkPlan:
    """How a block that owns a tile of one side walks along the other.

    Attributes:
        tile_q, tile_k: queries and keys: of the block on the side that it owns, of a step on the other.
        warps: warps of a block.
        split: warps that share the same rows, each with its part of the columns, and of those of the gradients.
        stages: tiles of each array that is walked along, that shared memory holds at once.
        blocks: thread blocks that should fit on a multiprocessor, which caps their registers.
    """

    tile_q: int
    tile_k: int
    warps: int
    split: int = 1
    stages: int = 2
    blocks: int = 1
    walked: ClassVar[str]
    heads_apart: ClassVar[bool] = False
    in_turns: ClassVar[bool] = False
    persistent: ClassVar[bool] = False

    @property
    def threads(self) -> int:
        return self.warps * WARP

    def summary(self, shared_bytes: int) -> str:
        """What the kernel's header says of it."""
        shared = f", {self.split} of which share rows" if self.split > 1 else ""
        return (
            f"{self.tile_q} queries x {self.tile_k} keys, {self.warps} warps{shared}, {self.stages} stage(s) of "
            f"{self.walked}, {self.blocks} block(s) per multiprocessor, {shared_bytes} bytes of shared memory"
        )


@dataclass(frozen=True)
class BackwardPlan(Checked, _WalkPlan):
    """The plan of the kernel whose blocks walk the queries of a tile of keys; warps that share keys split dK and dV."""

    walked = "Q and dO"

    def head_columns(self, spec: AttentionSpec) -> int:
        """Columns of a row of dQ while it is summed."""
        return padded(spec.head_dim)

    def gradient_warps(self, spec: AttentionSpec) -> tuple[int, int]:
        """How many warps divide a tile of dQ along its rows, and along its columns: as many as find whole mma tiles.

        Of equally many, those whose parts are closest to square read the least.
        """
        rows, columns = self.tile_q // MMA_ROWS, padded(spec.head_dim) // MMA_DEPTH
        found = [
            (r, c)
            for r in range(1, self.warps + 1)
            for c in range(1, self.warps // r + 1)
            if rows % r == 0 and columns % c == 0
        ]
        return max(found, key=lambda pair: (pair[0] * pair[1], -abs(rows / pair[0] - columns / pair[1])))

    def shared_memory(self, spec: AttentionSpec, deterministic: bool = False) -> SharedMemoryLayout:
        """K and V; the stages of Q, dO and the statistics; dS and P where warps read each other's.

        In the epilogue dK and dV overlay K and V.
        """
        queries, keys = Extent("kTileQ", self.tile_q), Extent("kTileK", self.tile_k)
        head, value, stages = head_extent(spec), value_extent(spec), Extent("kStages", self.stages)
        shared_scores = [Buffer("Score", "dS", (keys, queries))] if self.split > 1 or not deterministic else []
        shared_scores += [Buffer("Probability", "P", (keys, queries))] if self.split > 1 else []
        return SharedMemoryLayout(
            (
                Buffer("Key", "K", (keys, head)),
                Buffer("Value", "V", (keys, value)),
                Buffer("Query", "Q", (queries, head), copies=stages),
                Buffer("Output", "dO", (queries, value), copies=stages),
                Buffer("Statistics", "L, D", (queries,), FLOAT2, copies=stages),
                *shared_scores,
                Buffer("KeyGradient", "dK", (keys, head), overlays="Key"),
                Buffer("ValueGradient", "dV", (keys, value), overlays="Value"),
            )
        )

    def problem(self, spec: AttentionSpec, target: Target, deterministic: bool = False) -> str | None:
        """Why the plan contradicts itself, or does not fit the spec or the target; None where it does."""
        needed = self.shared_bytes(spec, deterministic)
        return _problem(self, ("tile_k", self.tile_k), ("tile_q", self.tile_q), needed, spec, target)


@dataclass(frozen=True)
class QueriesPlan(Checked, _WalkPlan):
    """The plan of the kernel whose blocks walk the keys of a tile of queries; warps that share queries split dQ."""

    walked = "K and V"

    def shared_memory(self, spec: AttentionSpec) -> SharedMemoryLayout:
        """Q and dO; the stages of K and of V; dS where warps read each other's. In the epilogue dQ overlays Q."""
        queries, keys = Extent("kTileQ", self.tile_q), Extent("kTileK", self.tile_k)
        head, value, stages = head_extent(spec), value_extent(spec), Extent("kStages", self.stages)
        return SharedMemoryLayout(
            (
                Buffer("Query", "Q", (queries, head)),
                Buffer("Output", "dO", (queries, value)),
                Buffer("Key", "K", (keys, head), copies=stages),
                Buffer("Value", "V", (keys, value), copies=stages),
                *([Buffer("Score", "dS", (queries, keys))] if self.split > 1 else []),
                Buffer("QueryGradient", "dQ", (queries, head), overlays="Query"),
            )
        )

    def problem(self, spec: AttentionSpec, target: Target) -> str | None:
        """Why the plan contradicts itself, or does not fit the spec or the target; None where it does."""
        if self.tile_k % DROPOUT_COLUMNS and spec.dropout:
            return f"tile_k={self.tile_k} must be a multiple of 32 with dropout"
        if self.split > 1 and spec.dropout and self.tile_k // self.split % DROPOUT_COLUMNS:
            return f"tile_k={self.tile_k} must be a multiple of 32 x split={self.split} with dropout"
        return _problem(self, ("tile_q", self.tile_q), ("tile_k", self.tile_k), self.shared_bytes(spec), spec, target)


def _problem(
    plan: _WalkPlan,
    rows: tuple[str, int],
    columns: tuple[str, int],
    shared_bytes: int,
    spec: AttentionSpec,
    target: Target,
) -> str | None:
    """What is wrong with a plan; `rows` and `columns` are the sides of its tiles of scores that warps divide so."""
    warps, split = plan.warps, plan.split
    if min(plan.tile_q, plan.tile_k, warps, split, plan.blocks) < 1 or plan.threads > MAX_THREADS:
        return f"its numbers must be positive, and its warps at most {MAX_THREADS // WARP}"
    if warps % split or rows[1] % (warps // split * MMA_ROWS):
        return f"{rows[0]}={rows[1]} must be a multiple of 16 x warps={warps} / split={split}"
    if split > 1 and rows[1] // (warps // split) % split:
        return f"{rows[0]}={rows[1]} must be a multiple of warps={warps}, which divide its rows to write them"
    if columns[1] % (MMA_DEPTH * split):
        return f"{columns[0]}={columns[1]} must be a multiple of 16 x split={split}"
    if padded(spec.head_dim) % (MMA_DEPTH * split) or padded(spec.value_dim) % (MMA_DEPTH * split):
        return f"split={split} must divide head and value dims into multiples of 16"
    if plan.stages not in (1, 2):
        return f"stages={plan.stages} must be 1 or 2"
    if plan.stages == 2 and not target.asynchronous_copies:
        return f"stages=2 needs asynchronous copies, which {target.name} has not"
    return shared_memory_problem(shared_bytes, target, "take smaller tiles or fewer stages")


# (tile_q, tile_k, warps, split, stages) by preference: by speed on an H200, then by what smaller GPUs hold.
# Warps of 32 keys read half as much shared memory as those of 16, for which two of them share dK and dV.
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
# Small blocks, several on a multiprocessor, suit small head dims, short walks, whose beginnings and ends overlap with
# the middle of others', and kernels that add nothing up in global memory.
_PREFERENCE_OF_SMALL_BLOCKS = ((64, 64, 4, 2, 2), *_PREFERENCE)
_SMALL_HEAD_DIM = 64
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
_ACCUMULATORS = 200  # registers of a thread that may hold sums
_BESIDE_SUMS, _BESIDE_SUMS_OF_MORE = 40, 60  # registers of a thread: of variants that load nothing, and of others
_HEAVY_WITH_DROPOUT = 76


def _accumulators(plan: BackwardPlan | QueriesPlan, spec: AttentionSpec) -> int:
    """Registers of a thread that hold gradients, and a step's scores and their gradients."""
    head, value = padded(spec.head_dim), padded(spec.value_dim)
    if isinstance(plan, QueriesPlan):
        return plan.tile_q // plan.warps * (head + 2 * plan.tile_k) // WARP  # whatever the split
    rows = plan.tile_k * plan.split // plan.warps
    return rows * (head + value + 2 * plan.tile_q) // plan.split // WARP


def _with_blocks(plan: AnyPlan, shared_bytes: int, spec: AttentionSpec, target: Target) -> AnyPlan:
    """The plan with as many blocks as a multiprocessor has shared memory and registers for."""
    demand = demand_of(spec)
    beside = _BESIDE_SUMS if demand.weight < Weight.LOADING else _BESIDE_SUMS_OF_MORE
    if demand.weight == Weight.HEAVY and demand.drops:
        beside = _HEAVY_WITH_DROPOUT
    registers = _accumulators(plan, spec) + beside
    by_memory = target.shared_per_multiprocessor // (shared_bytes + RESERVED_SHARED)
    by_registers = target.registers_per_multiprocessor // (plan.threads * registers)
    return replace(plan, blocks=max(min(by_memory, by_registers), 1))


def _most_accumulators(spec: AttentionSpec) -> int:
    """Registers that sums may take. Heavy scores that drop, and whose loads have gradients, need more beside them."""
    demand, gradient = demand_of(spec), score_gradient(spec)
    gathers = bool(gradient and gradient.gathers)
    crowded = demand.weight == Weight.HEAVY and demand.drops and gathers
    return Target.registers_per_thread - _HEAVY_WITH_DROPOUT if crowded else _ACCUMULATORS


def _chosen(plans: list[AnyPlan], spec: AttentionSpec) -> AnyPlan:
    """The first plan whose sums leave registers to spare."""
    most = _most_accumulators(spec)
    fitting = [plan for plan in plans if _accumulators(plan, spec) <= most]
    return fitting[0] if fitting else min(plans, key=lambda plan: _accumulators(plan, spec))


def _walks_far_less(spec: AttentionSpec) -> bool:
    """Whether a tile of keys is attended by a part of the queries that does not grow with them, as far as is known."""
    tiles = query_range(spec.mask.expression)
    return tiles is None or (tiles.begin.has(K_FIRST, K_LAST) and tiles.end.has(K_FIRST, K_LAST))


def choose_backward_plan(spec: AttentionSpec, target: Target, deterministic: bool = False) -> BackwardPlan:
    """The default plan of the keys' kernel of a spec on a target."""
    small = deterministic or _walks_far_less(spec) or max(spec.head_dim, spec.value_dim) <= _SMALL_HEAD_DIM
    plans = [BackwardPlan(*sizes) for sizes in (_PREFERENCE_OF_SMALL_BLOCKS if small else _PREFERENCE)]
    return _chosen(
        [
            _with_blocks(plan, plan.shared_bytes(spec, deterministic), spec, target)
            for plan in plans
            if plan.problem(spec, target, deterministic) is None
        ],
        spec,
    )


def every_backward_plan(spec: AttentionSpec, target: Target) -> Iterator[BackwardPlan]:
    """The plans of the keys' kernel that tuning may choose from, whether or not they fit."""
    for sizes in _PREFERENCE:
        plan = BackwardPlan(*sizes)
        yield _with_blocks(plan, plan.shared_bytes(spec), spec, target)


def choose_queries_plan(spec: AttentionSpec, target: Target) -> QueriesPlan:
    """The default plan of the queries' kernel of a spec on a target."""
    plans = [QueriesPlan(*sizes) for sizes in _QUERIES_PREFERENCE]
    return _chosen(
        [
            _with_blocks(plan, plan.shared_bytes(spec), spec, target)
            for plan in plans
            if plan.problem(spec, target) is None
        ],
        spec,
    )
