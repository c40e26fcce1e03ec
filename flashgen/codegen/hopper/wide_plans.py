"""Plans of Hopper's backward kernel of dK and dV for rows too wide for the registers of one warpgroup."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from flashgen.codegen.demand import Weight, demand_of
from flashgen.codegen.expressions.derivative_text import score_gradient
from flashgen.codegen.hopper.backward_plans import depends_on_p_alone, takes_two_steps
from flashgen.codegen.hopper.barriers import wide_key_barriers
from flashgen.codegen.hopper.plans import WARPGROUP, panel_columns
from flashgen.codegen.padding import element_sizes, head_extent, padded, value_extent
from flashgen.codegen.plan import Checked, shared_memory_problem
from flashgen.codegen.shared_memory import FLOAT, FLOAT2, Buffer, Extent, SharedMemoryLayout, mbarriers
from flashgen.codegen.targets import Target
from flashgen.language.spec import AttentionSpec

_EXCHANGE_STAGES = 2  # stages of the buffer by which one warpgroup passes scores to the other
_DS_STAGES = 2  # tiles of dS: one is written while dQ is computed from the other
_DQ_ROWS = 64  # of a wgmma
_DQ_COLUMNS = 32, 64  # of a chunk of dQ: registers hold two chunks of 32 columns, or one of 64
_MAX_ACCUMULATORS = 216  # registers of a thread for accumulators, products in flight and operands


Exchanged = Literal["probabilities", "factors", "products"]


def exchanged(spec: AttentionSpec) -> Exchanged:
    """Returns what the warpgroup that computes P passes to the one that computes dS.

    "probabilities": P, if dS follows from P alone. "factors": P times the derivative of the score function, and whether
    dropout dropped the score. "products": the product of q and k, if gradients of captured arrays need more of a score.
    """
    gradient = score_gradient(spec)
    if gradient and gradient.gathers:
        return "products"
    return "probabilities" if takes_two_steps(spec) else "factors"


@dataclass(frozen=True)
class HopperWidePlan(Checked):
    """The plan of the kernel whose CTAs loop over the queries of 64 keys.

    One warpgroup computes P and dV, and passes what `exchanged` returns to another, which computes dS and dK.

    Attributes:
        tile_q: queries of an iteration.
        stages: pipeline stages of Q and of dO. There are at least two, because the products of an iteration start
            before those of the previous one have completed.
        dq_columns: if it is not 0, a third warpgroup computes dQ from the dS of the second one, in chunks of 32 or 64
            columns, and adds them to an accumulator in global memory, in any order. A chunk of 32 columns is computed
            while the previous one is added. With 0, and in the deterministic mode, another kernel computes dQ.
    """

    tile_q: int = 64
    stages: int = 2
    dq_columns: int = 0
    consumers: ClassVar[int] = 2
    blocks: ClassVar[int] = 1
    packed_heads: ClassVar[int] = 1
    heads_apart: ClassVar[bool] = False
    in_turns: ClassVar[bool] = False
    persistent: ClassVar[bool] = False
    tile_k: ClassVar[int] = 64
    producer_registers: ClassVar[int] = 24
    dq_registers: ClassVar[int] = 64
    part_columns: ClassVar[int] = 128

    @property
    def with_dq(self) -> bool:
        return self.dq_columns > 0

    def in_mode(self, deterministic: bool) -> HopperWidePlan:
        """Returns the plan of a mode. CTAs add to a tile of dQ in any order, which the deterministic mode excludes."""
        return replace(self, dq_columns=0) if deterministic else self

    @property
    def dv_registers(self) -> int:
        return 216 if self.with_dq else 240

    @property
    def dk_registers(self) -> int:
        return 208 if self.with_dq else 240

    @property
    def threads(self) -> int:
        return (self.consumers + self.with_dq + 1) * WARPGROUP

    def head_columns(self, spec: AttentionSpec) -> int:
        """Returns the padded columns of a row of Q, K and dK."""
        return padded(spec.head_dim)

    def gradient_warps(self, spec: AttentionSpec) -> tuple[int, int]:
        """Returns how many warps divide a tile of dQ along its rows and along its columns."""
        return (4, 1) if self.with_dq else (0, 0)

    def gradient_chunks(self, spec: AttentionSpec) -> tuple[int, ...]:
        """Returns the columns of each chunk of a tile of dQ, if a warpgroup of the kernel computes it."""
        columns, step = self.head_columns(spec), self.dq_columns
        return tuple(min(step, columns - first) for first in range(0, columns, step)) if step else ()

    def head_panel(self, spec: AttentionSpec) -> int:
        """Returns the columns of a panel of Q, K and dK. A chunk of dQ has full panels of K."""
        columns = panel_columns(spec.head_dim, spec.element)
        return min(columns, self.dq_columns) if self.with_dq else columns

    def parts(self, columns: int) -> tuple[int, ...]:
        """Returns the columns of the wgmmas into which one of dK or dV is split, if a warpgroup computes dQ."""
        rest = columns - self.part_columns
        return (self.part_columns, rest) if rest > 0 else (columns,)

    def registers(self, spec: AttentionSpec) -> int:
        """Estimates the registers of a thread for an accumulator, scores and their factors, and an operand."""
        return max(padded(spec.head_dim), padded(spec.value_dim)) // 2 + self.tile_q + self.tile_q // 4

    def shared_memory(self, spec: AttentionSpec) -> SharedMemoryLayout:
        """Returns the layout: K and V, the stages of Q and dO, the passed scores, LSE and D, and the mbarriers.

        In the epilogue dK and dV overlay K and V.
        """
        queries, keys = Extent("kTileQ", self.tile_q), Extent("kTileK", self.tile_k)
        stages, exchange_stages = Extent("kStages", self.stages), Extent("kExchangeStages", _EXCHANGE_STAGES)
        ds_stages = Extent("kDsStages", _DS_STAGES)
        barriers = wide_key_barriers(stages, exchange_stages, ds_stages if self.with_dq else None)
        head, value = head_extent(spec), value_extent(spec)
        (element, kv_element), passed = element_sizes(spec), exchanged(spec)
        return SharedMemoryLayout(
            (
                Buffer("Key", "K", (keys, head), kv_element, member="keys"),
                Buffer("Value", "V", (keys, value), kv_element, member="values"),
                Buffer("Query", "Q", (queries, head), element, copies=stages, member="queries"),
                Buffer("DOutput", "dO", (queries, value), element, copies=stages, member="d_outputs"),
                Buffer(
                    "Exchange",
                    "P" if passed == "probabilities" else passed,
                    (queries, keys),
                    element if passed == "probabilities" else FLOAT,
                    copies=exchange_stages,
                    note="in the order of the fragments",
                    member="exchange",
                ),
                *([Buffer("Ds", "dS", (queries, keys), element, copies=ds_stages, member="ds")] * self.with_dq),
                Buffer("LseAndD", "L, D", (queries,), FLOAT2, copies=stages, member="lse_and_d"),
                mbarriers(barriers),
                Buffer("KeyGradient", "dK", (keys, head), element, overlays="Key", member="dk"),
                Buffer("ValueGradient", "dV", (keys, value), element, overlays="Value", member="dv"),
            ),
            barriers,
        )

    def summary(self, shared_bytes: int) -> str:
        """Returns the line that the kernel's header has about the plan."""
        which = f"one warpgroup for dV and one for dK, of {self.dv_registers} registers"
        if self.with_dq:
            registers = f"{self.dv_registers}, {self.dk_registers} and {self.dq_registers} registers"
            which = f"a warpgroup each for dV, dK and dQ, of {registers}"
        return (
            f"{self.tile_q} queries x {self.tile_k} keys, {which}, {self.stages} stages of Q and dO, {shared_bytes} "
            "bytes of shared memory"
        )

    def problem(self, spec: AttentionSpec, target: Target) -> str | None:
        """Returns why the plan is inconsistent or does not fit the spec or the target; None if it is valid."""
        if target.backward_family != "hopper":
            return (
                f"it is a plan of the family hopper, and {target.name} takes {target.backward_family} for the backward"
            )
        if self.tile_q % 16 or not 16 <= self.tile_q <= 256 or self.stages < 2:
            return f"tile_q={self.tile_q} must be a multiple of 16 up to 256, and stages={self.stages} at least 2"
        if self.dq_columns not in (0, *_DQ_COLUMNS):
            return f"dq_columns={self.dq_columns} must be 0, {' or '.join(map(str, _DQ_COLUMNS))}"
        if self.with_dq and self.tile_q != _DQ_ROWS:
            return f"dq_columns={self.dq_columns}: dQ has {_DQ_ROWS} queries, and not tile_q={self.tile_q}"
        if self.with_dq and not depends_on_p_alone(spec):
            return (
                f"dq_columns={self.dq_columns} leaves no registers for dropout, derivatives of the score function, "
                "gradients of captured arrays or dense arrays"
            )
        if self.registers(spec) > _MAX_ACCUMULATORS:
            return f"it takes {self.registers(spec)} registers of a thread for accumulators: take fewer queries"
        return shared_memory_problem(self.shared_bytes(spec), target, "take fewer queries or stages")


# The fastest plans measured on an H200 with head dim 256 and 16384 tokens in bfloat16.
_WITH_DQ = HopperWidePlan(stages=3, dq_columns=64), HopperWidePlan(dq_columns=64)
_DEEP, _DEFAULT, _LIGHT = HopperWidePlan(48, stages=3), HopperWidePlan(), HopperWidePlan(32, stages=3)


def choose_hopper_wide_plan(spec: AttentionSpec, target: Target, deterministic: bool) -> HopperWidePlan:
    """Returns the default plan of a spec.

    One kernel computes all gradients if the registers hold what the mask and the score function need. It has fewer
    queries if dropout or the score function needs more registers.
    """
    demand = demand_of(spec)
    loads = exchanged(spec) == "products" and demand.weight in (Weight.LOADING, Weight.HEAVY)
    if demand.drops or loads:
        return _LIGHT
    light = demand.weight < Weight.LOADING or (demand.weight == Weight.LOADING and demand.mask_axes == 1)
    preferred = (*_WITH_DQ, _DEEP) if light and not deterministic else (_DEEP,)
    return next((plan for plan in preferred if plan.problem(spec, target) is None), _DEFAULT)
