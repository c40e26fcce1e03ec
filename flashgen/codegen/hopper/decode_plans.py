"""Plans of Hopper's decode kernel: few queries of many heads, as wide rows have them, attend to many keys.

The rows of a tile are the queries of all query heads of one KV head, as in the decode kernel of mma.sync. More than 16
rows are limited by the matrix products rather than by the bandwidth of memory, so this kernel multiplies 64 rows by
wgmma. Its consumer warpgroups share the columns of the output as in the forward kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from flashgen.codegen.demand import demand_of
from flashgen.codegen.hopper.barriers import WARPS_OF_GROUP, key_tile_barriers
from flashgen.codegen.hopper.measured_plans import wide_tiles
from flashgen.codegen.hopper.pages import cache_problem
from flashgen.codegen.hopper.plans import MAX_PASSED, MAX_SHARED, ROWS, HopperPlan, passed_buffer, staged_buffers
from flashgen.codegen.mma_sync.decode_plans import WORK_UNIT_BYTES, merge_kernel_cost, search_buffers
from flashgen.codegen.padding import MMA_K, WARP, element_sizes, head_extent, is_wide, padded_value_dim
from flashgen.codegen.plan import Checked, shared_memory_problem
from flashgen.codegen.shared_memory import Buffer, Extent, SharedMemoryLayout, mbarriers
from flashgen.codegen.targets import Target
from flashgen.language.spec import AttentionSpec

_CONSUMERS = 2
_MAX_COLUMNS = 256  # of a wgmma
_MIN_HALF = 16  # columns of the narrowest panel
_MAX_RECORDS = 128  # of a tile of records, of which each lane of the producer looks up the page of 4


@dataclass(frozen=True)
class HopperDecodePlan(Checked):
    """The plan of Hopper's decode kernel, which has a producer warpgroup and two consumer warpgroups.

    Attributes:
        tile_k: keys of a tile.
        stages: stages of the pipelines of K and of V in shared memory.
        scheduled: with a paged KV cache, whether CTAs divide the keys of all sequences equally (stream_k.py). Otherwise
            every sequence has the same number of splits.
    """

    tile_k: int
    stages: int = 2
    scheduled: bool = False
    tile_q: ClassVar[int] = ROWS
    consumers: ClassVar[int] = _CONSUMERS
    split: ClassVar[int] = _CONSUMERS
    takes_turns: ClassVar[bool] = False
    blocks: ClassVar[int] = 1
    packed_heads: ClassVar[int] = 1  # how many heads share a tile is a size of the call
    groups: ClassVar[int] = 1
    # The fixed cost of an output tile counts for short sequences alone: equal lengths then divide evenly among CTAs.
    tile_overhead: ClassVar[int] = 0
    min_length: ClassVar[int] = 4
    splits_keys: ClassVar[bool] = True

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers that name the plan: keys and stages."""
        return self.tile_k, self.stages

    def with_schedule(self, scheduled: bool) -> HopperDecodePlan:
        """Returns the plan for CTAs that divide the keys of all sequences equally, or not."""
        return replace(self, scheduled=scheduled)

    @property
    def forward(self) -> HopperPlan:
        """The plan of the forward kernel with the same mainloop."""
        return HopperPlan(self.consumers, self.tile_k, self.stages, split=self.split)

    @property
    def threads(self) -> int:
        return self.forward.threads

    @property
    def warps(self) -> int:
        """The number of consumer warps."""
        return self.forward.warps

    def merge_cost(self, spec: AttentionSpec, splits: int) -> float:
        """Returns the cost of merging the partial outputs of several splits, in iterations: another kernel does it."""
        return merge_kernel_cost(splits)

    @property
    def register_budget(self) -> int:
        return self.forward.register_budget

    def part(self, spec: AttentionSpec) -> str:
        """Returns the name of a default plan's kernel among the decode kernels."""
        return f"decode{'_scheduled' if self.scheduled else ''}_rows{self.tile_q}"

    def show_options(self, spec: AttentionSpec) -> str:
        return f"--pass decode --kernel {self.part(spec)}"

    def registers(self, spec: AttentionSpec) -> int:
        return self.forward.registers(spec)

    def matrix_cycles(self, spec: AttentionSpec) -> float:
        return self.forward.matrix_cycles(spec)

    def exposed(self, blocks: int) -> float:
        return self.forward.exposed(blocks)

    def summary(self, spec: AttentionSpec) -> str:
        """Returns the line that the kernel's header has about the plan."""
        units = "stream-K work units, " if self.scheduled else ""
        tiles = "K, of which V is a part" if spec.shared_kv else "K and V"
        return (
            f"{self.tile_q} rows x {self.tile_k} keys, {self.consumers} warpgroups of "
            f"{self.forward.warpgroup_registers(spec)[1]} registers that share the rows, {self.stages} stage(s) of "
            f"{tiles}, {units}{self.shared_bytes(spec)} bytes of shared memory"
        )

    def passed_stages(self, spec: AttentionSpec) -> int:
        """Returns the tiles of P in shared memory: 2 if they fit."""
        return MAX_PASSED if self._shared_memory(spec, MAX_PASSED).total_bytes <= MAX_SHARED else 1

    def shared_memory(self, spec: AttentionSpec) -> SharedMemoryLayout:
        """Returns the layout: Q, the stages of K and of V, P that is passed between warpgroups, and the mbarriers.

        In scheduled plans the search for the work unit overlays Q at the start.
        """
        return self._shared_memory(spec, self.passed_stages(spec))

    def _shared_memory(self, spec: AttentionSpec, passed_stages: int) -> SharedMemoryLayout:
        keys, stages = Extent("kTileK", self.tile_k), Extent("kStages", self.stages)
        passed, element = Extent("kPassedStages", passed_stages), element_sizes(spec)[0]
        copies_pages = bool(spec.page_size) and not spec.kv_record
        writers = WARPS_OF_GROUP if spec.kv_record else 1
        barriers = key_tile_barriers(stages, copies_pages, spec.shared_kv, passed, writers=writers)
        rows = Extent("kTileQ", self.tile_q)
        return SharedMemoryLayout(
            (
                Buffer("Query", "Q", (rows, head_extent(spec)), element, member="queries"),
                *staged_buffers(spec, keys, stages),
                passed_buffer(keys, passed, element),
                mbarriers(barriers),
                *(search_buffers(self.threads // WARP, WORK_UNIT_BYTES) if self.scheduled else ()),
            ),
            barriers,
        )

    def problem(self, spec: AttentionSpec, target: Target) -> str | None:
        """Returns why the plan is inconsistent or does not fit the spec or the target; None if it is valid."""
        if target.family != "hopper":
            return f"it is a plan of the family hopper, and {target.name} is of {target.family}"
        if self.stages < 1 + spec.shared_kv:
            return f"stages={self.stages} must be positive, and at least 2 with shared_kv=True"
        if not MMA_K <= self.tile_k <= _MAX_COLUMNS or self.tile_k % MMA_K:
            return f"tile_k={self.tile_k} must be a multiple of 16 up to {_MAX_COLUMNS}"
        if self.scheduled and not spec.page_size:
            return "scheduled=True needs a paged KV cache, whose lengths the device knows: declare page_size=..."
        if spec.kv_record and self.tile_k > _MAX_RECORDS:
            return f"tile_k={self.tile_k} must be at most {_MAX_RECORDS} with kv_dtype={spec.kv_dtype!r}"
        return variant_problem(spec) or shared_memory_problem(
            self.shared_bytes(spec), target, "take fewer keys or stages"
        )


def variant_problem(spec: AttentionSpec) -> str | None:
    """Returns why Hopper's decode kernel cannot run a spec; None if it can."""
    if not is_wide(spec):
        return f"it is for rows of more than {_MAX_COLUMNS} columns; others take the decode kernel of mma.sync"
    if padded_value_dim(spec) // _CONSUMERS < _MIN_HALF or padded_value_dim(spec) > _CONSUMERS * _MAX_COLUMNS:
        return f"value_dim={spec.value_dim} leaves a warpgroup no panel of columns"
    if spec.dropout:
        return "dropout is for the decode kernel of mma.sync; here it is drawn for rows of one head"
    if demand_of(spec).listed:
        return f"mask {spec.mask.name} reads tile lists, which the decode kernel of mma.sync does"
    return cache_problem(spec, converts_records=True)


@lru_cache(maxsize=256)
def choose_hopper_decode_plan(spec: AttentionSpec, target: Target, scheduled: bool = False) -> HopperDecodePlan | None:
    """Returns the default plan of a spec, or None if the decode kernel of mma.sync runs it."""
    plans = (HopperDecodePlan(keys, stages, scheduled) for keys, stages in wide_tiles(spec))
    return next((plan for plan in plans if not plan.problem(spec, target)), None)
