"""Plans of Hopper's backward kernel of dK and dV for rows too wide for the registers of one warpgroup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flashgen.codegen.demand import Weight, demand_of
from flashgen.codegen.expressions.derivative_text import score_gradient
from flashgen.codegen.hopper.backward_plans import takes_two_steps
from flashgen.codegen.hopper.barriers import wide_key_barriers
from flashgen.codegen.hopper.plans import WARPGROUP, panel_columns
from flashgen.codegen.padding import element_sizes, head_extent, padded, value_extent
from flashgen.codegen.plan import Checked, shared_memory_problem
from flashgen.codegen.shared_memory import FLOAT, FLOAT2, Buffer, Extent, SharedMemoryLayout, mbarriers
from flashgen.codegen.targets import Target
from flashgen.language.spec import AttentionSpec

_EXCHANGE_STAGES = 2  # stages of the buffer by which one warpgroup passes scores to the other
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

    One warpgroup computes P and dV, and passes what `exchanged` returns to another, which computes dS and dK. Another
    kernel computes dQ.

    Attributes:
        tile_q: queries of an iteration.
        stages: pipeline stages of Q and of dO. There are at least two, because the products of an iteration start
            before those of the previous one have completed.
    """

    tile_q: int = 64
    stages: int = 2
    consumers: ClassVar[int] = 2
    blocks: ClassVar[int] = 1
    packed_heads: ClassVar[int] = 1
    heads_apart: ClassVar[bool] = False
    in_turns: ClassVar[bool] = False
    persistent: ClassVar[bool] = False
    tile_k: ClassVar[int] = 64
    producer_registers: ClassVar[int] = 24
    consumer_registers: ClassVar[int] = 240

    @property
    def threads(self) -> int:
        return (self.consumers + 1) * WARPGROUP

    def head_columns(self, spec: AttentionSpec) -> int:
        """Returns the padded columns of a row of Q, K and dK."""
        return padded(spec.head_dim)

    def gradient_warps(self, spec: AttentionSpec) -> tuple[int, int]:
        """Returns how many warps divide a tile of dQ: none, because another kernel computes it."""
        return 0, 0

    def head_panel(self, spec: AttentionSpec) -> int:
        """Returns the columns of a panel of Q, K and dK."""
        return panel_columns(spec.head_dim, spec.element)

    def registers(self, spec: AttentionSpec) -> int:
        """Estimates the registers of a thread for an accumulator, scores and their factors, and an operand."""
        return max(padded(spec.head_dim), padded(spec.value_dim)) // 2 + self.tile_q + self.tile_q // 4

    def shared_memory(self, spec: AttentionSpec) -> SharedMemoryLayout:
        """Returns the layout: K and V, the stages of Q and dO, the passed scores, LSE and D, and the mbarriers.

        In the epilogue dK and dV overlay K and V.
        """
        queries, keys = Extent("kTileQ", self.tile_q), Extent("kTileK", self.tile_k)
        stages, exchange_stages = Extent("kStages", self.stages), Extent("kExchangeStages", _EXCHANGE_STAGES)
        barriers = wide_key_barriers(stages, exchange_stages)
        head, value = head_extent(spec), value_extent(spec)
        (element, kv_element), passed = element_sizes(spec), exchanged(spec)
        return SharedMemoryLayout(
            (
                Buffer("Key", "K", (keys, head), kv_element, member="keys"),
                Buffer("Value", "V", (keys, value), kv_element, member="values"),
                Buffer("Query", "Q", (queries, head), element, copies=stages, member="queries"),
                Buffer("Do", "dO", (queries, value), element, copies=stages, member="d_o"),
                Buffer(
                    "Exchange",
                    "P" if passed == "probabilities" else passed,
                    (queries, keys),
                    element if passed == "probabilities" else FLOAT,
                    copies=exchange_stages,
                    note="in the order of the fragments",
                    member="exchange",
                ),
                Buffer("LseAndD", "L, D", (queries,), FLOAT2, copies=stages, member="lse_and_d"),
                mbarriers(barriers),
                Buffer("Dk", "dK", (keys, head), element, overlays="Key", member="dk"),
                Buffer("Dv", "dV", (keys, value), element, overlays="Value", member="dv"),
            ),
            barriers,
        )

    def summary(self, shared_bytes: int) -> str:
        """Returns the line that the kernel's header has about the plan."""
        return (
            f"{self.tile_q} queries x {self.tile_k} keys, one warpgroup for dV and one for dK, of "
            f"{self.consumer_registers} registers, {self.stages} stages of Q and dO, {shared_bytes} bytes of shared "
            "memory"
        )

    def problem(self, spec: AttentionSpec, target: Target) -> str | None:
        """Returns why the plan is inconsistent or does not fit the spec or the target; None if it is valid."""
        if target.backward_family != "hopper":
            return (
                f"it is a plan of the family hopper, and {target.name} takes {target.backward_family} for the backward"
            )
        if self.tile_q % 16 or not 16 <= self.tile_q <= 256 or self.stages < 2:
            return f"tile_q={self.tile_q} must be a multiple of 16 up to 256, and stages={self.stages} at least 2"
        if self.registers(spec) > _MAX_ACCUMULATORS:
            return f"it takes {self.registers(spec)} registers of a thread for accumulators: take fewer queries"
        return shared_memory_problem(self.shared_bytes(spec), target, "take fewer queries or stages")


# The fastest plans measured on an H200 with head dim 256 and 16384 tokens in bfloat16.
_DEEP, _DEFAULT, _LIGHT = HopperWidePlan(48, stages=3), HopperWidePlan(), HopperWidePlan(32, stages=3)


def choose_hopper_wide_plan(spec: AttentionSpec, target: Target) -> HopperWidePlan:
    """Returns the default plan of a spec, with fewer queries if dropout or the score function needs more registers."""
    demand = demand_of(spec)
    loads = exchanged(spec) == "products" and demand.weight in (Weight.LOADING, Weight.HEAVY)
    if demand.drops or loads:
        return _LIGHT
    return _DEEP if _DEEP.problem(spec, target) is None else _DEFAULT
