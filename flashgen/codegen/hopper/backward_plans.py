"""How Hopper's backward kernels divide their work. A plan is chosen by spec and target, never by lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import sympy

from flashgen.analysis.closed_forms.monotonicity import visitors_are_contiguous
from flashgen.analysis.closed_forms.tile_ranges import query_range
from flashgen.analysis.derivatives import gathers
from flashgen.codegen.demand import Weight, demand_of, is_clipped
from flashgen.codegen.expressions.derivative_text import score_gradient
from flashgen.codegen.hopper.barriers import key_barriers
from flashgen.codegen.hopper.plans import WARPGROUP
from flashgen.codegen.plan import Checked, shared_memory_problem
from flashgen.codegen.shared_memory import (
    BYTE,
    FLOAT,
    FLOAT2,
    Buffer,
    Extent,
    SharedMemoryLayout,
    literal,
    mbarriers,
)
from flashgen.codegen.targets import Target
from flashgen.codegen.tiling import padded, value_extent
from flashgen.language.spec import AttentionSpec

_ROWS = 64  # of a wgmma
_SCORE_STAGES = 2  # tiles of dS: one is written while dQ is made of the other
_WORK_BYTES, _RAGGED_WORK_BYTES = 16, 48  # of what a block is told to work on
_ACCUMULATORS = 224  # registers of a thread that sums and products in flight may take
_SHORT = 200  # of these, that leave a slope of the score too few
_WARPS = 4  # of a warpgroup
_COLUMNS = 32  # twice the narrowest panel
_PANELS = (64, 32, 16)  # columns that TMA swizzles


def has_slope(spec: AttentionSpec) -> bool:
    """Whether dS is multiplied by a derivative of the score function."""
    gradient = score_gradient(spec, with_gathers=False)
    return bool(gradient and gradient.slope)


def takes_two_steps(spec: AttentionSpec) -> bool:
    """Whether P is computed alone, and then dS from it: nothing that is found with dS needs more of the score, and
    nothing is dropped."""
    gradient = score_gradient(spec)
    if spec.dropout or gradient is None:
        return not spec.dropout
    return not gradient.slope and all(gather.shared == "distance" for gather in gradient.gathers)


@dataclass(frozen=True)
class HopperBackwardPlan(Checked):
    """The plan of the kernel whose blocks walk the queries of a tile of keys, 64 keys for each of two warpgroups.

    Attributes:
        tile_q: queries of a step, 64 or 128.
        stages: tiles of Q, and of dO, that shared memory holds at once: a step's products start before the last one's
            have ended.
        early_scores: the next step's scores start while dK and dV of this one are computed, which takes registers.
        heads_apart: a block for each query head, whose shares of dK and dV are added up in global memory; else a block
            walks the queries of all heads that share a head of K and V.
        in_turns: blocks add to a tile of dQ in the order of their tiles of keys, from the last one on, so that sums are
            the same bits in each run. Without it the deterministic mode has another kernel make dQ.
        finish_apart: another kernel turns the sums of dQ into dQ, as of head dims that are no multiples of 32, and of
            ragged batches, where a row's sequence has to be found. Else idle warps do so, for which those that compute
            have eight registers less.
    """

    tile_q: int
    stages: int = 2
    early_scores: bool = True
    heads_apart: bool = False
    in_turns: bool = False
    finish_apart: bool = False
    consumers: ClassVar[int] = 2
    blocks: ClassVar[int] = 1
    persistent: ClassVar[bool] = True
    packed_heads: ClassVar[int] = 1
    tile_k: ClassVar[int] = 2 * _ROWS

    @property
    def threads(self) -> int:
        return (self.consumers + 1) * WARPGROUP

    @property
    def producer_registers(self) -> int:
        return 24 if self.finish_apart else 40

    @property
    def consumer_registers(self) -> int:
        return 240 if self.finish_apart else 232

    @property
    def gradient_row_parts(self) -> int:
        """Parts along its rows in which the warpgroups divide a tile of dQ; along its columns they divide the rest."""
        return self.tile_q // _ROWS

    def finishes(self, spec: AttentionSpec, dq_apart: bool) -> bool:
        """Whether idle warps turn sums into dQ. dq_apart: another kernel makes it, without sums."""
        return not (self.finish_apart or spec.is_ragged or dq_apart or spec.head_dim % _COLUMNS)

    def head_columns(self, spec: AttentionSpec) -> int:
        """Columns of a row of Q, K and dQ: so many that both halves are panels."""
        return -(-spec.head_dim // _COLUMNS) * _COLUMNS

    def gradient_columns(self, spec: AttentionSpec) -> int:
        """Columns of a warpgroup's part of a tile of dQ."""
        return self.head_columns(spec) * self.gradient_row_parts // self.consumers

    def gradient_warps(self, spec: AttentionSpec) -> tuple[int, int]:
        """How many warps divide a tile of dQ along its rows, and along its columns."""
        return _WARPS * self.gradient_row_parts, self.consumers // self.gradient_row_parts

    def shares_registers(self, spec: AttentionSpec) -> bool:
        """Whether a part of dQ takes the registers of scores: as many, where products of a step overlap."""
        return self.gradient_columns(spec) == self.tile_q

    def head_panel(self, spec: AttentionSpec) -> int:
        """Columns of a panel of Q and K: the widest of which each part of dQ has whole ones."""
        return next(panel for panel in _PANELS if self.gradient_columns(spec) % panel == 0)

    def registers(self, spec: AttentionSpec) -> int:
        """What a thread holds at once: the sums of dK and dV; products in flight."""
        sums = (self.head_columns(spec) + padded(spec.value_dim)) // 2
        fragments = self.tile_q // 2  # P and dS as operands
        return sums + self.tile_q + fragments * self.early_scores

    def loads_early(self, dq_apart: bool) -> bool:
        """Whether the next tile's K is loaded while gradients are stored. dq_apart: another kernel makes dQ."""
        return not (dq_apart or self.heads_apart or self.finish_apart)

    def shared_memory(self, spec: AttentionSpec, dq_apart: bool = False) -> SharedMemoryLayout:
        """K and V; the stages of Q and dO; those of dS, and dQ; the statistics; the mbarriers; two work tiles.

        In the epilogue dV overlays V, and dK overlays K, or dQ where the next tile's K is loaded early.

        Args:
            dq_apart: another kernel makes dQ.
        """
        queries, keys = Extent("kTileQ", self.tile_q), Extent("kTileK", self.tile_k)
        head, value = Extent("kHeadDimPadded", self.head_columns(spec)), value_extent(spec)
        stages, score_stages = Extent("kStages", self.stages), Extent("kScoreStages", _SCORE_STAGES)
        work_bytes = literal(_RAGGED_WORK_BYTES if spec.is_ragged else _WORK_BYTES)
        barriers = key_barriers(stages, score_stages, dq_apart)
        panels, own_parts = "a panel of 64 keys for each warpgroup", "the parts of the warps side by side"
        summed = (
            Buffer("Score", "dS", (queries, keys), copies=score_stages, note=panels),
            Buffer("Gradient", "dQ", (queries, head), FLOAT, note=own_parts),
        )
        stored = (
            Buffer("KeyGradient", "dK", (keys, head), overlays="Gradient" if self.loads_early(dq_apart) else "Key"),
            Buffer("ValueGradient", "dV", (keys, value), overlays="Value"),
        )
        return SharedMemoryLayout(
            (
                Buffer("Key", "K", (keys, head)),
                Buffer("Value", "V", (keys, value)),
                Buffer("Query", "Q", (queries, head), copies=stages),
                Buffer("Output", "dO", (queries, value), copies=stages),
                *(() if dq_apart else summed),
                Buffer("Statistics", "L, D", (queries,), FLOAT2, copies=stages),
                mbarriers(barriers),
                Buffer("WorkTile", "work tile", (work_bytes,), BYTE, copies=literal(2)),
                *(() if self.heads_apart else stored),
            ),
            barriers,
        )

    def summary(self, shared_bytes: int) -> str:
        """What the kernel's header says of it."""
        early = ", the next scores early" if self.early_scores else ""
        heads = ", a block for each query head" if self.heads_apart else ", dQ added in turns" if self.in_turns else ""
        return (
            f"{self.tile_q} queries x {self.tile_k} keys, {self.consumers} warpgroups of {self.consumer_registers} "
            f"registers{early}{heads}, {self.stages} stages of Q and dO, {shared_bytes} bytes of shared memory"
        )

    def problem(self, spec: AttentionSpec, target: Target) -> str | None:
        """Why the plan contradicts itself, or does not fit the spec or the target; None where it does."""
        if target.backward_family != "hopper":
            return (
                f"it is a plan of the family hopper, and {target.name} takes {target.backward_family} for the backward"
            )
        if self.tile_q not in (_ROWS, 2 * _ROWS) or self.stages < 2:
            return f"tile_q={self.tile_q} must be 64 or 128, and stages={self.stages} at least 2"
        if self.heads_apart and spec.is_ragged:
            return "heads_apart=True: of ragged batches query heads that share a head of k and v share blocks"
        if self.in_turns and (unordered := self._unordered(spec)):
            return f"in_turns=True: {unordered}"
        if self.gradient_columns(spec) > self.tile_q:  # they share registers with scores
            columns = self.gradient_columns(spec)
            return f"tile_q={self.tile_q} has no registers for {columns} columns of dQ: take more queries"
        if self.registers(spec) > _ACCUMULATORS:
            return f"it takes {self.registers(spec)} registers of a thread for sums and products: take fewer queries"
        return shared_memory_problem(self.shared_bytes(spec), target, "take fewer queries or stages")

    def _unordered(self, spec: AttentionSpec) -> str | None:
        """Why a block does not know whether another one adds to a tile of dQ before it; None where it does."""
        if self.heads_apart:
            return "shares of dK and dV of query heads apart are added in any order: take one of the two"
        if spec.is_ragged:  # blocks of sequences whose offsets fall would wait for some that there are not
            return "blocks of ragged batches add to dQ in any order"
        visited = query_range(spec.mask.expression)
        if visited is None or not visitors_are_contiguous(visited):
            return "the tiles of keys that visit a tile of queries are not proven to stand side by side"
        return None


def _reads_many(spec: AttentionSpec) -> bool:
    """Whether elements that the score reads differ in most tiles; or gradients of them are summed."""
    return bool(gathers(spec)) or not is_clipped(spec)


_NARROW_DIM = 64
# The fastest of those measured on an H200, of 16384 tokens, bfloat16; none of them spills.
_NARROW = HopperBackwardPlan(128, early_scores=False)
_HEAVY = HopperBackwardPlan(64, early_scores=False, finish_apart=True)
_FULL, _MASKED = HopperBackwardPlan(64), HopperBackwardPlan(64, stages=3)


def choose_hopper_backward_plan(
    spec: AttentionSpec, target: Target, deterministic: bool = False
) -> HopperBackwardPlan | None:
    """The default plan of a spec; None where none of the family fits it.

    In the deterministic mode its blocks add to dQ in turns, if they can.
    """
    demand, plain = demand_of(spec), _FULL if spec.mask.expression == sympy.true else _MASKED
    narrow = max(spec.head_dim, spec.value_dim) <= _NARROW_DIM and takes_two_steps(spec)
    narrow &= demand.weight < Weight.HEAVY and not (spec.is_ragged and spec.score)
    loads = demand.weight == Weight.HEAVY
    loads |= demand.weight == Weight.LOADING and not demand.mask_axes and (deterministic or _reads_many(spec))
    preferred: tuple[HopperBackwardPlan, ...] = (_HEAVY,) if loads else (plain, _FULL)
    preferred = (_NARROW, *preferred) if narrow and not loads else preferred
    # A slope of few instructions beside the most sums; or places in the whole, drawn bits and scores: they want every
    # register.
    short = has_slope(spec) and not demand.long_score and plain.registers(spec) > _SHORT
    if short or (spec.sharded and spec.dropout):
        preferred = tuple(replace(plan, finish_apart=True) for plan in preferred)
    plans = [replace(plan, in_turns=True) for plan in preferred] if deterministic else []
    return next((plan for plan in (*plans, *preferred) if plan.problem(spec, target) is None), None)
