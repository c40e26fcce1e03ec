"""Plans of the decode kernel: few queries attend to many keys, which are split over the GPU.

The rows of a tile are the queries of all query heads of one KV head, so that K and V are read once for all of them.
Each warp of a CTA loops over its own tiles of keys and prefetches them: no warp waits for another, and an SM has
blocks x warps x (stages - 1) tiles of K and V in flight.

An output of more than MAX_UNSPLIT columns does not fit the registers of a warp. Then all warps of a CTA share each tile
of keys: a warp multiplies a part of the depth of Q * K^T, the warps add up their products through shared memory, and
each has a part of the output's columns. K of a stage is loaded again while P * V still reads its V, so that an SM has
blocks x (stages - 1/2) tiles in flight, or blocks x (stages - 1) where V is a part of K.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

from flashgen.codegen.demand import Weight, demand_of
from flashgen.codegen.mma_sync.forward_plans import MMA_ROWS, ForwardPlan
from flashgen.codegen.padding import (
    DROPOUT_COLUMNS,
    MAX_SPLIT,
    MAX_THREADS,
    MAX_UNSPLIT,
    MMA_K,
    RESERVED_SHARED,
    WARP,
    element_sizes,
    head_extent,
    is_wide,
    padded,
    value_extent,
)
from flashgen.codegen.plan import Checked, Plan, shared_memory_problem, too_wide
from flashgen.codegen.shared_memory import (
    BYTE,
    FLOAT,
    FLOAT2,
    INT,
    Barrier,
    BarrierGroup,
    Buffer,
    Extent,
    SharedMemoryLayout,
    literal,
    mbarriers,
)
from flashgen.codegen.targets import Target
from flashgen.codegen.tile_list_kernel import depends_on_head
from flashgen.codegen.workload import Workload, steps_of
from flashgen.language.spec import AttentionSpec

WORK_UNIT_BYTES = 16  # shared memory of the current stream-K work unit
MAX_STREAM_K_TILES = 2**30  # tiles of keys of all sequences, which stream-K kernels count in int32
PARTIAL_PADDING = 8  # floats between the rows of a warp's partial output, so that 8 rows of lanes write to other banks
_STAGE_BYTES = 8192  # of a warp's tile of K and V
_MAX_KEYS = 64  # of a tile
_MAX_BLOCKS = 2
FEW_ROWS = 16  # of the default plan's tiles
_MANY_ROWS = 32
_MERGE = 0.3  # cost of merging the partial output of one split, in iterations
_MERGE_KERNEL, _MERGE_OF_SPLIT = 2.0, 0.02  # the same if another kernel merges
_MIN_SHARED_TILES = 2  # that an output tile counts as, if warps share tiles: the cost of short sequences
_TILE_OVERHEAD = 4  # cost of an output tile's first copies and its partial output, in tiles of keys of a warp
_MAX_REGISTERS = 248  # estimate for a thread; some kernels take a few more
_MAX_STREAM_K_REGISTERS = 224  # the same for stream-K plans
_MAX_SHARED_REGISTERS = 220  # the same for plans whose warps share tiles
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
_SHARING_WARPS = 4
_SHARED_RINGS = ((32, 4), (32, 3), (32, 2), (16, 4), (16, 3), (16, 2), (32, 1), (16, 1))
"""(keys, stages) of plans whose warps share tiles, in order of preference: larger tiles have fewer barriers."""
_RECORD_RINGS = ((64, 3), (64, 2), (32, 4), (32, 3), (32, 2))
"""The same for records of keys, of which each warp has the scores of a part: 8 or 16 keys, as ldmatrix reads them."""
_SMALLEST_RING = (1, 1)  # if nothing else fits: wide heads with dropout on sm_75, where tiles have 32 keys


def merge_kernel_cost(splits: int) -> float:
    """Returns the cost of the kernel that merges partial outputs (merge_splits.py), in iterations of decode."""
    return _MERGE_KERNEL + _MERGE_OF_SPLIT * splits


def _record_barriers(stages: int) -> BarrierGroup:
    """Returns the mbarriers of the stages of records, for targets that load them by bulk copies."""
    comment = "records_full: the records of a tile have landed, if bulk copies load them (sm_90 and later)."
    return BarrierGroup(comment, (Barrier("records_full", "1"),), Extent("kStages", stages))


def search_buffers(warps: int, found_bytes: int, overlays: str = "Query") -> tuple[Buffer, Buffer]:
    """Returns the buffers in which a CTA finds its work unit by a prefix sum over the batch, before it loads Q.

    They hold the partial sums of the warps, and the result of `found_bytes` bytes.
    """
    return (
        Buffer("WarpSums", "warp sums", (Extent("kWarps", warps),), INT, overlays=overlays),
        Buffer("Found", "found work unit", (literal(found_bytes),), BYTE),
    )


@dataclass(frozen=True)
class DecodePlan(Checked):
    """The plan of the decode kernel.

    Attributes:
        tile_q: rows of a tile: (query, head) pairs of one KV head, heads fastest. All warps share them.
        tile_k: keys of a tile, which one warp processes per iteration.
        warps: warps of a CTA. They process its tiles of keys round-robin, unless they share them.
        stages: pipeline stages of K and V for each warp, or of the CTA; with one stage a warp prefetches nothing.
        blocks: CTAs that should fit on an SM at once, which limits the registers of a thread.
        scheduled: with a paged KV cache, whether CTAs divide the keys of all sequences equally (stream_k.py). Otherwise
            every sequence has the same number of splits.
        split: warps that share tiles of keys: 1, or all of them for outputs that one warp cannot hold. Each then adds a
            part of the depth of Q * K^T and has a part of the output's columns.
    """

    tile_q: int
    tile_k: int
    warps: int
    stages: int
    blocks: int = 1
    scheduled: bool = False
    split: int = 1
    packed_heads: ClassVar[int] = 1  # how many heads share a tile is a size of the call
    splits_keys: ClassVar[bool] = True

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers that name the plan: rows, keys, warps, stages and CTAs per SM, and the warps that share tiles."""
        numbers = self.tile_q, self.tile_k, self.warps, self.stages, self.blocks
        return *numbers, *((self.split,) if self.split > 1 else ())

    def with_schedule(self, scheduled: bool) -> DecodePlan:
        """Returns the plan for CTAs that divide the keys of all sequences equally, or not."""
        return replace(self, scheduled=scheduled)

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def groups(self) -> int:
        """The tiles of keys that a CTA processes at a time: one for each warp, or one that its warps share."""
        return self.warps // self.split

    @property
    def keys_in_flight(self) -> int:
        """The minimum number of keys that are in flight to an SM."""
        return self.blocks * self.groups * (self.stages - 1) * self.tile_k

    @property
    def tile_overhead(self) -> int:
        """The fixed cost of an output tile in tiles of keys, for stream-K.

        It is 0 for the large tiles that warps share, so that sequences of equal lengths divide evenly among CTAs.
        """
        return _TILE_OVERHEAD if self.split == 1 else 0

    @property
    def min_length(self) -> int:
        """The minimum tiles of keys that an output tile counts as, for stream-K."""
        return 1 if self.split == 1 else _MIN_SHARED_TILES

    def merge_cost(self, spec: AttentionSpec, splits: int) -> float:
        """Returns the cost of merging the partial outputs of several splits, in iterations.

        One CTA reads all, or another kernel merges those of records of keys, whose splits are shorter in time.
        """
        return merge_kernel_cost(splits) if spec.kv_record else _MERGE * splits

    @property
    def register_budget(self) -> int:
        return self._forward.register_budget

    @property
    def _forward(self) -> ForwardPlan:
        """The forward plan whose warps hold as much per iteration: here each warp has all rows and keys of a tile."""
        rows, keys = self.tile_q * self.groups, self.tile_k * self.split
        return ForwardPlan(rows, keys, self.warps, blocks=self.blocks, split=self.split)

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
        return ForwardPlan(self.tile_q * self.groups, self.tile_k, self.groups).matrix_cycles(spec)

    def exposed(self, blocks: int) -> float:
        return self._forward.exposed(blocks)

    def summary(self, spec: AttentionSpec) -> str:
        """Returns the line that the kernel's header has about the plan."""
        units = "stream-K work units, " if self.scheduled else ""
        shared, each = ("the keys", " each") if self.split == 1 else ("each tile", "")
        return (
            f"{self.tile_q} rows x {self.tile_k} keys, {self.warps} warps that share {shared}, {self.stages} stages of "
            f"K and V{each}, {units}{self.blocks} CTA(s) per multiprocessor, {self.shared_bytes(spec)} bytes of "
            "shared memory"
        )

    def shared_memory(
        self, spec: AttentionSpec, work_unit_bytes: int = WORK_UNIT_BYTES, min_bytes: int = 0
    ) -> SharedMemoryLayout:
        """Returns the layout: Q, the pipeline stages of each warp, and with 8-bit keys the scales of Q's rows.

        Warps that share tiles have common stages, and space for the scores that each has summed over its part of the
        depth. In the epilogue the partial outputs of the warps, or of the CTA, overlay all of it: their rows, then the
        maximum and the sum of each row. In scheduled plans the search for the work unit overlays it at the start; the
        unit has its own space.

        Args:
            work_unit_bytes: bytes of a work unit.
            min_bytes: minimum size of the allocation, for kernels in which other CTAs need more.
        """
        rows, keys = Extent("kTileQ", self.tile_q), Extent("kTileK", self.tile_k)
        head, value, (element, kv_element) = head_extent(spec), value_extent(spec), element_sizes(spec)
        stage: tuple[Buffer, ...] = (Buffer("Key", "K", (keys, head), kv_element),)
        if spec.kv_record:
            stage = (Buffer("Key", "records of K", (keys, Extent("kRecordBytes", spec.kv_record.bytes)), BYTE),)
        if not spec.shared_kv:
            stage += (Buffer("Value", "V", (keys, value), kv_element),)
        unit = Buffer("WorkUnit", "work unit", (literal(work_unit_bytes),), BYTE, at_end=True)
        barriers = (_record_barriers(self.stages),) if spec.kv_record else ()
        return SharedMemoryLayout(
            (
                Buffer("Query", "Q", (rows, head), element),
                self._stages(stage),
                *(self._exchanged_by_groups(rows, keys, element) if spec.kv_record else self._exchanged(rows, keys)),
                *([Buffer("RowScales", "scales of rows", (rows,), FLOAT)] if spec.kv_dtype else []),
                *([mbarriers(barriers)] if barriers else []),
                *self._partials(rows, Extent("kPartialColumns", value.value + PARTIAL_PADDING)),
                *((*search_buffers(self.warps, work_unit_bytes), unit) if self.scheduled else ()),
            ),
            barriers,
            min_bytes=min_bytes,
        )

    def _stages(self, parts: tuple[Buffer, ...]) -> Buffer:
        """Returns the buffer of all stages of K and V."""
        if self.split > 1:
            return Buffer("Stage", "stages", copies=Extent("kStages", self.stages), parts=parts)
        ring = Extent("kWarps * kStages", self.warps * self.stages)
        return Buffer("Stage", "stages of warps", copies=ring, parts=parts, note="those of a warp side by side")

    def _exchanged(self, rows: Extent, keys: Extent) -> tuple[Buffer, ...]:
        """Returns the buffer by which warps that share tiles add up their products."""
        warps = Extent("kWarps", self.warps)
        return (
            (Buffer("Score", "scores over parts of the depth", (rows, keys), FLOAT, warps),) if self.split > 1 else ()
        )

    def _exchanged_by_groups(self, rows: Extent, keys: Extent, element: Extent) -> tuple[Buffer, ...]:
        """Returns the buffers by which warps with parts of the keys exchange row states, and P times each scale."""
        parts = Extent("kSplit", self.split)
        return (
            Buffer("Probability", "P of each group", (rows, keys), element, copies=Extent("kGroups", self.split)),
            Buffer("Row", "row maxima and sums", (parts, rows), FLOAT),
        )

    def _partials(self, rows: Extent, columns: Extent) -> tuple[Buffer, Buffer]:
        """Returns the buffers of partial outputs and of their softmax states: of each warp, or of the CTA."""
        whose, copies = (" of warps", Extent("kWarps", self.warps)) if self.split == 1 else ("", None)
        return (
            Buffer("Partial", f"partial O{whose}", (rows, columns), FLOAT, copies=copies, overlays="Query"),
            Buffer("States", f"maxima and sums{whose}", (rows,), FLOAT2, copies=copies),
        )

    def problem(self, spec: AttentionSpec, target: Target) -> str | None:
        """Returns why the plan is inconsistent or does not fit the spec or the target; None if it is valid."""
        if min(self.tile_q, self.tile_k, self.warps, self.stages, self.blocks) < 1 or self.threads > MAX_THREADS:
            return f"its numbers must be positive, and its warps at most {MAX_THREADS // WARP}"
        if self.tile_q % MMA_ROWS:
            return f"tile_q={self.tile_q} must be a multiple of {MMA_ROWS}"
        if self.tile_k % MMA_K or (spec.dropout and self.tile_k % DROPOUT_COLUMNS):
            return f"tile_k={self.tile_k} must be a multiple of 16, of 32 with dropout"
        if (self.split > 1) != (is_wide(spec)) or self.split not in (1, self.warps) or self.split > MAX_SPLIT:
            return (
                f"split={self.split} must be 1, or warps={self.warps}, which is then 2 or {MAX_SPLIT}, if head_dim or "
                f"value_dim is above {MAX_UNSPLIT}"
            )
        if spec.kv_record and self.split != spec.kv_record.groups:
            groups = spec.kv_record.groups
            return f"split={self.split} must be {groups} with kv_dtype={spec.kv_dtype!r}, so that a warp has one scale"
        if spec.kv_record and self.tile_q > _MANY_ROWS:  # whose partial output would overlay the mbarriers
            return f"tile_q={self.tile_q} must be at most {_MANY_ROWS} with kv_dtype={spec.kv_dtype!r}"
        if spec.kv_record and self.tile_k % (8 * self.split):
            return f"tile_k={self.tile_k} must be a multiple of 8 x split={self.split}"
        if self.split > 1 and spec.shared_kv and self.stages < 2:
            return f"stages={self.stages} must be at least 2 with shared_kv=True"
        if self.scheduled and not spec.page_size:
            return "scheduled=True needs a paged KV cache, whose lengths the device knows: declare page_size=..."
        return shared_memory_problem(self.shared_bytes(spec), target, "take fewer warps, keys or stages")


def decode_rows(spec: AttentionSpec, target: Target) -> tuple[int, ...]:
    """Returns the numbers of rows that tiles of default plans may have, in ascending order."""
    demand = demand_of(spec)
    if demand.listed or demand.weight >= Weight.HEAVY:
        return (FEW_ROWS,)
    if is_wide(spec):
        rings, limit = decode_rings(spec, target, _MANY_ROWS), _MAX_SHARED_REGISTERS
        fits = any(plan.problem(spec, target) is None and plan.registers(spec) <= limit for plan in rings)
    else:
        fits = DecodePlan(_MANY_ROWS, _tile_k(spec), 1, 2).registers(spec) <= _MAX_REGISTERS
    return (FEW_ROWS, _MANY_ROWS) if fits else (FEW_ROWS,)


def decode_plans(spec: AttentionSpec, target: Target) -> tuple[DecodePlan, ...]:
    """Returns the plans that calls may use, in ascending order of rows; with pages then those with a schedule."""
    kinds = (False, True) if spec.page_size else (False,)
    few, *others = [
        choose_decode_plan(spec, target, rows, kind) for kind in kinds for rows in decode_rows(spec, target)
    ]
    return few, *other_few_row_plans(spec, target), *others


def stream_k_tiles(plan: Any, row_tiles: int, len_k: int) -> int:
    """Returns the maximum tiles of keys of `row_tiles` output tiles, including the fixed cost of each."""
    return row_tiles * (max(-(-len_k // plan.tile_k), plan.min_length) + plan.tile_overhead)


def has_stream_k_tiles(plan: Any, row_tiles: int, len_k: int) -> bool:
    """Whether stream-K kernels can count the tiles of keys of `row_tiles` output tiles."""
    return stream_k_tiles(plan, row_tiles, len_k) <= MAX_STREAM_K_TILES


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
        refuse(spec, target, plans[-1])
    return fitting[0] if fitting[0].split > 1 else max(fitting, key=lambda plan: plan.keys_in_flight)


def refuse(spec: AttentionSpec, target: Target, smallest: Plan) -> None:
    """Raises UnsupportedError if no plan fits the target, of which `smallest` needs the least shared memory."""
    if is_wide(spec):
        raise too_wide("decode", spec, target, lambda narrower: _fits(narrower, target))
    smallest.check(spec, target)


def _fits(spec: AttentionSpec, target: Target) -> bool:
    return any(plan.problem(spec, target) is None for plan in decode_rings(spec, target, FEW_ROWS))


def decode_rings(spec: AttentionSpec, target: Target, rows: int, scheduled: bool = False) -> list[DecodePlan]:
    """Returns the plans of `rows` rows for all pairs of warps and stages, the one of least shared memory last."""
    if is_wide(spec):
        return _shared_rings(spec, target, rows, scheduled)
    keys = _stream_k_tile_k(spec, rows) if scheduled else _tile_k(spec)
    plans = [DecodePlan(rows, keys, *ring, scheduled=scheduled) for ring in _RINGS]
    if all(plan.problem(spec, target) for plan in plans):
        plans.append(DecodePlan(rows, keys, *_SMALLEST_RING, scheduled=scheduled))
    return [_with_blocks(plan, spec, target) for plan in plans]


def _shared_rings(spec: AttentionSpec, target: Target, rows: int, scheduled: bool) -> list[DecodePlan]:
    """Returns the plans whose warps share tiles, in order of preference, the one of least shared memory last.

    8-bit keys arrive in half the time, in which four warps do not finish a tile; a second CTA overlaps with the first.
    """
    plans = [
        _with_blocks(DecodePlan(rows, keys, _SHARING_WARPS, stages, 1, scheduled, _SHARING_WARPS), spec, target)
        for keys, stages in (_RECORD_RINGS if spec.kv_record else _SHARED_RINGS)
        if (not spec.dropout or keys % DROPOUT_COLUMNS == 0) and (stages > 1 or not spec.shared_kv)
    ]
    plans = [plan for plan in plans if plan.registers(spec) <= _MAX_SHARED_REGISTERS] or plans[-1:]
    return sorted(plans, key=lambda plan: plan.blocks == 1 or plan.stages == 1) if spec.kv_dtype else plans


def _tile_k(spec: AttentionSpec) -> int:
    """Returns the keys of a tile: a power of 2, so that it does not straddle the blocks of block masks."""
    columns = padded(spec.head_dim) + (0 if spec.shared_kv else padded(spec.value_dim))
    keys = _STAGE_BYTES // (spec.kv_element.bytes * columns)
    fewest = DROPOUT_COLUMNS if spec.dropout else MMA_K
    return min(max(1 << keys.bit_length() - 1, fewest), _MAX_KEYS)


def _stream_k_tile_k(spec: AttentionSpec, rows: int) -> int:
    """Returns the keys of a tile of stream-K plans: half as many if the scores leave too few registers."""
    keys = _tile_k(spec)
    heavy = DecodePlan(rows, keys, 1, 2).registers(spec) > _MAX_STREAM_K_REGISTERS
    return keys // 2 if heavy and keys > (DROPOUT_COLUMNS if spec.dropout else MMA_K) else keys


def _with_blocks(plan: DecodePlan, spec: AttentionSpec, target: Target) -> DecodePlan:
    return replace(plan, blocks=min(max(fitting_blocks(plan, spec, target), 1), _MAX_BLOCKS))


def fitting_blocks(plan: DecodePlan, spec: AttentionSpec, target: Target) -> int:
    """Returns how many CTAs of the plan fit the shared memory of an SM."""
    return target.shared_per_multiprocessor // (plan.shared_bytes(spec) + RESERVED_SHARED)


# ---- selection by the sizes of a call


MIN_KEYS = 256  # with fewer the forward kernel has one or two iterations
_MAX_OUTPUT_TILES = 8  # output tiles that read the same keys, through L2
_FORWARD_ROWS = 128
PROMPT = 64  # queries
_MAX_OCCUPANCY = 0.8  # of the SMs, which output tiles times the forward's tiles may occupy
_MANY_WAVES = 1.5  # waves of output tiles
_LONG = 4096  # visited keys of all output tiles, per SM
_LENGTH_MULTIPLE = 256  # keys: lengths are rounded up to a multiple of it before they are compared and split


def decode_plan_for(spec: AttentionSpec, target: Target, workload: Workload) -> DecodePlan | None:
    """Returns the decode plan for calls of these sizes, or None if the forward kernel should run.

    One output tile reads K and V once, at the bandwidth of global memory. Several read them several times, through L2.
    That is faster only while the larger tiles of the forward kernel are too few to fill the GPU.
    """
    if spec.of_cache:
        if spec.page_size and not spec.kv_dtype and is_prefill(workload):
            return None
        each = workload.heads_per_kv * workload.len_q
        plan = plan_of_rows(spec, target, each)
        counted = has_stream_k_tiles(plan, workload.batch * -(-each // plan.tile_q), workload.len_k)
        stream_k = spec.page_size is not None and workload.batch > 1 and counted
        return plan_of_rows(spec, target, each, True) if stream_k else plan
    if workload.len_k < MIN_KEYS or not _can_prefetch(spec, target):
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
    if is_wide(spec) or spec.of_cache or demand_of(spec).weight >= Weight.HEAVY or demand_of(spec).listed:
        return ()
    many, long = _many_and_long_plans(spec)
    fits = long.tile_k <= _MAX_KEYS and long.problem(spec, target) is None
    return (many, long) if (plan.warps, plan.stages, plan.blocks) == _PLAIN_RING and fits else ()


def _many_and_long_plans(spec: AttentionSpec) -> tuple[DecodePlan, DecodePlan]:
    """Returns the plans for many tiles of few rows and for long ones, with less and with twice the shared memory."""
    keys = _tile_k(spec)
    return DecodePlan(FEW_ROWS, keys, 5, 2, 2), DecodePlan(FEW_ROWS, 2 * keys, 4, 3, 1)


def is_prefill(workload: Workload) -> bool:
    """Whether the forward kernel has enough tiles of queries to occupy half of the GPU."""
    tiles = workload.heads * -(-workload.len_q // _FORWARD_ROWS)
    return workload.len_q >= PROMPT and 2 * tiles >= workload.multiprocessors


@lru_cache(maxsize=256)
def _can_prefetch(spec: AttentionSpec, target: Target) -> bool:
    """Whether some plan that prefetches fits the target's shared memory. Warps that share a stage load its K early."""
    rings = (plan for plan in decode_rings(spec, target, FEW_ROWS) if plan.stages > 1 or plan.split > 1)
    return any(not plan.problem(spec, target) for plan in rings)


@lru_cache(maxsize=256)
def plan_of_rows(spec: AttentionSpec, target: Target, rows: int, scheduled: bool = False) -> DecodePlan:
    """Returns the default plan for calls with `rows` rows per KV head. It does not depend on the batch."""
    sizes = decode_rows(spec, target)
    return choose_decode_plan(spec, target, next((size for size in sizes if rows <= size), sizes[-1]), scheduled)


def packs_heads(spec: AttentionSpec) -> bool:
    """Whether the query heads of a KV head share a tile. They do not if each has its own tile lists."""
    return not (demand_of(spec).listed and depends_on_head(spec))
