"""Plans of Hopper's forward kernel: tiles, stages, warpgroups and registers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar, NamedTuple

from flashgen.codegen.demand import Weight, demand_of
from flashgen.codegen.hopper.array_tiles import array_tile, max_array_stages
from flashgen.codegen.hopper.barriers import forward_barriers
from flashgen.codegen.hopper.batch_traits import batch_traits
from flashgen.codegen.hopper.left_to_mma_sync import forward_problem
from flashgen.codegen.padding import (
    DROPOUT_COLUMNS,
    WARP,
    element_sizes,
    head_extent,
    is_wide,
    padded,
    padded_head_dim,
    padded_value_dim,
    value_extent,
)
from flashgen.codegen.plan import Checked, shared_memory_problem
from flashgen.codegen.shared_memory import (
    BYTE,
    FLOAT2,
    INT,
    UINT4,
    Buffer,
    Extent,
    SharedMemoryLayout,
    literal,
    mbarriers,
)
from flashgen.codegen.targets import TARGETS, Target
from flashgen.dtypes import DTYPES, DType
from flashgen.language.operations import HEAD
from flashgen.language.spec import AttentionSpec

WARPGROUP = 128
ROWS, _WARP_ROWS = 64, 16  # of a wgmma, and of each of its warps
_DEPTH = 16
_MAX_COLUMNS = 256  # of a wgmma, and rows of a TMA box
MAX_PASSED = 2  # tiles of P in shared memory
_TARGET = TARGETS["sm_90a"]  # the target of this family and of its measured plans
MAX_SHARED = _TARGET.shared_per_block
_SWIZZLED_ROWS = (128, 64, 32)  # bytes of a row of a box that TMA swizzles
SWIZZLE_BYTES = 8 * _SWIZZLED_ROWS[0]  # period of the widest swizzle

_DRAWN_BLOCKS = 32  # blocks of keys for which a warp prepares random numbers for dropout, one per lane
_MAX_DRAWN = 2  # maximum number of times this is done at once

_WIDE = 192  # columns beyond which registers are scarce
_MIN_LISTED = 256  # scores of a tile that a warp reads before it votes

PREFILL_QUERIES = ROWS
"""The minimum number of queries of a prompt in a mixed batch: the rows of a warpgroup."""
MAX_DECODE_QUERIES = PREFILL_QUERIES - 1
"""The largest `max_seqlen_q` of a mixed batch with which Hopper launches the decode kernel alone.

Servers pass it if no sequence has more queries. Launches depend on this bound, so that one value gives the same
launches to all of these batches, and to the CUDA graphs that captured one of them."""
PACKS = (1, 2, 4, 8, 16, 32, 64)  # numbers of packed heads; they divide the rows of a wgmma

# Registers beside scores, probabilities and output, by weight: addresses, row states, and temporaries of scores and
# masks. Each number comes from the kernel with the most temporaries among those that compile without spills.
_OTHER_REGISTERS = (30, 32, 40, 64, 56, 64, 96)
# Registers of a thread of the producer warpgroup and of a consumer warpgroup, by the number of consumers.
_REGISTERS = {1: (56, 256), 2: (24, 240), 3: (32, 160)}
# With pages all lanes of the producer warp look up pages, and other warps may load tiles of a captured array. If
# consumers can spare registers, the producer gets more of them and starts more copies together. Kernels with an
# estimate (`registers`) of up to _LIGHT do not spill with 152.
_REGISTERS_WITH_PAGES = _REGISTERS | {2: (40, 232)}
_REGISTERS_TO_SPARE, _LIGHT = (56, 152), 156
# With K and V of 8 bits all threads of the producer warpgroup convert them, and need more registers. A plan has the
# first choice that gives a consumer thread at least its estimate (`registers`), or else the last choice.
_REGISTERS_TO_CONVERT = {
    1: ((104, 256),),
    2: ((88, 208), (72, 216), (56, 224)),
    3: ((80, 144), (56, 152)),
}
_PART_COLUMNS = 128  # of a part of a tile of K
_MAX_HELD_COLUMNS = 128  # columns of Q that consumers hold in registers
_HELD_OVER_PAGES = 64  # the same if the producer converts pages, for which it needs more registers
# Registers of a consumer thread for the scales of its two rows if Q is converted too, and an array is read for each
# score. The numbers of _OTHER_REGISTERS are enough for other variants.
_ROW_SCALES = 2
_CHUNK = 16  # elements of 8 bits that a thread converts at a time


def swizzled_columns(element: DType) -> tuple[int, ...]:
    """Returns the widths of panels that TMA swizzles, in columns, the widest first."""
    return tuple(row_bytes // element.bytes for row_bytes in _SWIZZLED_ROWS)


def panel_columns(width: int, element: DType) -> int:
    """Returns the columns of a panel: the widest TMA swizzle that divides a padded width."""
    return widest_panel(element, padded(width))


def widest_panel(element: DType, *widths: int) -> int:
    """Returns the widest panel that TMA swizzles and that divides all of these widths."""
    return next(columns for columns in swizzled_columns(element) if not any(width % columns for width in widths))


def _registers_of_queries(columns: int) -> int:
    """Returns the registers of a thread for columns of Q in 16 bits."""
    return _WARP_ROWS * columns // 2 // WARP


def _rows_at_once(panel: int) -> int:
    """Returns the rows of K or V that the two producer warps which convert it copy at a time."""
    return WARPGROUP // 2 // (panel // _CHUNK)


class TileParts(NamedTuple):
    """What a stage of the pipelines of K and of V holds, of all rows of a tile, and the number of stages."""

    key_columns: Extent
    key_stages: Extent
    value_columns: Extent
    value_stages: Extent


@dataclass(frozen=True)
class HopperPlan(Checked):
    """The plan of Hopper's forward kernel.

    Attributes:
        consumers: consumer warpgroups, of 64 rows each if they do not share them (`split`). There is one producer
            warpgroup beside them.
        tile_k: keys of a tile.
        stages: stages of the pipelines of K and of V in shared memory.
        takes_turns: consumer warpgroups start their products in turn (ping-pong scheduling), so that the softmax of one
            overlaps the products of another.
        packed_heads: query heads of one KV head that share a tile, head fastest: row r is query r / packed_heads of
            head r % packed_heads. A power of 2 up to 64; 1 if heads are not packed.
        split: consumer warpgroups that share 64 rows: each has a part of the output's columns. 1, or 2 for rows of more
            than 256 columns. The first of them computes the scores, and passes P to the other through shared memory.
    """

    consumers: int
    tile_k: int
    stages: int = 2
    takes_turns: bool = False
    packed_heads: int = 1
    split: int = 1
    blocks: ClassVar[int] = 1  # per SM; registers limit it
    splits_keys: ClassVar[bool] = False

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers that name the plan: consumers, keys and stages, and 2 if consumers take turns."""
        return self.consumers, self.tile_k, self.stages, *((2,) if self.takes_turns else ())

    def with_schedule(self, scheduled: bool) -> HopperPlan:
        """Returns the plan itself: a CTA has all keys of its queries."""
        return self

    @property
    def rows(self) -> int:
        """The rows of a CTA: one for each of its queries and packed heads."""
        return self.row_groups * ROWS

    @property
    def row_groups(self) -> int:
        """The groups of consumer warpgroups with the same 64 rows."""
        return self.consumers // self.split

    @property
    def tile_q(self) -> int:
        """The queries of a CTA."""
        return self.rows // self.packed_heads

    def show_options(self, spec: AttentionSpec) -> str:
        return f"--packed-heads {self.packed_heads}" if self.packed_heads > 1 else ""

    def packing(self, heads: int, spec: AttentionSpec) -> HopperPlan:
        """Returns the plan with `heads` packed heads.

        Each lane then reads separately what a score function reads by head. With the widest rows this leaves registers
        for fewer keys, and for fewer still if an element is read for each score.
        """
        demand, limit = demand_of(spec), self.tile_k
        if heads > 1 and demand.reads_by_head and max(padded(spec.head_dim), padded(spec.value_dim)) > _WIDE:
            limit = 32 if demand.reads_by_head_and_position else 64
        return replace(self, packed_heads=heads, tile_k=min(self.tile_k, limit))

    @property
    def threads(self) -> int:
        return (self.consumers + 1) * WARPGROUP

    @property
    def warps(self) -> int:
        """The number of consumer warps."""
        return self.consumers * 4

    def output_columns(self, spec: AttentionSpec) -> int:
        """Returns the columns of the output that a consumer warpgroup holds."""
        return padded_value_dim(spec) // self.split

    def head_panel(self, spec: AttentionSpec) -> int:
        """Returns the columns of a panel of Q and of K. Where V is a part of K, panels of both have the same width."""
        if spec.shared_kv:
            return widest_panel(spec.element, padded_head_dim(spec), self.output_columns(spec))
        return widest_panel(spec.element, padded_head_dim(spec))

    def value_panel(self, spec: AttentionSpec) -> int:
        """Returns the columns of a panel of V and of the output."""
        return self.head_panel(spec) if spec.shared_kv else widest_panel(spec.element, self.output_columns(spec))

    def passed_panel(self, spec: AttentionSpec) -> int:
        """Returns the columns of a panel of P in shared memory, which the second warpgroup reads."""
        return widest_panel(spec.element, self.tile_k)

    def key_parts(self, spec: AttentionSpec) -> int:
        """Returns the parts of a tile of K that are loaded and released separately.

        Where warpgroups share rows, shared memory holds few tiles. A part is loaded again while the product reads the
        next ones. Parts of 128 columns were the fastest, and in tiles that these do not divide, parts of a panel.
        """
        if not self.tiles_in_parts(spec):
            return 1
        columns = padded_head_dim(spec)
        return columns // (self.head_panel(spec) if columns % _PART_COLUMNS else _PART_COLUMNS)

    def tiles_in_parts(self, spec: AttentionSpec) -> bool:
        """Whether tiles of K and V have parts in pipeline stages of their own."""
        return self.split > 1 and not spec.shared_kv

    def warpgroup_registers(self, spec: AttentionSpec) -> tuple[int, int]:
        """Returns the registers of a thread of the producer warpgroup and of a consumer warpgroup (setmaxnreg)."""
        if spec.kv_dtype:
            needed, choices = self.registers(spec), _REGISTERS_TO_CONVERT[self.consumers]
            return next((choice for choice in choices if choice[1] >= needed), choices[-1])
        if spec.page_size and self.consumers == 3 and self.registers(spec) <= _LIGHT:
            return _REGISTERS_TO_SPARE
        loads = spec.page_size or self.array_stages(spec)
        return (_REGISTERS_WITH_PAGES if loads else _REGISTERS)[self.consumers]

    def held_columns(self, spec: AttentionSpec) -> int:
        """Returns the columns of Q that consumers hold in registers. The products read the others from shared memory.

        Its bandwidth limits kernels that convert K and V of 8 bits. Score functions and dropout need the registers
        themselves.
        """
        columns = padded_head_dim(spec)
        if not spec.scales_kv or columns > _MAX_HELD_COLUMNS or demand_of(spec).weight > Weight.PLAIN:
            return 0
        held = min(columns, _HELD_OVER_PAGES) if spec.page_size else columns
        _, available = _REGISTERS_TO_CONVERT[self.consumers][0 if spec.page_size else -1]
        return held if self._registers_without_queries(spec) + _registers_of_queries(held) <= available else 0

    def pages_of_tile(self, spec: AttentionSpec) -> int | None:
        """Returns how many pages have the keys of a tile, for kernels that convert K and V.

        None without pages, if pages and tiles are not aligned, if the rows of K or V that the producer warps copy at a
        time may belong to two pages, or if a tile has more pages than a warp has lanes, which look them up.
        """
        rows = max(_rows_at_once(self.head_panel(spec)), _rows_at_once(self.value_panel(spec)))
        if not spec.page_size or spec.page_size % rows:
            return None
        pages = max(self.tile_k // spec.page_size, 1)
        aligned = self.tile_k % spec.page_size == 0 or spec.page_size % self.tile_k == 0
        return pages if aligned and pages <= WARP else None

    def _chunks(self, columns: int, panel: int) -> int:
        """Returns the chunks of a tile of K or V that a thread converts, of half of the producer warpgroup."""
        return columns // panel * -(-self.tile_k // _rows_at_once(panel))

    def _chunk_buffer(self, spec: AttentionSpec) -> Buffer:
        """Returns the buffer of a tile of K and of V of 8 bits. Each thread reads what it has copied itself."""
        keys = self._chunks(padded_head_dim(spec), self.head_panel(spec))
        slots = keys + self._chunks(padded_value_dim(spec), self.value_panel(spec))
        shape = (literal(slots), literal(WARPGROUP // 2))
        return Buffer("Chunk", "chunks of 8-bit K and V", shape, UINT4, alignment=_CHUNK, member="chunks")

    @property
    def register_budget(self) -> int:
        return _REGISTERS[self.consumers][1]

    def registers(self, spec: AttentionSpec) -> int:
        """Estimates the registers of a consumer thread: its float32 scores and output, and what the variant needs.

        The 16-bit probabilities of one iteration are live together with the scores of the next.
        """
        return self._registers_without_queries(spec) + _registers_of_queries(self.held_columns(spec))

    def _registers_without_queries(self, spec: AttentionSpec) -> int:
        """Estimates the registers of a consumer thread that holds no columns of Q."""
        scores, output = _WARP_ROWS * self.tile_k // WARP, _WARP_ROWS * self.output_columns(spec) // WARP
        weight = Weight.BUSY if self.array_stages(spec) else demand_of(spec).weight
        converts = spec.scales_kv and spec.element != DTYPES["float16"] and weight == Weight.HEAVY
        return scores + scores // 2 + output + _OTHER_REGISTERS[weight] + (_ROW_SCALES if converts else 0)

    def matrix_cycles(self, spec: AttentionSpec) -> float:
        """Estimates the cycles of a tile's products by the rate of the tensor cores."""
        width = padded(spec.head_dim) + padded(spec.value_dim)
        return self.tile_q * self.tile_k * width / _TARGET.multiply_adds_per_cycle

    def exposed(self, blocks: int) -> float:
        return 0.5 if self.consumers == 1 else 0.3 if self.split > 1 else 0.1 if self.takes_turns else 0.12

    def summary(self, spec: AttentionSpec) -> str:
        """Returns the line that the kernel's header has about the plan."""
        turns = " that take turns" if self.takes_turns else ""
        heads = f" of {self.packed_heads} heads" if self.packed_heads > 1 else ""
        split = f" that share {ROWS} rows" if self.split > 1 else ""
        tiles = "K, of which V is a part" if spec.shared_kv else "K and V"
        tiles += f" converted from {spec.kv_dtype}" if spec.kv_dtype else ""
        drawn = f", dropout drawn for {self.drawn_steps(spec)} steps at once" if spec.dropout else ""
        return (
            f"{self.tile_q} queries{heads} x {self.tile_k} keys, {self.consumers} warpgroup(s) of "
            f"{self.warpgroup_registers(spec)[1]} registers{turns}{split}, {self.stages} stage(s) of {tiles}, "
            f"{self.shared_bytes(spec)} bytes of shared memory{drawn}"
        )

    def shared_memory(self, spec: AttentionSpec) -> SharedMemoryLayout:
        """Returns the layout.

        It has Q and O of each consumer warpgroup, the stages of K and of V, what warpgroups with the same rows pass to
        each other, the mbarriers, the number of the tile, and the random numbers that dropout draws ahead.
        """
        apart, stages = self.output_apart(spec), self.array_stages(spec)
        return self._shared_memory(spec, apart, self.drawn_steps(spec), self.passed_stages(spec), stages)

    def passed_stages(self, spec: AttentionSpec) -> int:
        """Returns the tiles of P in shared memory, for another warpgroup with the same rows: 2 if they fit."""
        if self.split == 1:
            return 0
        fits = self._shared_memory(spec, False, self.drawn_steps(spec), MAX_PASSED).total_bytes <= MAX_SHARED
        return MAX_PASSED if fits else 1

    def leaves_room(self, spec: AttentionSpec) -> bool:
        """Whether its tiles leave registers for what a variant needs, and shared memory for two tiles of P."""
        return self.registers(spec) < self.register_budget and self.passed_stages(spec) == MAX_PASSED

    def array_stages(self, spec: AttentionSpec) -> int:
        """Returns the tiles of a captured array in shared memory; 0 if elements are read from global memory."""
        if self.split > 1 or spec.page_size or spec.kv_dtype or not array_tile(spec, self.tile_k):
            return 0
        return max_array_stages(lambda stages: self._shared_memory(spec, False, 0, 0, stages), MAX_SHARED)

    def output_apart(self, spec: AttentionSpec) -> bool:
        """Whether O has memory of its own, so that Q of the next tile can be loaded early. Otherwise it overlays Q.

        Where warpgroups share rows, kernels whose O had memory of its own were up to 7% slower.
        """
        if self.split > 1:
            return False
        stages = self.array_stages(spec)
        return self._shared_memory(spec, True, self._prepared_steps, 1, stages).total_bytes <= MAX_SHARED

    @property
    def _prepared_steps(self) -> int:
        """The iterations for which a warp prepares the random numbers of dropout at once."""
        return _DRAWN_BLOCKS // max(1, self.tile_k // DROPOUT_COLUMNS)

    def drawn_steps(self, spec: AttentionSpec) -> int:
        """Returns the iterations for which dropout is drawn at once: as many as fit, up to a limit of little gain."""
        if not spec.dropout:
            return 0
        apart, limit = self.output_apart(spec), _MAX_DRAWN * self._prepared_steps
        for steps in range(limit, 0, -self._prepared_steps):
            memory = self._shared_memory(spec, apart, steps, array_stages=self.array_stages(spec))
            if memory.total_bytes <= MAX_SHARED:
                return steps
        return self._prepared_steps

    def _shared_memory(
        self, spec: AttentionSpec, output_apart: bool, drawn_steps: int, passed_stages: int = 1, array_stages: int = 0
    ) -> SharedMemoryLayout:
        rows, keys, stages = literal(ROWS), Extent("kTileK", self.tile_k), Extent("kStages", self.stages)
        head, value = head_extent(spec), value_extent(spec)
        element, _ = element_sizes(spec)
        of_rows = (
            Buffer("WarpgroupQuery", "Q", (rows, head), element, member="queries"),
            Buffer("WarpgroupOutput", "O", (rows, value), element, member="output"),
        )
        groups, label = Extent(self.group_constant, self.row_groups), "each warpgroup"
        passed = Extent("kPassedStages", passed_stages) if self.split > 1 else None
        arrays = Extent("kArrayStages", array_stages) if array_stages else None
        array, array_rows = array_tile(spec, self.tile_k), Extent("kConsumers * 64", self.consumers * ROWS)
        parts = self._parts(spec) if self.tiles_in_parts(spec) else None
        part_stages = (parts.key_stages, parts.value_stages) if parts else None
        given = stages, bool(spec.page_size), spec.shared_kv, passed, arrays, bool(spec.kv_dtype), part_stages
        barriers = forward_barriers(*given)
        index_bytes, tile = literal(batch_traits(spec).tile_bytes), batch_traits(spec).tile_label
        return SharedMemoryLayout(
            (
                Buffer("Warpgroup", label, copies=groups, parts=of_rows, union=not output_apart, index="warpgroup"),
                *staged_buffers(spec, keys, stages, parts),
                *((passed_buffer(keys, passed, element),) if passed else ()),
                *((array.buffer(array_rows, arrays),) if array and arrays else ()),
                *((self._chunk_buffer(spec),) if spec.kv_dtype else ()),
                mbarriers(barriers),
                Buffer("Index", tile, (index_bytes,), BYTE),
                *((Buffer("NextIndex", f"{tile} of array loads", (index_bytes,), BYTE),) if arrays else ()),
                *(self._drawing(drawn_steps) if spec.dropout else ()),
            ),
            barriers,
        )

    def _parts(self, spec: AttentionSpec) -> TileParts:
        """Returns the parts of tiles of K, and the halves of tiles of V that warpgroups with the same rows read."""
        return TileParts(
            Extent("kKeyColumns", padded_head_dim(spec) // self.key_parts(spec)),
            Extent("kKeyStages", self.key_parts(spec) * self.stages),
            Extent("kOutputColumns", self.output_columns(spec)),
            Extent("kValueStages", self.split * self.stages),
        )

    @property
    def group_constant(self) -> str:
        """The constant of `row_groups` in the kernel's text."""
        return "kConsumers" if self.split == 1 else "kRowGroups"

    def _drawing(self, drawn_steps: int) -> tuple[Buffer, Buffer]:
        """Returns the buffers of dropout: random words of each warp, and each thread's bits of dropped scores."""
        groups, constant = self.row_groups, self.group_constant
        warps, threads = Extent(f"{constant} * 4", groups * 4), Extent(f"{constant} * 128", groups * WARPGROUP)
        words, steps = -(-self.tile_k // (2 * DROPOUT_COLUMNS)), Extent("kDropoutSteps", drawn_steps)
        prepared = Buffer(
            "Blocks", "dropout's blocks", (warps, literal(_DRAWN_BLOCKS)), UINT4, alignment=16, reserves_alignment=True
        )
        return prepared, Buffer("DropoutBits", "dropped scores", (steps, threads, literal(words)), INT)

    def problem(self, spec: AttentionSpec, target: Target) -> str | None:
        """Returns why the plan is inconsistent or does not fit the spec or the target; None if it is valid."""
        if target.family != "hopper":
            return f"it is a plan of the family hopper, and {target.name} is of {target.family}"
        if self.consumers not in _REGISTERS or (self.takes_turns and self.consumers < 2):
            return f"consumers={self.consumers} must be 1, 2 or 3, and not 1 for taking turns"
        if not _DEPTH <= self.tile_k <= _MAX_COLUMNS or self.tile_k % (DROPOUT_COLUMNS if spec.dropout else _DEPTH):
            return f"tile_k={self.tile_k} must be a multiple of 16, of 32 with dropout, up to {_MAX_COLUMNS}"
        if self.packed_heads != 1 and not batch_traits(spec).packs_heads:
            return f"packed_heads={self.packed_heads} must be 1 with layout={spec.layout!r}"
        if why := forward_problem(spec) or self._split_problem(spec):
            return why
        if self.stages < 1:
            return f"stages={self.stages} must be positive"
        if self.stages == 1 and spec.shared_kv:
            return "stages=1 must be at least 2 with shared_kv=True, as a tile of K is read again as V in the next step"
        if self.packed_heads != 1 and (why := self._packing_problem(spec)):
            return f"packed_heads={self.packed_heads} {why}"
        return shared_memory_problem(self.shared_bytes(spec), target, "take fewer keys or stages")

    def _split_problem(self, spec: AttentionSpec) -> str | None:
        if self.split not in (1, 2) or (self.split == 2 and (self.consumers != 2 or self.takes_turns)):
            return f"split={self.split} must be 1, or 2 with consumers=2 that do not take turns"
        if self.split == 2 and not is_wide(spec):
            return f"split=2 must be 1, as no dimension is above {_MAX_COLUMNS}"
        if self.output_columns(spec) > _MAX_COLUMNS:
            return f"split=1 must be 2, with consumers=2, if value_dim is above {_MAX_COLUMNS}"
        return None

    def _packing_problem(self, spec: AttentionSpec) -> str | None:
        if self.packed_heads not in PACKS:
            return f"must be a power of 2 from 1 to {PACKS[-1]}"
        if spec.dropout:
            return "must be 1, as dropout is drawn for rows of one head"
        if spec.mask.expression.has(HEAD):
            return f"must be 1, as {spec.mask.name} differs between heads"
        if self.tile_q * self.tile_k % _MIN_LISTED and demand_of(spec).listed:
            return (
                f"leaves tiles of {self.tile_q} x {self.tile_k}, too small to be listed: pack fewer, or take more keys"
            )
        return None


def staged_buffers(
    spec: AttentionSpec, keys: Extent, stages: Extent, parts: TileParts | None = None
) -> tuple[Buffer, ...]:
    """Returns the stages of K, and of V unless it is a part of K. Their elements have 16 bits for every `kv_dtype`."""
    kv_element = element_sizes(spec)[0]
    parts = parts or TileParts(head_extent(spec), stages, value_extent(spec), stages)
    of_keys = Buffer("Key", "K", (keys, parts.key_columns), kv_element, copies=parts.key_stages, member="keys")
    of_values: dict[str, Any] = {"name": "Value", "label": "V", "shape": (keys, parts.value_columns)}
    of_values |= {"element": kv_element, "copies": parts.value_stages, "alignment": SWIZZLE_BYTES, "member": "values"}
    return of_keys, *(() if spec.shared_kv else (Buffer(**of_values),))


def passed_buffer(keys: Extent, stages: Extent, element: Extent) -> Buffer:
    """Returns the buffer in which a warpgroup passes P and the factors of the output to one with the same rows."""
    parts = (
        Buffer("P", "P", (literal(ROWS), keys), element, member="probabilities"),
        Buffer("Factors", "factors of the output", (literal(WARPGROUP),), FLOAT2, member="factors"),
    )
    return Buffer("Passed", "P of a step", copies=stages, parts=parts, alignment=SWIZZLE_BYTES)


def every_hopper_plan(spec: AttentionSpec, target: Target) -> Iterator[HopperPlan]:
    """Yields the plans that tuning may choose from, including plans that do not fit."""
    for consumers, tile_k, stages in product((1, 2, 3), range(32, 257, 16), (1, 2, 3)):
        for takes_turns in (False, True) if consumers > 1 else (False,):
            yield HopperPlan(consumers, tile_k, stages=stages, takes_turns=takes_turns)
    for tile_k, stages in product(range(32, 129, 16), (1, 2, 3)) if is_wide(spec) else ():
        yield HopperPlan(2, tile_k, stages=stages, split=2)
