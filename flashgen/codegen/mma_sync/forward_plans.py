"""Tile sizes and warps of the mma.sync forward kernel. A plan depends on spec and target, never on lengths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar, NamedTuple

from flashgen.codegen.demand import Weight, demand_of, divides_tiles, is_power_of_2
from flashgen.codegen.padding import (
    DROPOUT_COLUMNS,
    MAX_SPLIT,
    MAX_THREADS,
    MAX_UNSPLIT,
    MMA_K,
    RESERVED_SHARED,
    WARP,
    element_sizes,
    head_extent,
    is_wide,
    padded_head_dim,
    padded_value_dim,
    value_extent,
)
from flashgen.codegen.plan import Checked, shared_memory_problem, too_wide
from flashgen.codegen.shared_memory import FLOAT, Buffer, Extent, SharedMemoryLayout
from flashgen.codegen.targets import TARGETS, Target
from flashgen.language.spec import AttentionSpec

MMA_ROWS = 16
_MODEL = TARGETS["sm_80"]  # the tuning cost model uses its rates for every target of this family
_WARPS_TO_HIDE_LATENCY = 8  # on an SM


@dataclass(frozen=True)
class ForwardPlan(Checked):
    """The plan of the forward kernel.

    Attributes:
        tile_q: queries of a tile. Each warp owns tile_q * split / warps of its rows.
        tile_k: keys of a tile.
        warps: warps of a CTA.
        stages: stages of the pipelines of K and of V in shared memory.
        blocks: CTAs that should fit on an SM at once, which limits the registers of a thread.
        split: warps that share the same rows. Each computes the scores of a part of the keys, and a part of the columns
            of the output, for which it reads the probabilities of the others from shared memory.
    """

    tile_q: int
    tile_k: int
    warps: int
    stages: int = 1
    blocks: int = 1
    split: int = 1
    packed_heads: ClassVar[int] = 1

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def register_budget(self) -> int:
        return Target.registers_of_launch(self.threads * self.blocks)

    def show_options(self, spec: AttentionSpec) -> str:
        return ""

    def registers(self, spec: AttentionSpec) -> int:
        """Estimates the registers of a thread: its float32 scores and output, and what the variant needs."""
        rows = self.tile_q // self.warps
        return rows * (self.tile_k + padded_value_dim(spec)) // WARP + _REGISTER_LIMITS[demand_of(spec).weight].others

    def matrix_cycles(self, spec: AttentionSpec) -> float:
        """Estimates the cycles of a tile's products by an A100's tensor cores, or by shared memory reads if slower."""
        width = padded_head_dim(spec) + padded_value_dim(spec)
        shared_reads = self.warps * self.tile_k * width * spec.element.bytes / 128
        return max(self.tile_q * self.tile_k * width / _MODEL.multiply_adds_per_cycle, shared_reads)

    def exposed(self, blocks: int) -> float:
        """Returns the share of the shorter of products and softmax that is not hidden, by measured times."""
        return 0.3 if self.warps * blocks >= _WARPS_TO_HIDE_LATENCY else 0.6

    def summary(self, spec: AttentionSpec) -> str:
        """Returns the line that the kernel's header has about the plan."""
        shared = f", {self.split} of which share rows" if self.split > 1 else ""
        return (
            f"{self.tile_q} queries x {self.tile_k} keys, {self.warps} warps{shared}, {self.stages} stage(s) of K and "
            f"V, {self.blocks} CTA(s) per multiprocessor, {self.shared_bytes(spec)} bytes of shared memory"
        )

    def shared_memory(self, spec: AttentionSpec) -> SharedMemoryLayout:
        """Returns the layout: Q, the stages of K and of V, and what warps with the same rows exchange.

        In the epilogue the output overlays Q, K and V.
        """
        element, kv_element = element_sizes(spec)
        queries, keys, stages = Extent("kTileQ", self.tile_q), Extent("kTileK", self.tile_k), self.stages
        head, value = head_extent(spec), value_extent(spec)
        return SharedMemoryLayout(
            (
                Buffer("Query", "Q", (queries, head), element),
                Buffer("Key", "K", (keys, head), kv_element, copies=Extent("kStages", stages)),
                *self._values(spec, keys, value, kv_element),
                *self._exchanged(queries, keys, element),
                Buffer("Output", "O", (queries, value), element, overlays="Query"),
            )
        )

    def _values(self, spec: AttentionSpec, keys: Extent, value: Extent, element: Extent) -> tuple[Buffer, ...]:
        """Returns the stages of V, which is in those of K if it is a part of it."""
        return (
            ()
            if spec.shared_kv
            else (Buffer("Value", "V", (keys, value), element, copies=Extent("kStages", self.stages)),)
        )

    def _exchanged(self, queries: Extent, keys: Extent, element: Extent) -> tuple[Buffer, ...]:
        """Returns the buffers by which warps with the same rows exchange probabilities, row maxima and row sums."""
        if self.split == 1:
            return ()
        parts = Extent("kSplit", self.split)
        return (
            Buffer("Probability", "P", (queries, keys), element),
            Buffer("Row", "row maxima and sums", (parts, queries), FLOAT),
        )

    def problem(self, spec: AttentionSpec, target: Target) -> str | None:
        """Returns why the plan is inconsistent or does not fit the spec or the target; None if it is valid."""
        if min(self.tile_q, self.tile_k, self.warps, self.blocks) < 1 or self.threads > MAX_THREADS:
            return f"its numbers must be positive, and its warps at most {MAX_THREADS // WARP}"
        if self.warps % self.split or self.tile_q % (MMA_ROWS * self.warps // self.split):
            return f"tile_q={self.tile_q} must be a multiple of 16 x warps={self.warps} / split={self.split}"
        columns = (DROPOUT_COLUMNS if spec.dropout else MMA_K) * self.split
        if self.tile_k % columns:
            each = f", for each of split={self.split} parts" if self.split > 1 else ""
            return f"tile_k={self.tile_k} must be a multiple of 16, of 32 with dropout{each}"
        if (self.split > 1) != is_wide(spec) or self.split not in (1, 2, MAX_SPLIT):
            return f"split={self.split} must be 1, or 2 or {MAX_SPLIT} if head_dim or value_dim is above {MAX_UNSPLIT}"
        if self.stages not in (1, 2):
            return f"stages={self.stages} must be 1 or 2"
        if self.stages == 2 and not target.asynchronous_copies:
            return f"stages=2 needs asynchronous copies, which {target.name} has not"
        return shared_memory_problem(self.shared_bytes(spec), target, "take smaller tiles or fewer stages")


# (tile_q, tile_k, warps, stages) in order of preference: the fastest on an H200 first, then those that fit smaller
# GPUs.
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
# (tile_q, tile_k, warps, stages, split) of specs of more than MAX_UNSPLIT columns, in order of preference.
_WIDE_PREFERENCE = (
    (64, 64, 8, 2, 2),
    (64, 32, 8, 2, 2),
    (64, 64, 8, 1, 2),
    (64, 32, 8, 1, 2),
    (32, 64, 4, 1, 2),
    (32, 64, 8, 1, 4),
    (32, 32, 4, 1, 2),
    (16, 64, 2, 1, 2),
    (16, 32, 2, 1, 2),
)
_MAX_BLOCKS = 2


class _RegisterLimits(NamedTuple):
    """Limits on the registers of a thread for variants of one weight. A test compiles every kind for every target.

    Attributes:
        accumulators: registers that may hold scores and output without spills.
        lean: the same limit on targets of low register pressure.
        scores: registers that may hold scores. An array element that is loaded for each score takes several more.
        others: registers beside scores and output, from the kernel with the most of these that does not spill.
    """

    accumulators: int
    lean: int
    scores: int
    others: int


_REGISTER_LIMITS = {
    Weight.NONE: _RegisterLimits(160, 192, 128, 63),
    Weight.PLAIN: _RegisterLimits(160, 176, 128, 72),
    Weight.BUSY: _RegisterLimits(160, 176, 64, 80),
    Weight.LOADING: _RegisterLimits(160, 160, 48, 80),
    Weight.MODERATE: _RegisterLimits(160, 160, 64, 95),
    Weight.COSTLY: _RegisterLimits(160, 160, 32, 95),
    Weight.HEAVY: _RegisterLimits(96, 96, 32, 140),
}
# Dropout needs more registers if there are many scores, or if the score function or the mask is not plain.
_ACCUMULATORS_WITH_DROPOUT, _SCORES_WITH_DROPOUT = 128, 32
_SPLIT_ACCUMULATORS = 136  # if warps share rows: the addresses of what they exchange take registers
_REGISTER_HEAD_DIM = 32  # below this the compiler keeps Q in registers
_WIDE_TILE = 64  # keys: a mask that divides k by a multiple of this is cheaper if tiles do not straddle its blocks


def _accumulators(plan: ForwardPlan, spec: AttentionSpec) -> tuple[int, int]:
    """Returns the registers of a thread that hold scores, and those that hold scores and output.

    Narrow queries count too: the compiler keeps them in registers, because every iteration reads them again.
    """
    rows, head = plan.tile_q // plan.warps, padded_head_dim(spec)
    query = head if head < _REGISTER_HEAD_DIM else 0
    return rows * plan.tile_k // WARP, rows * (plan.tile_k + padded_value_dim(spec) + query) // WARP


def fitting_plans(spec: AttentionSpec, target: Target, warps: int = 0) -> list[ForwardPlan]:
    """Returns the preferred plans that fit the target's shared memory, those that hide latency first.

    Args:
        warps: warps of a CTA, each with as many rows as a warp of the preferred plans; 0 for the preferred number.
    """
    fitting = []
    for tile_q, tile_k, own_warps, stages, split in _preferred(spec, warps):
        plan = ForwardPlan(tile_q, tile_k, own_warps, stages, split=split)
        has_blocks = demand_of(spec).reads_blocks or spec.page_size or divides_tiles(spec, _WIDE_TILE)
        straddles_blocks = not is_power_of_2(tile_k) and has_blocks
        if plan.problem(spec, target) is None and not straddles_blocks:
            per_block = plan.shared_bytes(spec) + RESERVED_SHARED
            own_blocks = _WARPS_TO_HIDE_LATENCY // own_warps
            blocks = min(target.shared_per_multiprocessor // per_block, own_blocks, _MAX_BLOCKS)
            fitting.append(replace(plan, blocks=max(blocks, 1)))
    return sorted(fitting, key=lambda plan: plan.blocks * plan.warps < _WARPS_TO_HIDE_LATENCY)


def _preferred(spec: AttentionSpec, warps: int) -> list[tuple[int, int, int, int, int]]:
    """Returns (tile_q, tile_k, warps, stages, split) of the preferred plans."""
    if spec.shared_kv:  # with one stage no load overlaps products, and without V's there is room for two
        every = _WIDE_PREFERENCE if is_wide(spec) else tuple((*row, 1) for row in _PREFERENCE)
        staged = [(*row[:3], stages, row[4]) for stages in (2, 1) for row in every]
        return list(dict.fromkeys(staged))
    if is_wide(spec):
        return list(_WIDE_PREFERENCE)
    if not warps:
        return [(*row, 1) for row in _PREFERENCE]
    rows = [row for row in _PREFERENCE if row[2] == _PREFERENCE[0][2]]
    return [(tile_q // own_warps * warps, tile_k, warps, stages, 1) for tile_q, tile_k, own_warps, stages in rows]


def choose_forward_plan(spec: AttentionSpec, target: Target) -> ForwardPlan:
    """Returns the default plan: the first preferred plan whose accumulators leave enough registers.

    If there is none, it is the plan with the fewest accumulators.

    Raises:
        UnsupportedError: the target's shared memory holds no tiles of the spec's columns.
    """
    candidates = fitting_plans(spec, target)
    if not candidates:
        raise too_wide("forward", spec, target, lambda narrower: bool(fitting_plans(narrower, target)))
    for plan in candidates:
        if leaves_registers(plan, spec, target):
            return plan
    return min(candidates, key=lambda plan: _accumulators(plan, spec)[1])


def leaves_registers(plan: ForwardPlan, spec: AttentionSpec, target: Target, more: int = 0) -> bool:
    """Whether the accumulators of a plan leave a thread the registers that the variant needs.

    Args:
        more: registers by which the limit on accumulators is raised.
    """
    demand, (scores, accumulators) = demand_of(spec), _accumulators(plan, spec)
    limits = _REGISTER_LIMITS[demand.weight]
    same_rows = (
        padded_head_dim(spec) == padded_value_dim(spec) and not spec.shared_kv
    )  # otherwise there are more addresses
    reads = demand.weight == Weight.PLAIN and demand.mask_axes  # a thread holds an array element through the mainloop
    lean = target.register_pressure == "low" and same_rows and not reads
    allowance = limits.lean if lean else limits.accumulators
    max_scores = limits.scores
    crowded = demand.drops and not demand.drops_alone
    if crowded and target.register_pressure == "high":
        max_scores = min(max_scores, _SCORES_WITH_DROPOUT)
    if plan.split > 1:
        allowance = min(allowance, _SPLIT_ACCUMULATORS)
    if crowded or (demand.drops and scores > _SCORES_WITH_DROPOUT):
        allowance = min(allowance, _ACCUMULATORS_WITH_DROPOUT)
    return accumulators <= allowance + more and scores <= max_scores


_TUNED_TILES = tuple(product((64, 128, 256), (32, 48, 64, 80, 96, 112, 128), (4, 8), (1, 2)))
_TUNED_BLOCKS = (1, 2, 3)
_TUNED_WIDE = tuple(product((32, 64), (32, 64), (4, 8, 16), (1, 2), (1,), (2, 4)))


def every_forward_plan(spec: AttentionSpec, target: Target) -> Iterator[ForwardPlan]:
    """Yields the plans that tuning may choose from; some do not fit the spec or their registers."""
    narrow = ((*tile, blocks, 1) for tile, blocks in product(_TUNED_TILES, _TUNED_BLOCKS))
    for sizes in _TUNED_WIDE if is_wide(spec) else narrow:
        plan = ForwardPlan(*sizes)
        if plan.blocks * (plan.shared_bytes(spec) + RESERVED_SHARED) <= target.shared_per_multiprocessor:
            yield plan
