"""Plans of the decode kernel: few queries attend to many keys, which are split over the GPU.

The rows of a tile are the queries of all query heads of one KV head, so that K and V are read once for all of them.
Each warp of a CTA loops over its own tiles of keys and prefetches them: no warp waits for another, and an SM has
blocks x warps x (stages - 1) tiles of K and V in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from flashgen.codegen.demand import Weight, demand_of
from flashgen.codegen.mma_sync.forward_plans import MMA_ROWS, ForwardPlan
from flashgen.codegen.plan import Checked, shared_memory_problem
from flashgen.codegen.shared_memory import (
    BYTE,
    FLOAT,
    FLOAT2,
    INT,
    Buffer,
    Extent,
    SharedMemoryLayout,
    literal,
)
from flashgen.codegen.targets import Target
from flashgen.codegen.tile_list_kernel import depends_on_head
from flashgen.codegen.tiling import (
    DROPOUT_COLUMNS,
    MAX_THREADS,
    MAX_UNSPLIT,
    MMA_DEPTH,
    RESERVED_SHARED,
    WARP,
    element_sizes,
    head_extent,
    padded,
    value_extent,
)
from flashgen.codegen.workload import Workload, steps_of
from flashgen.errors import SEE_LIMITS
from flashgen.language.spec import AttentionSpec

TILE_OVERHEAD = 4  # cost of an output tile's first copies and its partial output, in tiles of keys
WORK_UNIT_BYTES = 16  # shared memory of the current stream-K work unit
MAX_STREAM_K_TILES = 2**30  # tiles of keys of all sequences, which stream-K kernels count in int32
PARTIAL_PADDING = 8  # floats between the rows of a warp's partial output, so that 8 rows of lanes write to other banks
_STAGE_BYTES = 8192  # of a warp's tile of K and V
_MAX_KEYS = 64  # of a tile
_MAX_BLOCKS = 2
FEW_ROWS = 16  # of the default plan's tiles
_MANY_ROWS = 32
_MAX_REGISTERS = 248  # estimate for a thread; some kernels take a few more
_MAX_STREAM_K_REGISTERS = 224  # the same for stream-K plans
_WIDE_RING = (8, 3)  # (warps, stages) for 8-bit keys
_PLAIN_RING = (4, 3, 2)  # (warps, stages, blocks) of the default plans with which other_few_row_plans was compared
_RINGS = (
    (4, 4),
    (4, 3),
    (4, 2),
    (2, 4),
    (2, 3),
    (2, 2),
    (1, 2),
)  # (warps, stages); among plans with as many tiles in flight the first wins
_SMALLEST_RING = (1, 1)  # if nothing else fits: wide heads with dropout on sm_75, where tiles have 32 keys


def search_buffers(warps: int, found_bytes: int) -> tuple[Buffer, Buffer]:
    """Returns the buffers in which a CTA finds its work unit by a prefix sum over the batch, before it loads Q.

    They hold the partial sums of the warps, and the result of `found_bytes` bytes.
    """
    return (
        Buffer("WarpSums", "warp sums", (Extent("kWarps", warps),), INT, overlays="Query"),
        Buffer("Found", "found work unit", (literal(found_bytes),), BYTE),
    )


@dataclass(frozen=True)
class DecodePlan(Checked):
    """The plan of the decode kernel.

    Attributes:
        tile_q: rows of a tile: (query, head) pairs of one KV head, heads fastest. All warps share them.
        tile_k: keys of a tile, which one warp processes per iteration.
        warps: warps of a CTA. They process its tiles of keys round-robin.
        stages: pipeline stages of K and V for each warp; with one stage nothing is prefetched.
        blocks: CTAs that should fit on an SM at once, which limits the registers of a thread.
        scheduled: with a paged KV cache, whether CTAs divide the keys of all sequences equally (stream_k.py). Otherwise
            every sequence has the same number of splits.
    """

    tile_q: int
    tile_k: int
    warps: int
    stages: int
    blocks: int = 1
    scheduled: bool = False
    packed_heads: ClassVar[int] = 1  # how many heads share a tile is a size of the call

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def register_budget(self) -> int:
        return self._forward.register_budget

    @property
    def _forward(self) -> ForwardPlan:
        """The forward plan whose warps do as much work per iteration: here each warp has all rows of the tile."""
        return ForwardPlan(self.tile_q * self.warps, self.tile_k, self.warps, blocks=self.blocks)

    def part(self, spec: AttentionSpec) -> str:
        """Returns the name of a default plan's kernel among the decode kernels."""
        if self.scheduled or self.tile_q != FEW_ROWS:
            rows = f"_rows{self.tile_q}" if self.tile_q != FEW_ROWS else ""
            return f"decode{'_scheduled' if self.scheduled else ''}{rows}"
        many, long = _many_and_long_plans(spec)
        return "decode_many" if self == many else "decode_long" if self == long else "decode"

    def show_options(self, spec: AttentionSpec) -> str:
        part = self.part(spec)
        return "--pass decode" + (f" --kernel {part}" if part != "decode" else "")

    def registers(self, spec: AttentionSpec) -> int:
        """Estimates the registers of a thread: its float32 scores and output, and what the variant needs."""
        return self._forward.registers(spec)

    def matrix_cycles(self, spec: AttentionSpec) -> float:
        """Estimates the cycles of one iteration of all warps."""
        return self._forward.matrix_cycles(spec)

    def exposed(self, blocks: int) -> float:
        return self._forward.exposed(blocks)

    def summary(self, spec: AttentionSpec) -> str:
        """Returns the line that the kernel's header has about the plan."""
        shared = "stream-K work units, " if self.scheduled else ""
        return (
            f"{self.tile_q} rows x {self.tile_k} keys, {self.warps} warps that share the keys, {self.stages} stages of "
            f"K and V each, {shared}{self.blocks} block(s) per multiprocessor, {self.shared_bytes(spec)} bytes of "
            "shared memory"
        )

    def shared_memory(
        self, spec: AttentionSpec, work_unit_bytes: int = WORK_UNIT_BYTES, min_bytes: int = 0
    ) -> SharedMemoryLayout:
        """Returns the layout: Q, the pipeline stages of each warp, and with 8-bit keys the scales of Q's rows.

        In the epilogue the partial outputs of the warps overlay all of it: their rows, then the maximum and the sum of
        each row. In scheduled plans the search for the work unit overlays it at the start; the unit has its own space.

        Args:
            work_unit_bytes: bytes of a work unit.
            min_bytes: minimum size of the allocation, for kernels in which other CTAs need more.
        """
        rows, keys, warps = Extent("kTileQ", self.tile_q), Extent("kTileK", self.tile_k), Extent("kWarps", self.warps)
        head, value, (element, kv_element) = head_extent(spec), value_extent(spec), element_sizes(spec)
        stage = (Buffer("Key", "K", (keys, head), kv_element), Buffer("Value", "V", (keys, value), kv_element))
        ring = Extent("kWarps * kStages", self.warps * self.stages)
        partial_columns = Extent("kPartialColumns", value.value + PARTIAL_PADDING)
        unit = Buffer("WorkUnit", "work unit", (literal(work_unit_bytes),), BYTE, at_end=True)
        return SharedMemoryLayout(
            (
                Buffer("Query", "Q", (rows, head), element),
                Buffer("Stage", "stages of warps", copies=ring, parts=stage, note="those of a warp side by side"),
                *([Buffer("RowScales", "scales of rows", (rows,), FLOAT)] if spec.kv_dtype else []),
                Buffer("Partial", "partial O of warps", (rows, partial_columns), FLOAT, copies=warps, overlays="Query"),
                Buffer("States", "maxima and sums of warps", (rows,), FLOAT2, copies=warps),
                *((*search_buffers(self.warps, work_unit_bytes), unit) if self.scheduled else ()),
            ),
            min_bytes=min_bytes,
        )

    def problem(self, spec: AttentionSpec, target: Target) -> str | None:
        """Returns why the plan is inconsistent or does not fit the spec or the target; None if it is valid."""
        if min(self.tile_q, self.tile_k, self.warps, self.stages, self.blocks) < 1 or self.threads > MAX_THREADS:
            return f"its numbers must be positive, and its warps at most {MAX_THREADS // WARP}"
        if self.tile_q % MMA_ROWS:
            return f"tile_q={self.tile_q} must be a multiple of {MMA_ROWS}"
        if self.tile_k % MMA_DEPTH or (spec.dropout and self.tile_k % DROPOUT_COLUMNS):
            return f"tile_k={self.tile_k} must be a multiple of 16, of 32 with dropout"
        if spec.max_dim > MAX_UNSPLIT:
            limit = f"the warps of a decode kernel hold up to {MAX_UNSPLIT} columns of the output"
            return f"{spec.widest}: {limit} {SEE_LIMITS}"
        if self.scheduled and not spec.page_size:
            return "scheduled=True needs a paged KV cache, whose lengths the device knows: declare page_size=..."
        return shared_memory_problem(self.shared_bytes(spec), target, "take fewer warps, keys or stages")


def decode_rows(spec: AttentionSpec) -> tuple[int, ...]:
    """Returns the numbers of rows that tiles of default plans may have, in ascending order."""
    demand, many = demand_of(spec), DecodePlan(_MANY_ROWS, _tile_k(spec), 1, 2)
    if demand.listed or demand.weight >= Weight.HEAVY or many.registers(spec) > _MAX_REGISTERS:
        return (FEW_ROWS,)
    return FEW_ROWS, _MANY_ROWS


def decode_plans(spec: AttentionSpec, target: Target) -> tuple[DecodePlan, ...]:
    """Returns the plans that calls may use, in ascending order of rows; with pages then those with a schedule."""
    if spec.max_dim > MAX_UNSPLIT:
        return ()
    kinds = (False, True) if spec.page_size else (False,)
    few, *others = [choose_decode_plan(spec, target, rows, kind) for kind in kinds for rows in decode_rows(spec)]
    return few, *other_few_row_plans(spec, target), *others


def stream_k_tiles(plan: DecodePlan, row_tiles: int, len_k: int) -> int:
    """Returns the maximum tiles of keys of `row_tiles` output tiles, including the fixed cost of each."""
    return row_tiles * (-(-len_k // plan.tile_k) + TILE_OVERHEAD)


def choose_decode_plan(
    spec: AttentionSpec, target: Target, rows: int = FEW_ROWS, scheduled: bool = False
) -> DecodePlan:
    """Returns the default plan for tiles of `rows` rows: the one with the most of K and V in flight to an SM.

    8-bit keys are read in half the time, which doubles the relative cost of merging splits. So their plan has half as
    many CTAs, of twice as many warps, and merges half as many splits. On an H200 this takes 0.96 of the time for 16
    sequences of 8192 keys, and the same time for 64.

    Raises:
        UnsupportedError: no plan fits the target.
    """
    if spec.kv_dtype and rows == FEW_ROWS and not scheduled:
        wide = _with_blocks(DecodePlan(rows, _tile_k(spec), *_WIDE_RING), spec, target)
        if wide.problem(spec, target) is None:
            return wide
    plans = decode_rings(spec, target, rows, scheduled)
    fitting = [plan for plan in plans if plan.problem(spec, target) is None]
    if not fitting:
        plans[-1].check(spec, target)
    return max(fitting, key=lambda plan: plan.blocks * plan.warps * (plan.stages - 1))


def decode_rings(spec: AttentionSpec, target: Target, rows: int, scheduled: bool = False) -> list[DecodePlan]:
    """Returns the plans of `rows` rows for all pairs of warps and stages, the one of least shared memory last."""
    keys = _stream_k_tile_k(spec, rows) if scheduled else _tile_k(spec)
    plans = [DecodePlan(rows, keys, *ring, scheduled=scheduled) for ring in _RINGS]
    if all(plan.problem(spec, target) for plan in plans):
        plans.append(DecodePlan(rows, keys, *_SMALLEST_RING, scheduled=scheduled))
    return [_with_blocks(plan, spec, target) for plan in plans]


def _tile_k(spec: AttentionSpec) -> int:
    """Returns the keys of a tile: a power of 2, so that it does not straddle the blocks of block masks."""
    keys = _STAGE_BYTES // (spec.kv_element.bytes * (padded(spec.head_dim) + padded(spec.value_dim)))
    fewest = DROPOUT_COLUMNS if spec.dropout else MMA_DEPTH
    return min(max(1 << keys.bit_length() - 1, fewest), _MAX_KEYS)


def _stream_k_tile_k(spec: AttentionSpec, rows: int) -> int:
    """Returns the keys of a tile of stream-K plans: half as many if the scores leave too few registers."""
    keys = _tile_k(spec)
    heavy = DecodePlan(rows, keys, 1, 2).registers(spec) > _MAX_STREAM_K_REGISTERS
    return keys // 2 if heavy and keys > (DROPOUT_COLUMNS if spec.dropout else MMA_DEPTH) else keys


def _with_blocks(plan: DecodePlan, spec: AttentionSpec, target: Target) -> DecodePlan:
    return replace(plan, blocks=min(max(fitting_blocks(plan, spec, target), 1), _MAX_BLOCKS))


def fitting_blocks(plan: DecodePlan, spec: AttentionSpec, target: Target) -> int:
    """Returns how many CTAs of the plan fit the shared memory of an SM."""
    return target.shared_per_multiprocessor // (plan.shared_bytes(spec) + RESERVED_SHARED)


# ---- selection by the sizes of a call


_MIN_KEYS = 256  # with fewer the forward kernel has one or two iterations
_MAX_OUTPUT_TILES = 8  # output tiles that read the same keys, through L2
_FORWARD_ROWS = 128
_PROMPT = 64  # queries
_MAX_OCCUPANCY = 0.8  # of the SMs, which output tiles times the forward's tiles may occupy
_MANY_WAVES = 1.5  # waves of output tiles
_LONG = 4096  # visited keys of all output tiles, per SM
_LENGTH_MULTIPLE = 256  # keys: lengths are rounded up to a multiple of it before they are compared and split


def decode_plan_for(spec: AttentionSpec, target: Target, workload: Workload) -> DecodePlan | None:
    """Returns the decode plan for calls of these sizes, or None if the forward kernel should run.

    One output tile reads K and V once, at the bandwidth of global memory. Several read them several times, through L2.
    That is faster only while the larger tiles of the forward kernel are too few to fill the GPU.
    """
    if spec.max_dim > MAX_UNSPLIT and not spec.kv_dtype:
        return None
    if spec.of_cache:
        if spec.page_size and not spec.kv_dtype and _is_prompt(workload):
            return None
        each = workload.heads_per_kv * workload.len_q
        plan = plan_of_rows(spec, target, each)
        tiles = stream_k_tiles(plan, workload.batch * -(-each // plan.tile_q), workload.len_k)
        stream_k = spec.page_size is not None and workload.batch > 1 and tiles <= MAX_STREAM_K_TILES
        return plan_of_rows(spec, target, each, True) if stream_k else plan
    if workload.len_k < _MIN_KEYS or not _can_prefetch(spec, target):
        return None
    if demand_of(spec).listed:  # tile lists have tiles of as many queries as rows, as KV heads are unknown there
        return plan_of_rows(spec, target, workload.len_q) if workload.len_q <= FEW_ROWS else None
    rows = workload.heads_per_kv * workload.len_q
    plan = plan_of_rows(spec, target, rows)
    tiles = -(-rows // plan.tile_q)
    forward = workload.heads // workload.heads_per_kv * -(-rows // _FORWARD_ROWS)
    if tiles == 1:
        return _choose_few_row_plan(spec, target, workload) if plan.tile_q == FEW_ROWS else plan
    idle = tiles <= _MAX_OUTPUT_TILES and tiles * forward <= _MAX_OCCUPANCY * workload.multiprocessors
    return plan if idle else None


def _choose_few_row_plan(spec: AttentionSpec, target: Target, workload: Workload) -> DecodePlan:
    """Returns the plan of calls with one tile of few rows per KV head."""
    plan, others = choose_decode_plan(spec, target), other_few_row_plans(spec, target)
    tiles = workload.heads // workload.heads_per_kv
    if not others:
        return plan
    many, long = others
    if tiles >= _MANY_WAVES * workload.multiprocessors * plan.blocks:
        return many
    if tiles > workload.multiprocessors or tiles * workload.len_k < _LONG * workload.multiprocessors:
        return plan
    visited = steps_of_rounded_length(spec, workload.len_q, workload.len_k, workload.len_q, plan.tile_k) * plan.tile_k
    return long if tiles * visited >= _LONG * workload.multiprocessors else plan


def steps_of_rounded_length(spec: AttentionSpec, len_q: int, len_k: int, tile_q: int, tile_k: int) -> float:
    """Returns `steps_of` with len_k rounded up. Lengths grow with every decode call, so this limits distinct ones."""
    return steps_of(spec, len_q, -(-len_k // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE, tile_q, tile_k)


@lru_cache(maxsize=256)
def other_few_row_plans(spec: AttentionSpec, target: Target) -> tuple[DecodePlan, ...]:
    """Returns the plans for many output tiles and for long ones, if both were measured against the default plan.

    Many: more output tiles than CTAs fit at once. Their keys are not split, so there are no partial outputs to merge.
    More warps that prefetch fewer tiles each overlap prologues and epilogues with copies. Times on an H200, relative to
    the default plan: 0.986 for 1024 tiles of 2048 keys, 0.995 for 512 of 8192, but 1.05 for a single sequence of 8192.

    Long: at most one output tile per SM, with so many keys that the fixed cost of a split hardly counts. One CTA per SM
    with larger tiles halves the splits: 0.976 for one sequence of 131072 keys, 0.98 for 16 of 8192, but 1.05 for one of
    1024.
    """
    plan = choose_decode_plan(spec, target)
    if spec.of_cache or demand_of(spec).weight >= Weight.HEAVY or demand_of(spec).listed:
        return ()
    many, long = _many_and_long_plans(spec)
    fits = long.tile_k <= _MAX_KEYS and long.problem(spec, target) is None
    return (many, long) if (plan.warps, plan.stages, plan.blocks) == _PLAIN_RING and fits else ()


def _many_and_long_plans(spec: AttentionSpec) -> tuple[DecodePlan, DecodePlan]:
    """Returns the plans for many tiles of few rows and for long ones, with less and with twice the shared memory."""
    keys = _tile_k(spec)
    return DecodePlan(FEW_ROWS, keys, 5, 2, 2), DecodePlan(FEW_ROWS, 2 * keys, 4, 3, 1)


def _is_prompt(workload: Workload) -> bool:
    """Whether the forward kernel has enough tiles of queries to occupy half of the GPU."""
    tiles = workload.heads * -(-workload.len_q // _FORWARD_ROWS)
    return workload.len_q >= _PROMPT and 2 * tiles >= workload.multiprocessors


@lru_cache(maxsize=256)
def _can_prefetch(spec: AttentionSpec, target: Target) -> bool:
    """Whether some plan that prefetches fits the target's shared memory."""
    return any(plan.stages > 1 and not plan.problem(spec, target) for plan in decode_rings(spec, target, FEW_ROWS))


@lru_cache(maxsize=256)
def plan_of_rows(spec: AttentionSpec, target: Target, rows: int, scheduled: bool = False) -> DecodePlan:
    """Returns the default plan for calls with `rows` rows per KV head. It does not depend on the batch."""
    sizes = decode_rows(spec)
    return choose_decode_plan(spec, target, next((size for size in sizes if rows <= size), sizes[-1]), scheduled)


def packs_heads(spec: AttentionSpec) -> bool:
    """Whether the query heads of a KV head share a tile. They do not if each has its own tile lists."""
    return not (demand_of(spec).listed and depends_on_head(spec))
