"""Plans of Hopper's backward kernel that computes dQ. A plan depends on the spec, never on lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashgen.codegen.demand import Weight, demand_of
from flashgen.codegen.hopper.barriers import query_barriers
from flashgen.codegen.hopper.plans import WARPGROUP, panel_columns
from flashgen.codegen.padding import DROPOUT_COLUMNS, element_sizes, head_extent, padded, value_extent
from flashgen.codegen.plan import Checked, shared_memory_problem
from flashgen.codegen.shared_memory import Buffer, Extent, SharedMemoryLayout, mbarriers
from flashgen.codegen.targets import Target
from flashgen.language.spec import AttentionSpec

_ROWS = 64  # of a wgmma
_MAX_ACCUMULATORS = 216  # registers of a thread for accumulators, products in flight and operands


@dataclass(frozen=True)
class HopperQueriesPlan(Checked):
    """The plan of the kernel whose CTAs loop over the keys of a tile of queries, 64 queries for each of two warpgroups.

    Attributes:
        tile_k: keys of an iteration.
        key_stages: pipeline stages of K. There are at least two, because the scores of an iteration start before the
            previous one has released its K.
        value_stages: pipeline stages of V.
    """

    tile_k: int
    key_stages: int = 2
    value_stages: int = 2
    consumers: ClassVar[int] = 2
    blocks: ClassVar[int] = 1
    packed_heads: ClassVar[int] = 1
    heads_apart: ClassVar[bool] = False
    tile_q: ClassVar[int] = 2 * _ROWS
    producer_registers: ClassVar[int] = 24
    consumer_registers: ClassVar[int] = 240

    @property
    def threads(self) -> int:
        return (self.consumers + 1) * WARPGROUP

    def head_panel(self, spec: AttentionSpec) -> int:
        """Returns the columns of a panel of Q, K and dQ."""
        return panel_columns(spec.head_dim, spec.element)

    def registers(self, spec: AttentionSpec) -> int:
        """Estimates the registers of a thread for the dQ accumulator, products in flight and dS as an operand."""
        return padded(spec.head_dim) // 2 + self.tile_k + self.tile_k // 4

    def shared_memory(self, spec: AttentionSpec) -> SharedMemoryLayout:
        """Returns the layout: Q and dO of each consumer warpgroup, the stages of K and of V, and the mbarriers.

        In the epilogue dQ overlays Q.
        """
        rows, keys = Extent("kPartQ", _ROWS), Extent("kTileK", self.tile_k)
        consumers = Extent("kConsumers", self.consumers)
        key_stages, value_stages = Extent("kKeyStages", self.key_stages), Extent("kValueStages", self.value_stages)
        element, kv_element = element_sizes(spec)
        head, value, barriers = head_extent(spec), value_extent(spec), query_barriers(key_stages, value_stages)
        return SharedMemoryLayout(
            (
                Buffer("Query", "Q", (rows, head), element, copies=consumers, member="queries", index="warpgroup"),
                Buffer("Do", "dO", (rows, value), element, copies=consumers, member="d_o", index="warpgroup"),
                Buffer("Key", "K", (keys, head), kv_element, copies=key_stages, member="keys"),
                Buffer("Value", "V", (keys, value), kv_element, copies=value_stages, member="values"),
                mbarriers(barriers),
                Buffer(
                    "QueryGradient",
                    "dQ",
                    (rows, head),
                    element,
                    copies=consumers,
                    overlays="Query",
                    member="dq",
                    index="warpgroup",
                ),
            ),
            barriers,
        )

    def summary(self, shared_bytes: int) -> str:
        """Returns the line that the kernel's header has about the plan."""
        return (
            f"{self.tile_q} queries x {self.tile_k} keys, {self.consumers} warpgroups of {self.consumer_registers} "
            f"registers, {self.key_stages} stages of K, {self.value_stages} of V, {shared_bytes} bytes of shared memory"
        )

    def problem(self, spec: AttentionSpec, target: Target) -> str | None:
        """Returns why the plan is inconsistent or does not fit the spec or the target; None if it is valid."""
        if target.backward_family != "hopper":
            return (
                f"it is a plan of the family hopper, and {target.name} takes {target.backward_family} for the backward"
            )
        if self.tile_k % (DROPOUT_COLUMNS if spec.dropout else 16) or not 16 <= self.tile_k <= 256:
            return f"tile_k={self.tile_k} must be a multiple of 16, of 32 with dropout, up to 256"
        if self.key_stages < 2 or self.value_stages < 1:
            return f"key_stages={self.key_stages} must be at least 2, and value_stages={self.value_stages} positive"
        if self.registers(spec) > _MAX_ACCUMULATORS:
            return f"it takes {self.registers(spec)} registers of a thread for accumulators: take fewer keys"
        return shared_memory_problem(self.shared_bytes(spec), target, "take fewer keys or stages")


_LIGHT = (HopperQueriesPlan(128),)
_PREFERENCE = (HopperQueriesPlan(64), HopperQueriesPlan(64, 2, 1))
_HEAVY_AND_WIDE = (HopperQueriesPlan(32, 3),)
_WIDE_DIM = 128


def choose_hopper_queries_plan(spec: AttentionSpec, target: Target) -> HopperQueriesPlan:
    """Returns the default plan of a spec."""
    demand = demand_of(spec)
    heavy = demand.drops and (demand.weight == Weight.HEAVY or demand.reads_by_head_and_position)
    wide = _HEAVY_AND_WIDE if heavy and spec.head_dim > _WIDE_DIM else ()
    preferred = _LIGHT if demand.weight < Weight.LOADING else wide
    return next(plan for plan in (*preferred, *_PREFERENCE) if plan.problem(spec, target) is None)
