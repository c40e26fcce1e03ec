"""Plans of Hopper's backward kernels for rows of more than 256 columns, which run in clusters of two CTAs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from flashgen.codegen.hopper.backward_plans import depends_on_p_alone
from flashgen.codegen.hopper.barriers import cluster_barriers
from flashgen.codegen.hopper.plans import widest_panel
from flashgen.codegen.padding import MAX_UNSPLIT, element_sizes, head_extent, is_wide, padded_head_dim, padded_value_dim
from flashgen.codegen.plan import Checked, shared_memory_problem
from flashgen.codegen.shared_memory import FLOAT2, Buffer, Extent, SharedMemoryLayout, mbarriers
from flashgen.codegen.targets import Target
from flashgen.language.spec import AttentionSpec

_ROWS = 64  # of a wgmma
_MAX_ROWS = 128  # streamed rows, whose scores and fragments the registers of the score warpgroup hold


def cluster_problem(spec: AttentionSpec) -> str | None:
    """Returns why the kernels of clusters cannot run a spec; None if they can."""
    if not is_wide(spec):
        return f"rows of up to {MAX_UNSPLIT} columns have kernels without clusters"
    if spec.shared_kv:
        return "shared_kv=True: the CTAs of a cluster hold K and V apart"
    if padded_head_dim(spec) != padded_value_dim(spec) or padded_head_dim(spec) > 2 * MAX_UNSPLIT:
        return f"{spec.widest}: Q and V must have equally many columns, up to {2 * MAX_UNSPLIT}, once they are padded"
    if spec.grad_dtype:
        return f"grad_dtype={spec.grad_dtype!r}: the CTAs of a cluster store 16-bit gradients"
    if not depends_on_p_alone(spec):
        return (
            "dS must follow from P alone: dropout, derivatives of the score function, gradients of captured arrays and "
            "dense arrays are for the kernels of mma.sync"
        )
    return None


@dataclass(frozen=True)
class _ClusterPlan(Checked):
    """What the plans of both kernels share.

    A CTA holds 64 rows and streams tiles of other rows. One of its warpgroups computes scores, two accumulate one half
    of the columns of a gradient each, and one is the producer.
    """

    stages: int = 3
    passed_stages: ClassVar[int] = 2
    consumers: ClassVar[int] = 3
    blocks: ClassVar[int] = 1
    packed_heads: ClassVar[int] = 1
    heads_apart: ClassVar[bool] = False
    in_turns: ClassVar[bool] = False
    persistent: ClassVar[bool] = False
    threads: ClassVar[int] = 4 * 128
    producer_registers: ClassVar[int] = 32
    score_registers: ClassVar[int] = 144
    gradient_registers: ClassVar[int] = 168

    def head_columns(self, spec: AttentionSpec) -> int:
        """Returns the padded columns of a row."""
        return padded_head_dim(spec)

    def gradient_warps(self, spec: AttentionSpec) -> tuple[int, int]:
        """Returns (0, 0): no warps divide an accumulator of dQ."""
        return 0, 0

    def panel(self, spec: AttentionSpec) -> int:
        """Returns the columns of a panel of all tiles. Each half of the columns consists of whole panels."""
        return widest_panel(spec.element, padded_head_dim(spec) // 2)

    def first_columns(self, spec: AttentionSpec) -> int:
        """Returns the columns of the first part of a warpgroup's half, in whole panels. The second part is the rest."""
        panels = padded_head_dim(spec) // 2 // self.panel(spec)
        return -(-panels // 2) * self.panel(spec)

    def _layout(
        self,
        spec: AttentionSpec,
        resident: tuple[str, Extent],
        streamed: tuple[str, Extent],
        gradient: str,
        reads_lse_and_d: bool,
    ) -> SharedMemoryLayout:
        """Returns the layout: a tile that the CTA holds, the stages of streamed tiles, and those of passed fragments.

        Args:
            resident: The label and the rows of the tile that the CTA holds, which the gradient overlays.
            streamed: The label and the rows of a streamed tile.
            reads_lse_and_d: Whether LSE and D are those of streamed rows, so that they are streamed as well.
        """
        stages, passed = Extent("kStages", self.stages), Extent("kPassedStages", self.passed_stages)
        (element, _), head = element_sizes(spec), head_extent(spec)
        barriers = cluster_barriers(stages, passed, reads_lse_and_d)
        note = "in the order of the fragments"
        lse_and_d = Buffer("LseAndD", "L, D", (streamed[1],), FLOAT2, copies=stages, member="lse_and_d")
        return SharedMemoryLayout(
            (
                Buffer("Resident", resident[0], (resident[1], head), element, member="resident"),
                Buffer("Streamed", streamed[0], (streamed[1], head), element, copies=stages, member="streamed"),
                Buffer(
                    "Passed", "P or dS", (resident[1], streamed[1]), element, copies=passed, note=note, member="passed"
                ),
                *((lse_and_d,) if reads_lse_and_d else ()),
                mbarriers(barriers),
                Buffer("Gradient", gradient, (resident[1], head), element, overlays="Resident", member="gradient"),
            ),
            barriers,
        )

    def _rows_problem(self, spec: AttentionSpec, target: Target, name: str, rows: int) -> str | None:
        """Returns why a number of streamed rows does not fit."""
        if target.backward_family != "hopper":
            return (
                f"it is a plan of the family hopper, and {target.name} takes {target.backward_family} for the backward"
            )
        if why := cluster_problem(spec):
            return why
        if rows % 16 or not 16 <= rows <= _MAX_ROWS or self.stages < 2:
            return f"{name}={rows} must be a multiple of 16 up to {_MAX_ROWS}, and stages={self.stages} at least 2"
        return None


@dataclass(frozen=True)
class HopperClusterPlan(_ClusterPlan):
    """The plan of the kernel of dK and dV, whose clusters loop over the queries of 64 keys.

    One CTA holds K, streams Q and computes P and dK. The other one holds V, streams dO and computes dS and dV.

    Attributes:
        tile_q: queries of an iteration.
        stages: pipeline stages of Q, or of dO.
    """

    tile_q: int = 48
    tile_k: ClassVar[int] = _ROWS

    def shared_memory(self, spec: AttentionSpec) -> SharedMemoryLayout:
        """Returns the layout of either CTA."""
        keys, queries = Extent("kTileK", self.tile_k), Extent("kTileQ", self.tile_q)
        return self._layout(spec, ("K or V", keys), ("Q or dO", queries), "dK or dV", reads_lse_and_d=True)

    def summary(self, shared_bytes: int) -> str:
        """Returns the line that the kernel's header has about the plan."""
        return (
            f"{self.tile_q} queries x {self.tile_k} keys of two CTAs, {self.stages} stages of Q or dO, {shared_bytes} "
            "bytes of shared memory"
        )

    def problem(self, spec: AttentionSpec, target: Target) -> str | None:
        """Returns why the plan is inconsistent or does not fit the spec or the target; None if it is valid."""
        why = self._rows_problem(spec, target, "tile_q", self.tile_q)
        return why or shared_memory_problem(self.shared_bytes(spec), target, "take fewer queries or stages")


@dataclass(frozen=True)
class HopperClusterQueriesPlan(_ClusterPlan):
    """The plan of the kernel of dQ, whose clusters loop over the keys of 64 queries.

    One CTA holds Q, streams K and computes P and dQ. The other one holds dO, streams V and computes dS.

    Attributes:
        tile_k: keys of an iteration.
        stages: pipeline stages of K, or of V.
    """

    tile_k: int = 48
    tile_q: ClassVar[int] = _ROWS

    def shared_memory(self, spec: AttentionSpec) -> SharedMemoryLayout:
        """Returns the layout of either CTA."""
        queries, keys = Extent("kTileQ", self.tile_q), Extent("kTileK", self.tile_k)
        return self._layout(spec, ("Q or dO", queries), ("K or V", keys), "dQ", reads_lse_and_d=False)

    def summary(self, shared_bytes: int) -> str:
        """Returns the line that the kernel's header has about the plan."""
        return (
            f"{self.tile_q} queries x {self.tile_k} keys of two CTAs, {self.stages} stages of K or V, {shared_bytes} "
            "bytes of shared memory"
        )

    def problem(self, spec: AttentionSpec, target: Target) -> str | None:
        """Returns why the plan is inconsistent or does not fit the spec or the target; None if it is valid."""
        why = self._rows_problem(spec, target, "tile_k", self.tile_k)
        return why or shared_memory_problem(self.shared_bytes(spec), target, "take fewer keys or stages")


def takes_cluster(spec: AttentionSpec, plan: Any) -> bool:
    """Returns whether a plan is one of clusters; None stands for the default plan of a spec with wide rows."""
    return isinstance(plan, HopperClusterPlan) or (plan is None and not cluster_problem(spec))
