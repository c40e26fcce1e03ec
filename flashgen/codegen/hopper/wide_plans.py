"""How Hopper's backward kernel of dK and dV divides its work where rows are too wide for one warpgroup's registers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flashgen.codegen.demand import Weight, demand_of
from flashgen.codegen.expressions.derivative_text import score_gradient
from flashgen.codegen.hopper.backward_plans import takes_two_steps
from flashgen.codegen.hopper.barriers import wide_key_barriers
from flashgen.codegen.hopper.plans import WARPGROUP, panel_columns
from flashgen.codegen.plan import Checked, shared_memory_problem
from flashgen.codegen.shared_memory import ELEMENT, FLOAT, FLOAT2, Buffer, Extent, SharedMemoryLayout, mbarriers
from flashgen.codegen.targets import Target
from flashgen.codegen.tiling import head_extent, padded, value_extent
from flashgen.language.spec import AttentionSpec

_SCORE_STAGES = 2  # tiles of what one warpgroup hands over to the other
_ACCUMULATORS = 216  # registers of a thread that sums, products in flight and operands may take


HandedOver = Literal["probabilities", "factors", "products"]


def handed_over(spec: AttentionSpec) -> HandedOver:
    """What the warpgroup that finds P hands over to that which finds dS.

    Where dS follows from P alone, P. With a slope of the score, or dropout: P times the slope, and whether a score was
    dropped. Where gradients of captures ask for more of a score: its product of q and k.
    """
    gradient = score_gradient(spec)
    if gradient and gradient.gathers:
        return "products"
    return "probabilities" if takes_two_steps(spec) else "factors"


@dataclass(frozen=True)
class HopperWidePlan(Checked):
    """The plan of the kernel whose blocks walk the queries of 64 keys: one warpgroup for P and dV, one for dS and dK.

    What the second gets of the first says `handed_over`.

    Attributes:
        tile_q: queries of a step.
        stages: tiles of Q, and of dO, that shared memory holds at once: a step's products start before the last one's
            have ended.
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
        """Columns of a row of Q, K and dK."""
        return padded(spec.head_dim)

    def gradient_warps(self, spec: AttentionSpec) -> tuple[int, int]:
        """None divide a tile of dQ, which another kernel makes."""
        return 0, 0

    def head_panel(self, spec: AttentionSpec) -> int:
        """Columns of a panel of Q, K and dK."""
        return panel_columns(spec.head_dim)

    def registers(self, spec: AttentionSpec) -> int:
        """What a thread holds at once: a sum, a step's scores and what they are multiplied by, an operand."""
        return max(padded(spec.head_dim), padded(spec.value_dim)) // 2 + self.tile_q + self.tile_q // 4

    def shared_memory(self, spec: AttentionSpec) -> SharedMemoryLayout:
        """K and V; the stages of Q, dO, of what is handed over, and of the statistics; the mbarriers.

        In the epilogue dK and dV overlay K and V.
        """
        queries, keys = Extent("kTileQ", self.tile_q), Extent("kTileK", self.tile_k)
        stages, score_stages = Extent("kStages", self.stages), Extent("kScoreStages", _SCORE_STAGES)
        head, value, barriers = head_extent(spec), value_extent(spec), wide_key_barriers(stages, score_stages)
        label, element = ("P", ELEMENT) if handed_over(spec) == "probabilities" else ("handed over", FLOAT)
        return SharedMemoryLayout(
            (
                Buffer("Key", "K", (keys, head)),
                Buffer("Value", "V", (keys, value)),
                Buffer("Query", "Q", (queries, head), copies=stages),
                Buffer("Output", "dO", (queries, value), copies=stages),
                Buffer("Score", label, (queries, keys), element, copies=score_stages, note="as lanes hold it"),
                Buffer("Statistics", "L, D", (queries,), FLOAT2, copies=stages),
                mbarriers(barriers),
                Buffer("KeyGradient", "dK", (keys, head), overlays="Key"),
                Buffer("ValueGradient", "dV", (keys, value), overlays="Value"),
            ),
            barriers,
        )

    def summary(self, shared_bytes: int) -> str:
        """What the kernel's header says of it."""
        return (
            f"{self.tile_q} queries x {self.tile_k} keys, a warpgroup for dV and one for dK, of "
            f"{self.consumer_registers} registers, {self.stages} stages of Q and dO, {shared_bytes} bytes of shared "
            "memory"
        )

    def problem(self, spec: AttentionSpec, target: Target) -> str | None:
        """Why the plan contradicts itself, or does not fit the spec or the target; None where it does."""
        if target.backward_family != "hopper":
            return (
                f"it is a plan of the family hopper, and {target.name} takes {target.backward_family} for the backward"
            )
        if self.tile_q % 16 or not 16 <= self.tile_q <= 256 or self.stages < 2:
            return f"tile_q={self.tile_q} must be a multiple of 16 up to 256, and stages={self.stages} at least 2"
        if self.registers(spec) > _ACCUMULATORS:
            return f"it takes {self.registers(spec)} registers of a thread for sums and products: take fewer queries"
        return shared_memory_problem(self.shared_bytes(spec), target, "take fewer queries or stages")


# The faster of those measured on an H200, of head dim 256 and 4096 tokens, bfloat16, causal.
_DEFAULT, _LIGHT = HopperWidePlan(), HopperWidePlan(32, stages=3)


def choose_hopper_wide_plan(spec: AttentionSpec, target: Target) -> HopperWidePlan:
    """The default plan of a spec: of fewer queries where what is found of scores takes more registers than are left."""
    demand = demand_of(spec)
    loads = handed_over(spec) == "products" and demand.weight in (Weight.LOADING, Weight.HEAVY)
    return _LIGHT if demand.drops or loads else _DEFAULT
