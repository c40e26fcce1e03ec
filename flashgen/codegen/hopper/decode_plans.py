"""Plans of Hopper's decode kernel: few queries of many heads, as wide rows have them, attend to many keys.

The rows of a tile are the queries of all query heads of one KV head, as in the decode kernel of mma.sync. More than 16
rows are limited by the matrix products rather than by the bandwidth of memory, so this kernel multiplies 64 rows by
wgmma. The score warpgroup computes the scores and P. Two value warpgroups multiply P by V, and each has half of the
columns of the output. The score warpgroup holds most of Q in registers, which leaves shared memory for three tiles
of K. With two, the next tile is not loaded in time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import ClassVar

from flashgen.codegen.demand import Weight, demand_of
from flashgen.codegen.hopper.barriers import WARPS_OF_GROUP, decode_barriers
from flashgen.codegen.hopper.measured_plans import wide_keys
from flashgen.codegen.hopper.pages import cache_problem
from flashgen.codegen.hopper.plans import ROWS, SWIZZLE_BYTES, WARPGROUP, HopperPlan, staged_buffers
from flashgen.codegen.mma_sync.decode_plans import WORK_UNIT_BYTES, merge_kernel_cost, search_buffers
from flashgen.codegen.padding import (
    MMA_K,
    WARP,
    element_sizes,
    is_wide,
    padded_head_dim,
    padded_value_dim,
    value_extent,
)
from flashgen.codegen.plan import Checked, shared_memory_problem
from flashgen.codegen.shared_memory import FLOAT, Buffer, Extent, SharedMemoryLayout, mbarriers
from flashgen.codegen.targets import Target
from flashgen.language.spec import AttentionSpec

_VALUE_WARPGROUPS = 2
_MAX_COLUMNS = 256  # of a wgmma
# Registers of a thread of each kind of warpgroup. With records there is a producer warpgroup, which converts them.
# Otherwise the consumers load tiles themselves, and have its registers.
_REGISTERS = {"score": 184, "value": 160}
_REGISTERS_WITH_RECORDS = {"score": 104, "value": 160, "producer": 88}
# Registers of a thread of the score warpgroup beside its scores and its part of Q, by whether V is a part of K.
_OTHER_REGISTERS = {True: 40, False: 56}
_COLUMNS_PER_REGISTER = 4  # of 64 rows of Q in 16 bits, in each thread of a warpgroup
_PANEL = 64  # columns of Q
# P * V of a tile runs after Q * K^T of the next one, whose tile must have a stage of its own.
_MIN_STAGES = 2
_OUTPUT_ROW = Extent("sizeof(OutputRow)", 16)
_MAX_RECORDS = 128  # of a tile of records, of which each lane of the producer looks up the page of 4


@dataclass(frozen=True)
class HopperDecodePlan(Checked):
    """The plan of Hopper's decode kernel, which has a score warpgroup and two value warpgroups.

    Attributes:
        tile_k: keys of a tile.
        stages: stages of the tiles of K and of V in shared memory.
        scheduled: with a paged KV cache, whether CTAs divide the keys of all sequences equally (stream_k.py). Otherwise
            every sequence has the same number of splits.
    """

    tile_k: int
    stages: int = 2
    scheduled: bool = False
    tile_q: ClassVar[int] = ROWS
    consumers: ClassVar[int] = 1 + _VALUE_WARPGROUPS
    split: ClassVar[int] = _VALUE_WARPGROUPS
    takes_turns: ClassVar[bool] = False
    passed_stages: ClassVar[int] = 2
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
    def panels(self) -> HopperPlan:
        """The plan of the forward kernel whose tiles have the same panels of columns."""
        return HopperPlan(self.split, self.tile_k, self.stages, split=self.split)

    @property
    def threads(self) -> int:
        """The threads of the consumer warpgroups."""
        return self.consumers * WARPGROUP

    @property
    def warps(self) -> int:
        return self.consumers * WARPS_OF_GROUP

    def launched_threads(self, spec: AttentionSpec) -> int:
        """Returns the threads of a CTA: those of the consumers, and of a producer warpgroup that converts records."""
        return self.threads + (WARPGROUP if spec.kv_record else 0)

    def merge_cost(self, spec: AttentionSpec, splits: int) -> float:
        """Returns the cost of merging the partial outputs of several splits, in iterations: another kernel does it."""
        return merge_kernel_cost(splits)

    @property
    def register_budget(self) -> int:
        return _REGISTERS["score"]

    def part(self, spec: AttentionSpec) -> str:
        """Returns the name of a default plan's kernel among the decode kernels."""
        return f"decode{'_scheduled' if self.scheduled else ''}_rows{self.tile_q}"

    def show_options(self, spec: AttentionSpec) -> str:
        return f"--pass decode --kernel {self.part(spec)}"

    def warpgroup_registers(self, spec: AttentionSpec) -> dict[str, int]:
        """Returns the registers of a thread of each kind of warpgroup (setmaxnreg)."""
        return dict(_REGISTERS_WITH_RECORDS if spec.kv_record else _REGISTERS)

    def held_columns(self, spec: AttentionSpec) -> int:
        """Returns the columns of Q that the score warpgroup holds in registers. Others are in shared memory.

        They pass through a stage of K, so they are no more than fit it.
        Variants that need registers themselves, and records, whose producer does, have all of Q in shared memory.
        """
        if spec.kv_record or demand_of(spec).weight > Weight.PLAIN:
            return 0
        other = _OTHER_REGISTERS[spec.shared_kv] + self._score_registers
        available = (_REGISTERS["score"] - other) * _COLUMNS_PER_REGISTER
        staged = self.tile_k * (padded_value_dim(spec) if spec.shared_kv else padded_head_dim(spec)) // ROWS
        return min(min(available, staged) // _PANEL * _PANEL, padded_head_dim(spec))

    def registers(self, spec: AttentionSpec) -> int:
        """Estimates the registers of a thread of the score warpgroup: its scores, its part of Q, and others."""
        return (
            self._score_registers + self.held_columns(spec) // _COLUMNS_PER_REGISTER + _OTHER_REGISTERS[spec.shared_kv]
        )

    @property
    def _score_registers(self) -> int:
        return ROWS * self.tile_k // WARPGROUP

    def matrix_cycles(self, spec: AttentionSpec) -> float:
        return self.panels.matrix_cycles(spec)

    def exposed(self, blocks: int) -> float:
        return self.panels.exposed(blocks)

    def summary(self, spec: AttentionSpec) -> str:
        """Returns the line that the kernel's header has about the plan."""
        units = "stream-K work units, " if self.scheduled else ""
        tiles = "K, of which V is a part" if spec.shared_kv else "K and V"
        held, registers = self.held_columns(spec), self.warpgroup_registers(spec)
        producer = f"a producer warpgroup of {registers['producer']}, " if spec.kv_record else ""
        queries = f" and {held} columns of Q in them" if held else ""
        return (
            f"{self.tile_q} rows x {self.tile_k} keys, a score warpgroup of {registers['score']} registers{queries}, "
            f"{self.split} value warpgroups of {registers['value']}, {producer}{self.stages} stage(s) of {tiles}, "
            f"{units}{self.shared_bytes(spec)} bytes of shared memory"
        )

    def shared_memory(self, spec: AttentionSpec) -> SharedMemoryLayout:
        """Returns the layout: the columns of Q that are not held, the stages of K, V and P, and the mbarriers.

        If V is a part of K, P of a tile replaces the other columns of K, which only its scores need. In scheduled plans
        the search for the work unit overlays `OutputRow` at the start.
        """
        keys, stages = Extent("kTileK", self.tile_k), Extent("kStages", self.stages)
        rows, passed = Extent("kTileQ", self.tile_q), Extent("kPassedStages", self.passed_stages)
        element, rest = element_sizes(spec)[0], rest_columns(spec)
        writers = WARPS_OF_GROUP if spec.kv_record else 1
        barriers = decode_barriers(stages, passed, spec.shared_kv, bool(rest), writers, self.scheduled)
        stored = Extent("(kHeadDimPadded - kHeldColumns)", padded_head_dim(spec) - self.held_columns(spec))
        query = Buffer("Query", "Q", (rows, stored), element, member="queries")
        key = Buffer("Key", "K", (keys, value_extent(spec)), element, stages, member="keys")
        p = Buffer("P", "P", (rows, keys), element, member="probabilities")
        other = Buffer("Rest", "the other columns of K", (keys, Extent("kRestColumns", rest)), element, member="rest")
        parts = (other, p) if rest else (p,)
        warps = self.launched_threads(spec) // WARP
        return SharedMemoryLayout(
            (
                *((query,) if stored.value else ()),
                *((key,) if spec.shared_kv else staged_buffers(spec, keys, stages)),
                Buffer("Passed", "stages of P", (), None, passed, parts, bool(rest), alignment=SWIZZLE_BYTES),
                Buffer("Rescale", "factors that rescale the output", (rows,), FLOAT, passed, member="rescale_factors"),
                Buffer("OutputRow", "where output rows begin", (rows,), _OUTPUT_ROW, member="output_rows"),
                mbarriers(barriers),
                *(search_buffers(warps, WORK_UNIT_BYTES, overlays="OutputRow") if self.scheduled else ()),
            ),
            barriers,
        )

    def problem(self, spec: AttentionSpec, target: Target) -> str | None:
        """Returns why the plan is inconsistent or does not fit the spec or the target; None if it is valid."""
        if target.family != "hopper":
            return f"it is a plan of the family hopper, and {target.name} is of {target.family}"
        if self.stages < _MIN_STAGES:
            return f"stages={self.stages} must be at least {_MIN_STAGES}"
        if not MMA_K <= self.tile_k <= _MAX_COLUMNS or self.tile_k % MMA_K:
            return f"tile_k={self.tile_k} must be a multiple of 16 up to {_MAX_COLUMNS}"
        if self.scheduled and not spec.page_size:
            return "scheduled=True needs a paged KV cache, whose lengths the device knows: declare page_size=..."
        if spec.kv_record and self.tile_k > _MAX_RECORDS:
            return f"tile_k={self.tile_k} must be at most {_MAX_RECORDS} with kv_dtype={spec.kv_dtype!r}"
        return variant_problem(spec) or shared_memory_problem(
            self.shared_bytes(spec), target, "take fewer keys or stages"
        )


def rest_columns(spec: AttentionSpec) -> int:
    """Returns the columns of K beyond those that are V; 0 if K and V are apart."""
    return padded_head_dim(spec) - padded_value_dim(spec) if spec.shared_kv else 0


def variant_problem(spec: AttentionSpec) -> str | None:
    """Returns why Hopper's decode kernel cannot run a spec; None if it can."""
    if not is_wide(spec):
        return f"it is for rows of more than {_MAX_COLUMNS} columns; others take the decode kernel of mma.sync"
    if spec.dropout:
        return "dropout is for the decode kernel of mma.sync; here it is drawn for rows of one head"
    if demand_of(spec).listed:
        return f"mask {spec.mask.name} reads tile lists, which the decode kernel of mma.sync does"
    return cache_problem(spec, converts_records=True)


@lru_cache(maxsize=256)
def choose_hopper_decode_plan(spec: AttentionSpec, target: Target, scheduled: bool = False) -> HopperDecodePlan | None:
    """Returns the default plan of a spec, or None if the decode kernel of mma.sync runs it."""
    plans = (HopperDecodePlan(keys, stages, scheduled) for keys, stages in product(wide_keys(spec), (3, 2)))
    return next((plan for plan in plans if not plan.problem(spec, target)), None)
