"""Plans of Hopper's backward kernel of all gradients. A plan depends on spec and target, never on lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import sympy

from flashgen.analysis.closed_forms.monotonicity import visitors_are_contiguous
from flashgen.analysis.closed_forms.tile_ranges import query_range
from flashgen.analysis.derivatives import gathers
from flashgen.codegen.demand import Weight, demand_of, is_clipped
from flashgen.codegen.expressions.derivative_text import score_gradient
from flashgen.codegen.expressions.row_elements import paired_mask_elements, transposed_elements
from flashgen.codegen.hopper.array_tiles import array_tile, max_array_stages
from flashgen.codegen.hopper.barriers import key_barriers
from flashgen.codegen.hopper.batch_traits import batch_traits
from flashgen.codegen.hopper.plans import MAX_SHARED, WARPGROUP, swizzled_columns
from flashgen.codegen.padding import element_sizes, padded, value_extent
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
from flashgen.language.spec import AttentionSpec

_ROWS = 64  # of a wgmma
_DS_STAGES = 2  # tiles of dS: one is written while dQ is computed from the other
_MAX_ACCUMULATORS = 224  # registers of a thread for accumulators and products in flight
_MAX_IN_CHUNKS = 208  # of plans that compute dQ in chunks
_CROWDED = 200  # accumulator registers above which a derivative of the score function does not fit
_WARPS = 4  # of a warpgroup


def has_slope(spec: AttentionSpec) -> bool:
    """Whether dS is multiplied by a derivative of the score function."""
    gradient = score_gradient(spec, with_gathers=False)
    return bool(gradient and gradient.slope)


def takes_two_steps(spec: AttentionSpec) -> bool:
    """Whether dS is computed from P alone, in a second step.

    This requires that no gradient needs more of the score than P, and that there is no dropout.
    """
    gradient = score_gradient(spec)
    if spec.dropout or gradient is None:
        return not spec.dropout
    return not gradient.slope and all(gather.shared == "distance" for gather in gradient.gathers)


def depends_on_p_alone(spec: AttentionSpec) -> bool:
    """Whether all gradients follow from P alone, and no array is read in pairs or has a gradient."""
    gradient = score_gradient(spec)
    in_pairs = transposed_elements(spec) or paired_mask_elements(spec)
    return takes_two_steps(spec) and not (gradient and gradient.gathers) and not in_pairs


def _two_panels(spec: AttentionSpec) -> int:
    """Returns the columns of two of the narrowest panels."""
    return 2 * swizzled_columns(spec.element)[-1]


@dataclass(frozen=True)
class HopperBackwardPlan(Checked):
    """The plan of the kernel whose CTAs loop over the queries of a tile of keys, 64 keys for each of two warpgroups.

    Attributes:
        tile_q: queries of an iteration, 64 or 128.
        stages: pipeline stages of Q and of dO. There are at least two, because the products of an iteration start
            before those of the previous one have completed.
        early_scores: the scores of the next iteration start while dK and dV of this one are computed, which needs more
            registers.
        heads_apart: one CTA per query head, which accumulates partial dK and dV in global memory. Otherwise a CTA loops
            over the queries of all heads that share a KV head.
        in_turns: CTAs accumulate to a tile of dQ in descending order of their tiles of keys, so that results are the
            same bits in every run. Without it the deterministic mode computes dQ in another kernel.
        finish_apart: another kernel converts the dQ accumulator to dQ. That is always so for head dims that are not
            multiples of 32, and for varlen batches, where the sequence of a row has to be found. Otherwise idle warps
            convert it, and the threads of consumer warpgroups have eight registers less.
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
        """The parts into which warpgroups divide the rows of a tile of dQ. The other warpgroups divide its columns."""
        return self.tile_q // _ROWS

    def finishes(self, spec: AttentionSpec, dq_apart: bool) -> bool:
        """Whether idle warps convert the dQ accumulator. With `dq_apart` another kernel computes dQ without one."""
        apart = self.finish_apart or dq_apart or spec.head_dim % _two_panels(spec)
        return batch_traits(spec).converts_dq and not apart

    def head_columns(self, spec: AttentionSpec) -> int:
        """Returns the columns of a row of Q, K and dQ, padded so that each half consists of full panels."""
        return -(-spec.head_dim // _two_panels(spec)) * _two_panels(spec)

    def gradient_columns(self, spec: AttentionSpec) -> int:
        """Returns the columns of a warpgroup's part of a tile of dQ."""
        return self.head_columns(spec) * self.gradient_row_parts // self.consumers

    def gradient_chunks(self, spec: AttentionSpec) -> tuple[tuple[int, int], ...]:
        """Returns the first column and the columns of each chunk of a warpgroup's part of a tile of dQ.

        If there are several, they are computed one after the other, and the first one reuses the registers of S.
        """
        columns = self.gradient_columns(spec)
        return tuple((first, min(self.tile_q, columns - first)) for first in range(0, columns, self.tile_q))

    def adds_dq(self, spec: AttentionSpec) -> bool:
        """Whether consumer warps add chunks of dQ to the accumulator, instead of staging it for a dQ writer."""
        return len(self.gradient_chunks(spec)) > 1

    def gradient_warps(self, spec: AttentionSpec) -> tuple[int, int]:
        """Returns how many warps divide a tile of dQ along its rows and along its columns."""
        return _WARPS * self.gradient_row_parts, self.consumers // self.gradient_row_parts

    def shares_registers(self, spec: AttentionSpec) -> bool:
        """Whether a warpgroup's part of dQ reuses the registers of scores, which are as many."""
        return self.gradient_columns(spec) == self.tile_q

    def head_panel(self, spec: AttentionSpec) -> int:
        """Returns the columns of a panel of Q and K: the widest that divides each chunk of each part of dQ."""
        chunks = self.gradient_chunks(spec)
        return next(
            panel for panel in swizzled_columns(spec.element) if not any(columns % panel for _, columns in chunks)
        )

    def registers(self, spec: AttentionSpec) -> int:
        """Estimates the registers of a thread for the accumulators of dK and dV and for products in flight."""
        sums = (self.head_columns(spec) + padded(spec.value_dim)) // 2
        if self.adds_dq(spec):  # S, dP or a chunk of dQ, beside P as an operand or the other chunk
            _, last_columns = self.gradient_chunks(spec)[-1]
            return sums + self.tile_q // 2 + max(self.tile_q // 4, last_columns // 2)
        fragments = self.tile_q // 2  # P and dS as operands
        return sums + self.tile_q + fragments * self.early_scores

    def loads_early(self, dq_apart: bool) -> bool:
        """Whether K of the next work tile is loaded during the epilogue. `dq_apart`: another kernel computes dQ."""
        return not (dq_apart or self.heads_apart or self.finish_apart)

    def array_stages(self, spec: AttentionSpec, dq_apart: bool = False) -> int:
        """Returns the tiles of a captured array in shared memory; 0 if elements are read from global memory.

        The warps that load them need the registers of plans without `finish_apart`.
        """
        if self.finish_apart or self.adds_dq(spec) or not array_tile(spec, self.tile_k):
            return 0
        return max_array_stages(lambda stages: self._shared_memory(spec, dq_apart, stages), MAX_SHARED)

    def array_warps(self, dq_apart: bool) -> int:
        """Returns the warps that load tiles of a captured array: those beside the producer and the dQ writers."""
        return _WARPS - 1 - (0 if dq_apart else 2 if self.in_turns else 1)

    def shared_memory(self, spec: AttentionSpec, dq_apart: bool = False) -> SharedMemoryLayout:
        """Returns the layout.

        It has K and V, the stages of Q and dO, the stages of dS, dQ, LSE and D, tiles of a captured array, the
        mbarriers, and the coordinates of two work tiles. In the epilogue dV overlays V, and dK overlays K, or dQ if K
        of the next work tile is loaded early.

        Args:
            dq_apart: another kernel computes dQ.
        """
        return self._shared_memory(spec, dq_apart, self.array_stages(spec, dq_apart))

    def _shared_memory(self, spec: AttentionSpec, dq_apart: bool, array_stages: int) -> SharedMemoryLayout:
        queries, keys = Extent("kTileQ", self.tile_q), Extent("kTileK", self.tile_k)
        head, value = Extent("kHeadDimPadded", self.head_columns(spec)), value_extent(spec)
        element, kv_element = element_sizes(spec)
        stages, ds_stages = Extent("kStages", self.stages), Extent("kDsStages", _DS_STAGES)
        work_bytes = literal(batch_traits(spec).key_tile_bytes)
        arrays = Extent("kArrayStages", array_stages) if array_stages else None
        tile = array_tile(spec, self.tile_k) if arrays else None
        barriers = key_barriers(stages, ds_stages, dq_apart, not self.adds_dq(spec), self.in_turns, arrays)
        panels, own_parts = "a panel of 64 keys for each warpgroup", "the parts of the warps side by side"
        ds = Buffer("Ds", "dS", (queries, keys), element, copies=ds_stages, note=panels, member="ds")
        staged = Buffer("Dq", "dQ", (queries, head), FLOAT, note=own_parts, member="dq")
        summed = (ds,) if self.adds_dq(spec) else (ds, staged)
        over_keys = "Dq" if self.loads_early(dq_apart) else "Key"
        stored = (
            Buffer("Dk", "dK", (keys, head), element, overlays=over_keys, member="dk"),
            Buffer("Dv", "dV", (keys, value), element, overlays="Value", member="dv"),
        )
        return SharedMemoryLayout(
            (
                Buffer("Key", "K", (keys, head), kv_element, member="keys"),
                Buffer("Value", "V", (keys, value), kv_element, member="values"),
                Buffer("Query", "Q", (queries, head), element, copies=stages, member="queries"),
                Buffer("Do", "dO", (queries, value), element, copies=stages, member="d_o"),
                *(() if dq_apart else summed),
                Buffer("LseAndD", "L, D", (queries,), FLOAT2, copies=stages, member="lse_and_d"),
                *((tile.buffer(queries, arrays),) if tile and arrays else ()),
                mbarriers(barriers),
                Buffer("WorkTile", "work tile", (work_bytes,), BYTE, copies=literal(2)),
                *(() if self.heads_apart else stored),
            ),
            barriers,
        )

    def summary(self, shared_bytes: int) -> str:
        """Returns the line that the kernel's header has about the plan."""
        early = ", the next S overlaps dK and dV" if self.early_scores else ""
        heads = (
            ", one CTA per query head" if self.heads_apart else ", dQ added in a fixed order" if self.in_turns else ""
        )
        return (
            f"{self.tile_q} queries x {self.tile_k} keys, {self.consumers} consumer warpgroups of "
            f"{self.consumer_registers} registers{early}{heads}, {self.stages} stages of Q and dO, "
            f"{shared_bytes} bytes of shared memory"
        )

    def problem(self, spec: AttentionSpec, target: Target) -> str | None:
        """Returns why the plan is inconsistent or does not fit the spec or the target; None if it is valid."""
        if target.backward_family != "hopper":
            return (
                f"it is a plan of the family hopper, and {target.name} takes {target.backward_family} for the backward"
            )
        if self.tile_q not in (_ROWS, 2 * _ROWS) or self.stages < 2:
            return f"tile_q={self.tile_q} must be 64 or 128, and stages={self.stages} at least 2"
        if self.heads_apart and not batch_traits(spec).splits_heads:
            return "heads_apart=True: varlen batches have no kernel with one CTA per query head"
        if self.in_turns and (unordered := self._unordered(spec)):
            return f"in_turns=True: {unordered}"
        if self.adds_dq(spec) and (self.early_scores or self.loads_early(dq_apart=False)):
            return (
                f"tile_q={self.tile_q} has registers for {self.tile_q} of {self.gradient_columns(spec)} columns of dQ: "
                "take more queries, or early_scores=False and finish_apart=True"
            )
        if self.adds_dq(spec) and not depends_on_p_alone(spec):
            return (
                f"tile_q={self.tile_q} has registers for {self.tile_q} of {self.gradient_columns(spec)} columns of dQ, "
                "and none for dropout, derivatives of the score function, gradients of captured arrays or dense arrays"
            )
        if self.registers(spec) > (_MAX_IN_CHUNKS if self.adds_dq(spec) else _MAX_ACCUMULATORS):
            return f"it takes {self.registers(spec)} registers of a thread for accumulators: take fewer queries"
        return shared_memory_problem(self.shared_bytes(spec), target, "take fewer queries or stages")

    def _unordered(self, spec: AttentionSpec) -> str | None:
        """Returns why a CTA cannot know which CTAs accumulate to a tile of dQ before it; None if it can."""
        if self.heads_apart:
            return (
                "CTAs of single query heads (heads_apart) accumulate dK and dV in any order: leave out one of the two"
            )
        if not batch_traits(spec).orders_dq:
            return "CTAs of varlen batches add to dQ in any order"
        if self.adds_dq(spec):
            return f"the warps of a CTA add chunks of {self.gradient_columns(spec)} columns to dQ in any order"
        visited = query_range(spec.mask.expression)
        if visited is None or not visitors_are_contiguous(visited):
            return "the tiles of keys that visit a tile of queries are not proven to be contiguous"
        return None


def _reads_many(spec: AttentionSpec) -> bool:
    """Whether the array elements that the score reads differ in most tiles, or have gradients that are accumulated."""
    return bool(gathers(spec)) or not is_clipped(spec)


_NARROW_DIM = 64
# The fastest plans measured on an H200 with 16384 tokens in bfloat16. None of them spills.
_NARROW = HopperBackwardPlan(128, early_scores=False)
_HEAVY = HopperBackwardPlan(64, early_scores=False, finish_apart=True)
_PAIRS = HopperBackwardPlan(64)  # for elements of captured arrays that are loaded as tiles, or in pairs
_NARROW_PAIRS = 32  # columns beside which 128 queries leave registers for pairs
_FULL, _MASKED = HopperBackwardPlan(64), HopperBackwardPlan(64, stages=3)


def with_split_heads(plan: Any) -> HopperBackwardPlan | None:
    """Returns the plan with one CTA per query head; None for a plan of another class, which has no such kernel."""
    return replace(plan, heads_apart=True) if isinstance(plan, HopperBackwardPlan) else None


def choose_hopper_backward_plan(
    spec: AttentionSpec, target: Target, deterministic: bool = False
) -> HopperBackwardPlan | None:
    """Returns the default plan of a spec, or None if no plan of this kind fits it.

    In the deterministic mode its CTAs accumulate dQ in a fixed order if the spec allows this.
    """
    demand, plain = demand_of(spec), _FULL if spec.mask.expression == sympy.true else _MASKED
    narrow = max(spec.head_dim, spec.value_dim) <= _NARROW_DIM and takes_two_steps(spec)
    narrow &= demand.weight < Weight.HEAVY and (spec.score is None or batch_traits(spec).spares_registers)
    loads = demand.weight == Weight.HEAVY
    loads |= demand.weight == Weight.LOADING and not demand.mask_axes and (deterministic or _reads_many(spec))
    preferred: tuple[HopperBackwardPlan, ...] = (plain, _FULL)
    if loads:
        preferred = () if _HEAVY.adds_dq(spec) else (_HEAVY,)
    preferred = (_NARROW, *preferred) if narrow and not loads else preferred
    light = demand.weight != Weight.LOADING or demand.mask_axes == 1
    if _HEAVY.adds_dq(spec) and depends_on_p_alone(spec) and light and not loads and not deterministic:
        preferred = (*preferred, _HEAVY)
    if transposed_elements(spec) or paired_mask_elements(spec):
        preferred = (_NARROW, _PAIRS) if spec.max_dim <= _NARROW_PAIRS and takes_two_steps(spec) else (_PAIRS,)
        crowds = spec.max_dim > _NARROW_DIM and not batch_traits(spec).spares_registers
        if crowds and transposed_elements(spec):  # 232 registers would spill
            preferred = (replace(_PAIRS, finish_apart=True),)
    # These need every register: a short derivative of the score beside the most accumulators, or global positions of a
    # sharded call beside random bits and scores.
    crowded = has_slope(spec) and not demand.long_score and plain.registers(spec) > _CROWDED
    if crowded or (spec.sharded and spec.dropout):
        preferred = tuple(replace(plan, finish_apart=True) for plan in preferred)
    loads_early = demand.weight == Weight.HEAVY and takes_two_steps(spec) and not _HEAVY.adds_dq(spec)
    if deterministic and loads_early and spec.max_dim > _NARROW_DIM:  # with semaphores the loaded elements would spill
        preferred, deterministic = (_HEAVY,), False
    plans = [replace(plan, in_turns=True) for plan in preferred] if deterministic else []
    return next((plan for plan in (*plans, *preferred) if plan.problem(spec, target) is None), None)
