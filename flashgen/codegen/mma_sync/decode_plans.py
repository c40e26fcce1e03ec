"""How the decode kernel divides its work: few queries over many keys, which are split over the card.

A tile's rows are the query heads of a head of K and V, times its queries, so that K and V are read once for all of
them. Each warp of a block walks through tiles of keys of its own, which it copies ahead of itself: no warp waits for
another, and what is on its way to a multiprocessor is blocks x warps x (stages - 1) tiles of K and V.
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
    ELEMENT,
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
    ELEMENT_BYTES,
    MAX_THREADS,
    MMA_DEPTH,
    RESERVED_SHARED,
    WARP,
    head_extent,
    padded,
    value_extent,
)
from flashgen.codegen.workload import Workload, steps_of
from flashgen.language.spec import AttentionSpec

BEGINNING = 4  # tiles of keys whose copies take as long as a block's first ones and its share of the output
RUN_BYTES = 16  # of shared memory, for the run at which a block is that shares keys
MOST_SHARED_TILES = 2**30  # of keys, of all sequences: blocks that share them count in int32
SHARE_PADDING = 8  # floats between the rows of a warp's share, so that its 8 rows of lanes write to other banks
_STAGE_BYTES = 8192  # of a warp's tile of K and V
_MOST_KEYS = 64  # of a tile
_MOST_BLOCKS = 2
FEW_ROWS = 16  # of the default plan's tiles
_MANY_ROWS = 32
_MOST_REGISTERS = 248  # of a thread, by estimate: some kernels take a few more
_MOST_SHARED_REGISTERS = 224  # likewise, where blocks share the keys of all sequences
_WIDE_RING = (8, 3)  # warps, and stages of each, of keys of 8 bits
_PLAIN_RING = (4, 3, 2)  # warps, stages and blocks of the default plans beside which the next were measured
_RINGS = (
    (4, 4),
    (4, 3),
    (4, 2),
    (2, 4),
    (2, 3),
    (2, 2),
    (1, 2),
)  # (warps, stages), of as many tiles on their way the first
_SMALLEST_RING = (1, 1)  # where no other fits: on sm_75 with dropout, whose tiles have 32 keys, and wide heads


def search_buffers(warps: int, found_bytes: int) -> tuple[Buffer, Buffer]:
    """What a block needs to find its work by a sum over the batch, before it loads Q: the warps' sums, the result."""
    return (
        Buffer("WarpSums", "sums of warps", (Extent("kWarps", warps),), INT, overlays="Query"),
        Buffer("Found", "what is found", (literal(found_bytes),), BYTE),
    )


def cached_bytes(spec: AttentionSpec) -> int:
    """Bytes of an element of k and v."""
    return 1 if spec.kv_dtype else ELEMENT_BYTES


@dataclass(frozen=True)
class DecodePlan(Checked):
    """The decode kernel's plan.

    Attributes:
        tile_q: rows of a tile: (query, head) pairs of one head of K and V, heads fastest. All warps share them.
        tile_k: keys of a warp's step.
        warps: warps of a thread block, which take turns with its tiles of keys.
        stages: tiles of K and V that shared memory holds for each warp; of one, no copy is ahead.
        blocks: thread blocks that should fit on a multiprocessor, which caps their registers.
        scheduled: over pages, whether blocks share the keys of all sequences equally (runs.py), whatever their lengths;
            else each sequence has as many parts as its neighbours.
    """

    tile_q: int
    tile_k: int
    warps: int
    stages: int
    blocks: int = 1
    scheduled: bool = False
    packed_heads: ClassVar[int] = 1  # any number of heads makes rows: it is a size of the call

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def register_budget(self) -> int:
        return self._forward.register_budget

    @property
    def _forward(self) -> ForwardPlan:
        """A forward plan whose warps do the same to a step: each has all rows of the tile."""
        return ForwardPlan(self.tile_q * self.warps, self.tile_k, self.warps, blocks=self.blocks)

    def part(self, spec: AttentionSpec) -> str:
        """What the kernel of a default plan is called among those that decode."""
        if self.scheduled or self.tile_q != FEW_ROWS:
            rows = f"_rows{self.tile_q}" if self.tile_q != FEW_ROWS else ""
            return f"decode{'_scheduled' if self.scheduled else ''}{rows}"
        many, long = _other_plans(spec)
        return "decode_many" if self == many else "decode_long" if self == long else "decode"

    def show_options(self, spec: AttentionSpec) -> str:
        part = self.part(spec)
        return "--pass decode" + (f" --kernel {part}" if part != "decode" else "")

    def registers(self, spec: AttentionSpec) -> int:
        """The float32 scores and output of a tile's rows over 32 lanes, and what the variant needs."""
        return self._forward.registers(spec)

    def matrix_cycles(self, spec: AttentionSpec) -> float:
        """Of a step of every warp."""
        return self._forward.matrix_cycles(spec)

    def exposed(self, blocks: int) -> float:
        return self._forward.exposed(blocks)

    def summary(self, spec: AttentionSpec) -> str:
        """One line for the kernel's header."""
        shared = "equal runs of all sequences, " if self.scheduled else ""
        return (
            f"{self.tile_q} rows x {self.tile_k} keys, {self.warps} warps that share the keys, {self.stages} stages of "
            f"K and V each, {shared}{self.blocks} block(s) per multiprocessor, {self.shared_bytes(spec)} bytes of "
            "shared memory"
        )

    def shared_memory(self, spec: AttentionSpec, run_bytes: int = RUN_BYTES, min_bytes: int = 0) -> SharedMemoryLayout:
        """Q, the stages of each warp, and with keys of 8 bits the scales of Q's rows.

        At the end the partial outputs of the warps overlay all of it: their rows, then the maximum and the sum of each.
        Of a scheduled plan the search for a block's run does so at the beginning, and the run stands behind everything.

        Args:
            run_bytes: bytes of a run.
            min_bytes: the bytes of the launch, where other blocks of the kernel need more.
        """
        rows, keys, warps = Extent("kTileQ", self.tile_q), Extent("kTileK", self.tile_k), Extent("kWarps", self.warps)
        head, value, cached = head_extent(spec), value_extent(spec), BYTE if spec.kv_dtype else ELEMENT
        stage = (Buffer("Key", "K", (keys, head), cached), Buffer("Value", "V", (keys, value), cached))
        ring = Extent("kWarps * kStages", self.warps * self.stages)
        share_columns = Extent("kShareColumns", value.value + SHARE_PADDING)
        run = Buffer("Run", "run", (literal(run_bytes),), BYTE, at_end=True)
        return SharedMemoryLayout(
            (
                Buffer("Query", "Q", (rows, head)),
                Buffer("Stage", "stages of warps", copies=ring, parts=stage, note="those of a warp side by side"),
                *([Buffer("RowScales", "scales of rows", (rows,), FLOAT)] if spec.kv_dtype else []),
                Buffer("Share", "partial O of warps", (rows, share_columns), FLOAT, copies=warps, overlays="Query"),
                Buffer("States", "maxima and sums of warps", (rows,), FLOAT2, copies=warps),
                *((*search_buffers(self.warps, run_bytes), run) if self.scheduled else ()),
            ),
            min_bytes=min_bytes,
        )

    def problem(self, spec: AttentionSpec, target: Target) -> str | None:
        """Why the plan contradicts itself, or does not fit the spec or the target; None where it does."""
        if min(self.tile_q, self.tile_k, self.warps, self.stages, self.blocks) < 1 or self.threads > MAX_THREADS:
            return f"its numbers must be positive, and its warps at most {MAX_THREADS // WARP}"
        if self.tile_q % MMA_ROWS:
            return f"tile_q={self.tile_q} must be a multiple of {MMA_ROWS}"
        if self.tile_k % MMA_DEPTH or (spec.dropout and self.tile_k % DROPOUT_COLUMNS):
            return f"tile_k={self.tile_k} must be a multiple of 16, of 32 with dropout"
        if self.scheduled and not spec.page_size:
            return "scheduled=True is for keys in pages, of lengths that the device knows: declare page_size=..."
        return shared_memory_problem(self.shared_bytes(spec), target, "take fewer warps, keys or stages")


def decode_rows(spec: AttentionSpec) -> tuple[int, ...]:
    """The rows that tiles of default plans may have, fewest first."""
    demand, many = demand_of(spec), DecodePlan(_MANY_ROWS, _tile_k(spec), 1, 2)
    if demand.listed or demand.weight >= Weight.HEAVY or many.registers(spec) > _MOST_REGISTERS:
        return (FEW_ROWS,)
    return FEW_ROWS, _MANY_ROWS


def decode_plans(spec: AttentionSpec, target: Target) -> tuple[DecodePlan, ...]:
    """The plans that calls may take, those for the fewest rows first; over pages then those with a schedule."""
    kinds = (False, True) if spec.page_size else (False,)
    few, *others = [choose_decode_plan(spec, target, rows, kind) for kind in kinds for rows in decode_rows(spec)]
    return few, *others_of_few(spec, target), *others


def shared_tiles(plan: DecodePlan, row_tiles: int, len_k: int) -> int:
    """Tiles of keys that so many tiles of rows may have, with what it costs to begin and end each."""
    return row_tiles * (-(-len_k // plan.tile_k) + BEGINNING)


def choose_decode_plan(
    spec: AttentionSpec, target: Target, rows: int = FEW_ROWS, scheduled: bool = False
) -> DecodePlan:
    """The default plan for tiles of so many rows: that which keeps most of K and V on its way to a multiprocessor.

    Keys of 8 bits are read in half the time, so that merging the parts counts twice: half as many blocks, of twice the
    warps, merge half as many parts. On an H200 16 sequences of 8192 keys take 0.96 of the time so, 64 as long.
    UnsupportedError where none fits the target.
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
    """Plans of so many rows, with as many warps and stages as there may be, that of the least shared memory last."""
    keys = _shared_tile_k(spec, rows) if scheduled else _tile_k(spec)
    plans = [DecodePlan(rows, keys, *ring, scheduled=scheduled) for ring in _RINGS]
    if all(plan.problem(spec, target) for plan in plans):
        plans.append(DecodePlan(rows, keys, *_SMALLEST_RING, scheduled=scheduled))
    return [_with_blocks(plan, spec, target) for plan in plans]


def _tile_k(spec: AttentionSpec) -> int:
    """Keys of a tile: a power of 2, so that it lies within a block of those that masks read tables of."""
    keys = _STAGE_BYTES // (cached_bytes(spec) * (padded(spec.head_dim) + padded(spec.value_dim)))
    fewest = DROPOUT_COLUMNS if spec.dropout else MMA_DEPTH
    return min(max(1 << keys.bit_length() - 1, fewest), _MOST_KEYS)


def _shared_tile_k(spec: AttentionSpec, rows: int) -> int:
    """Keys of a tile where blocks share them: half where the scores leave no registers for what that takes."""
    keys = _tile_k(spec)
    heavy = DecodePlan(rows, keys, 1, 2).registers(spec) > _MOST_SHARED_REGISTERS
    return keys // 2 if heavy and keys > (DROPOUT_COLUMNS if spec.dropout else MMA_DEPTH) else keys


def _with_blocks(plan: DecodePlan, spec: AttentionSpec, target: Target) -> DecodePlan:
    return replace(plan, blocks=min(max(fitting_blocks(plan, spec, target), 1), _MOST_BLOCKS))


def fitting_blocks(plan: DecodePlan, spec: AttentionSpec, target: Target) -> int:
    """Blocks of the plan for which a multiprocessor has the shared memory."""
    return target.shared_per_multiprocessor // (plan.shared_bytes(spec) + RESERVED_SHARED)


# ---- for which calls


_FEWEST_KEYS = 256  # for fewer the forward kernel has a step or two
_MOST_TILES = 8  # of rows that read the same keys, through the L2
_FORWARD_ROWS = 128
_PROMPT = 64  # queries
_IDLE = 0.8  # of the multiprocessors, that tiles of rows times the forward's tiles may be
_MANY_ROUNDS = 1.5  # of tiles of rows over the places for blocks
_LONG = 4096  # visited keys of all tiles of rows, for each multiprocessor
_ALIKE = 256  # keys: lengths up to a multiple of it are looked at, and split, alike


def decode_plan_for(spec: AttentionSpec, target: Target, workload: Workload) -> DecodePlan | None:
    """The plan that calls of these sizes take, or None where the forward kernel does.

    One tile of rows reads K and V once, as fast as the memory gives it. Several read it as often, through the L2: that
    is worth it only while the forward's larger tiles, of which there are fewer, would leave the card idle.
    """
    if spec.of_cache:
        if spec.page_size and not spec.kv_dtype and _is_prompt(workload):
            return None
        each = workload.heads_per_kv * workload.len_q
        plan = plan_of_rows(spec, target, each)
        tiles = shared_tiles(plan, workload.batch * -(-each // plan.tile_q), workload.len_k)
        shares = spec.page_size is not None and workload.batch > 1 and tiles <= MOST_SHARED_TILES
        return plan_of_rows(spec, target, each, True) if shares else plan
    if workload.len_k < _FEWEST_KEYS or not _has_room(spec, target):
        return None
    if demand_of(spec).listed:  # lists are made for as many queries as a tile has rows, by who knows no heads of k
        return plan_of_rows(spec, target, workload.len_q) if workload.len_q <= FEW_ROWS else None
    rows = workload.heads_per_kv * workload.len_q
    plan = plan_of_rows(spec, target, rows)
    tiles = -(-rows // plan.tile_q)
    forward = workload.heads // workload.heads_per_kv * -(-rows // _FORWARD_ROWS)
    if tiles == 1:
        return _of_few(spec, target, workload) if plan.tile_q == FEW_ROWS else plan
    idle = tiles <= _MOST_TILES and tiles * forward <= _IDLE * workload.multiprocessors
    return plan if idle else None


def _of_few(spec: AttentionSpec, target: Target, workload: Workload) -> DecodePlan:
    """The plan of calls whose tiles have few rows, one for each head of k and v."""
    plan, others = choose_decode_plan(spec, target), others_of_few(spec, target)
    tiles = workload.heads // workload.heads_per_kv
    if not others:
        return plan
    many, long = others
    if tiles >= _MANY_ROUNDS * workload.multiprocessors * plan.blocks:
        return many
    if tiles > workload.multiprocessors or tiles * workload.len_k < _LONG * workload.multiprocessors:
        return plan
    visited = steps_alike(spec, workload.len_q, workload.len_k, workload.len_q, plan.tile_k) * plan.tile_k
    return long if tiles * visited >= _LONG * workload.multiprocessors else plan


def steps_alike(spec: AttentionSpec, len_q: int, len_k: int, tile_q: int, tile_k: int) -> float:
    """`steps_of` a length rounded up: lengths grow with every call in decoding, and few are worked out."""
    return steps_of(spec, len_q, -(-len_k // _ALIKE) * _ALIKE, tile_q, tile_k)


@lru_cache(maxsize=256)
def others_of_few(spec: AttentionSpec, target: Target) -> tuple[DecodePlan, ...]:
    """The plan of calls with many tiles of rows and that of long ones, where both were timed beside the default.

    Many: more tiles than places for blocks, whose keys are not split, so that no share is merged. More warps, of fewer
    tiles ahead each, begin and end beside each other's copies: on an H200 1024 tiles of 2048 keys take 0.986 of the
    time, 512 of 8192 0.995, but a single sequence of 8192 1.05.

    Long: at most a tile for each multiprocessor, of so many keys that what begins and ends a part hardly counts. One
    block of larger tiles has half as many parts: one sequence of 131072 keys takes 0.976 of the time, 16 of 8192 0.98,
    but one of 1024 1.05.
    """
    plan = choose_decode_plan(spec, target)
    if spec.of_cache or demand_of(spec).weight >= Weight.HEAVY or demand_of(spec).listed:
        return ()
    many, long = _other_plans(spec)
    fits = long.tile_k <= _MOST_KEYS and long.problem(spec, target) is None
    return (many, long) if (plan.warps, plan.stages, plan.blocks) == _PLAIN_RING and fits else ()


def _other_plans(spec: AttentionSpec) -> tuple[DecodePlan, DecodePlan]:
    """Those for many tiles of few rows, and for long ones, of less and of twice the default's shared memory."""
    keys = _tile_k(spec)
    return DecodePlan(FEW_ROWS, keys, 5, 2, 2), DecodePlan(FEW_ROWS, 2 * keys, 4, 3, 1)


def _is_prompt(workload: Workload) -> bool:
    """Whether the forward's tiles of queries are so many that half of the card is busy with them."""
    tiles = workload.heads * -(-workload.len_q // _FORWARD_ROWS)
    return workload.len_q >= _PROMPT and 2 * tiles >= workload.multiprocessors


@lru_cache(maxsize=256)
def _has_room(spec: AttentionSpec, target: Target) -> bool:
    """Whether the target has the shared memory for some plan whose copies are ahead."""
    return any(plan.stages > 1 and not plan.problem(spec, target) for plan in decode_rings(spec, target, FEW_ROWS))


@lru_cache(maxsize=256)
def plan_of_rows(spec: AttentionSpec, target: Target, rows: int, scheduled: bool = False) -> DecodePlan:
    """The default plan for calls with so many rows for each head of k and v, whatever else is in the batch."""
    sizes = decode_rows(spec)
    return choose_decode_plan(spec, target, next((size for size in sizes if rows <= size), sizes[-1]), scheduled)


def packs_heads(spec: AttentionSpec) -> bool:
    """Whether the query heads of a head of K and V are rows of one tile: not where each has lists of its own."""
    return not (demand_of(spec).listed and depends_on_head(spec))
