"""How the forward kernel of mma.sync divides its work. A plan is chosen by spec and target, never by lengths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar, NamedTuple

from flashgen.codegen.demand import Weight, demand_of, divides_tiles, is_power_of_2
from flashgen.codegen.plan import Checked, shared_memory_problem
from flashgen.codegen.shared_memory import Buffer, Extent, SharedMemoryLayout
from flashgen.codegen.targets import TARGETS, Target
from flashgen.codegen.tiling import (
    DROPOUT_COLUMNS,
    ELEMENT_BYTES,
    MAX_THREADS,
    MMA_DEPTH,
    RESERVED_SHARED,
    WARP,
    head_extent,
    padded,
    value_extent,
)
from flashgen.language.spec import AttentionSpec

MMA_ROWS = 16
_MODEL = TARGETS["sm_80"]  # whose rates the cost model of tuning assumes for every target of this family
_WARPS_TO_HIDE_LATENCY = 8  # on a multiprocessor


@dataclass(frozen=True)
class ForwardPlan(Checked):
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
    packed_heads: ClassVar[int] = 1

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def register_budget(self) -> int:
        share, step = Target.registers_per_multiprocessor // (self.threads * self.blocks), Target.register_granularity
        return min(share // step * step, Target.registers_per_thread)

    def show_options(self, spec: AttentionSpec) -> str:
        return ""

    def registers(self, spec: AttentionSpec) -> int:
        """The float32 scores and output of a warp's rows over 32 lanes, and what the variant needs."""
        rows = self.tile_q // self.warps
        return rows * (self.tile_k + padded(spec.value_dim)) // WARP + _ROOM[demand_of(spec).weight].beside

    def matrix_cycles(self, spec: AttentionSpec) -> float:
        """By the rate of an A100's tensor cores, or by that at which warps read K and V."""
        width = padded(spec.head_dim) + padded(spec.value_dim)
        shared_reads = self.warps * self.tile_k * width * ELEMENT_BYTES / 128
        return max(self.tile_q * self.tile_k * width / _MODEL.multiply_adds_per_cycle, shared_reads)

    def exposed(self, blocks: int) -> float:
        return 0.3 if self.warps * blocks >= _WARPS_TO_HIDE_LATENCY else 0.6

    def summary(self, spec: AttentionSpec) -> str:
        """One line for the kernel's header."""
        return (
            f"{self.tile_q} queries x {self.tile_k} keys, {self.warps} warps, {self.stages} stage(s) of K and V, "
            f"{self.blocks} block(s) per multiprocessor, {self.shared_bytes(spec)} bytes of shared memory"
        )

    def shared_memory(self, spec: AttentionSpec) -> SharedMemoryLayout:
        """Q, and the stages of K and of V; the output overlays them in the epilogue."""
        queries, keys, stages = Extent("kTileQ", self.tile_q), Extent("kTileK", self.tile_k), self.stages
        head, value = head_extent(spec), value_extent(spec)
        return SharedMemoryLayout(
            (
                Buffer("Query", "Q", (queries, head)),
                Buffer("Key", "K", (keys, head), copies=Extent("kStages", stages)),
                Buffer("Value", "V", (keys, value), copies=Extent("kStages", stages)),
                Buffer("Output", "O", (queries, value), overlays="Query"),
            )
        )

    def problem(self, spec: AttentionSpec, target: Target) -> str | None:
        """Why the plan contradicts itself, or does not fit the spec or the target; None where it does."""
        if min(self.tile_q, self.tile_k, self.warps, self.blocks) < 1 or self.threads > MAX_THREADS:
            return f"its numbers must be positive, and its warps at most {MAX_THREADS // WARP}"
        if self.tile_q % self.warps or self.tile_q // self.warps % MMA_ROWS:
            return f"tile_q={self.tile_q} must be a multiple of 16 x warps={self.warps}"
        if self.tile_k % MMA_DEPTH or (spec.dropout and self.tile_k % DROPOUT_COLUMNS):
            return f"tile_k={self.tile_k} must be a multiple of 16, of 32 with dropout"
        if self.stages not in (1, 2):
            return f"stages={self.stages} must be 1 or 2"
        if self.stages == 2 and not target.asynchronous_copies:
            return f"stages=2 needs asynchronous copies, which {target.name} has not"
        return shared_memory_problem(self.shared_bytes(spec), target, "take smaller tiles or fewer stages")


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


class _Room(NamedTuple):
    """What a thread can hold beside what a variant needs, and what that is.

    accumulators: registers that may accumulate scores and output without spilling; `lean` on targets of low register
    pressure. scores: those of scores among them, as an array element loaded for each takes several of
    its own. beside: registers beside scores and output; of the kernels that do not spill the one with the most of the
    latter tells it. A test compiles every kind of spec for every target.
    """

    accumulators: int
    lean: int
    scores: int
    beside: int


_ROOM = {
    Weight.NONE: _Room(160, 192, 128, 63),
    Weight.PLAIN: _Room(160, 176, 128, 72),
    Weight.BUSY: _Room(160, 176, 64, 80),
    Weight.LOADING: _Room(160, 160, 48, 80),
    Weight.MODERATE: _Room(160, 160, 64, 95),
    Weight.COSTLY: _Room(160, 160, 32, 95),
    Weight.HEAVY: _Room(96, 96, 32, 140),
}
# Dropout takes more beside many scores, or beside a score function or a mask that is not plain.
_ACCUMULATORS_WITH_DROPOUT, _SCORES_WITH_DROPOUT = 128, 32
_KEPT_HEAD_DIM = 32
_WIDE_TILE = 64  # keys: a mask that divides k by multiples of so many is cheaper in tiles that fit them


def _accumulators(plan: ForwardPlan, spec: AttentionSpec) -> tuple[int, int]:
    """Registers of a thread that hold scores, and scores and output: its warp's rows over 32 lanes.

    Queries of few mma depths stand beside the output: the compiler keeps in registers what every step reads again.
    """
    rows, head = plan.tile_q // plan.warps, padded(spec.head_dim)
    kept = head if head < _KEPT_HEAD_DIM else 0
    return rows * plan.tile_k // WARP, rows * (plan.tile_k + padded(spec.value_dim) + kept) // WARP


def fitting_plans(spec: AttentionSpec, target: Target, warps: int = 0) -> list[ForwardPlan]:
    """The preferred plans that the target has the shared memory for; those that hide latency come first.

    warps: that blocks are to have, with as many rows each as those of the preferred plans; 0 is what is preferred.
    """
    fitting = []
    for tile_q, tile_k, own_warps, stages in _preferred(warps):
        plan = ForwardPlan(tile_q, tile_k, own_warps, stages)
        of_blocks = demand_of(spec).reads_blocks or spec.page_size or divides_tiles(spec, _WIDE_TILE)
        cuts_across = not is_power_of_2(tile_k) and of_blocks
        if plan.problem(spec, target) is None and not cuts_across:
            per_block = plan.shared_bytes(spec) + RESERVED_SHARED
            blocks = min(
                target.shared_per_multiprocessor // per_block, _WARPS_TO_HIDE_LATENCY // own_warps, _MOST_BLOCKS
            )
            fitting.append(replace(plan, blocks=max(blocks, 1)))
    return sorted(fitting, key=lambda plan: plan.blocks * plan.warps < _WARPS_TO_HIDE_LATENCY)


def _preferred(warps: int) -> list[tuple[int, int, int, int]]:
    if not warps:
        return list(_PREFERENCE)
    alike = [row for row in _PREFERENCE if row[2] == _PREFERENCE[0][2]]
    return [(tile_q // own_warps * warps, tile_k, warps, stages) for tile_q, tile_k, own_warps, stages in alike]


def choose_forward_plan(spec: AttentionSpec, target: Target) -> ForwardPlan:
    """The default plan of a spec on a target: the first preferred one whose accumulators leave registers to spare."""
    candidates = fitting_plans(spec, target)
    for plan in candidates:
        if leaves_registers(plan, spec, target):
            return plan
    return min(candidates, key=lambda plan: _accumulators(plan, spec)[1])


def leaves_registers(plan: ForwardPlan, spec: AttentionSpec, target: Target, more: int = 0) -> bool:
    """Whether a thread has registers to spare for what the variant needs; `more`, of those that may accumulate."""
    demand, (scores, accumulators) = demand_of(spec), _accumulators(plan, spec)
    room = _ROOM[demand.weight]
    same_rows = padded(spec.head_dim) == padded(spec.value_dim)  # else K's and V's have offsets of their own each
    reads = demand.weight == Weight.PLAIN and demand.mask_axes  # an element of an array, which a thread holds all along
    lean = target.register_pressure == "low" and same_rows and not reads
    allowance = room.lean if lean else room.accumulators
    most_scores = room.scores
    crowded = demand.drops and not demand.drops_alone
    if crowded and target.register_pressure == "high":
        most_scores = min(most_scores, _SCORES_WITH_DROPOUT)
    if crowded or (demand.drops and scores > _SCORES_WITH_DROPOUT):
        allowance = min(allowance, _ACCUMULATORS_WITH_DROPOUT)
    return accumulators <= allowance + more and scores <= most_scores


_TUNED_TILES = tuple(product((64, 128, 256), (32, 48, 64, 80, 96, 112, 128), (4, 8), (1, 2)))
_TUNED_BLOCKS = (1, 2, 3)


def every_forward_plan(spec: AttentionSpec, target: Target) -> Iterator[ForwardPlan]:
    """The plans that tuning may choose from, whether or not they fit."""
    for (tile_q, tile_k, warps, stages), blocks in product(_TUNED_TILES, _TUNED_BLOCKS):
        plan = ForwardPlan(tile_q, tile_k, warps, stages, blocks)
        if blocks * (plan.shared_bytes(spec) + RESERVED_SHARED) <= target.shared_per_multiprocessor:
            yield plan
