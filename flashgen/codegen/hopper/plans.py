"""How Hopper's forward kernel divides its work: tiles, stages, warpgroups, registers. Follows from the spec alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

from flashgen.codegen.demand import demand_of
from flashgen.codegen.hopper.barriers import forward_barriers
from flashgen.codegen.hopper.pages import problem_of_cache
from flashgen.codegen.plan import Checked, shared_memory_problem
from flashgen.codegen.shared_memory import BYTE, INT, UINT4, Buffer, Extent, SharedMemoryLayout, literal, mbarriers
from flashgen.codegen.targets import TARGETS, Target
from flashgen.codegen.tiling import DROPOUT_COLUMNS, WARP, head_extent, padded, value_extent
from flashgen.language.operations import HEAD
from flashgen.language.spec import AttentionSpec

WARPGROUP = 128
_ROWS = 64  # of a wgmma
_DEPTH = 16
_MOST_COLUMNS = 256  # of a wgmma, and rows of a TMA box
_INDEX_BYTES = 8  # of the number of a tile, which the producer tells the consumers
_WORK_BYTES = 64  # of the tile itself, which it tells them of a ragged batch
_TARGET = TARGETS["sm_90a"]  # for which this family and its table of measured plans were made
_MOST_SHARED = _TARGET.shared_per_block
_SWIZZLE_BYTES = 1024  # after which the widest swizzle of TMA repeats

_DRAWN_BLOCKS = 32  # of keys, for which a warp's lanes prepare dropout's random numbers, one each
_MOST_DRAWN = 2  # times as many blocks are drawn at once

_WIDE = 192  # columns, beyond which registers are short
_LEAST_LISTED = 256  # scores of a tile, that a warp looks at before it votes

PROMPT_QUERIES = _ROWS
"""Of a sequence of a mixed batch from which on it is a prompt: the rows of a warpgroup."""
PACKS = (1, 2, 4, 8, 16, 32, 64)  # heads whose rows fill those of a wgmma without a rest

# Registers beside scores, probabilities and output, by weight: addresses, row states, what scores and masks are made
# with. Of the kernels that compile without spills the one with the most of the latter tells them.
_BESIDE = (30, 32, 40, 64, 56, 64, 96)
# Registers a thread of the warpgroup that loads keeps, and one of those that compute gets, by how many compute.
_REGISTERS = {1: (56, 256), 2: (24, 240), 3: (32, 160)}
# Over pages a whole warp loads, whose lanes look up pages: where those that compute can spare registers, it has more of
# them, to start more copies together. `registers` estimates: kernels up to this many do not spill with 152.
_REGISTERS_OVER_PAGES = _REGISTERS | {2: (40, 232)}
_REGISTERS_TO_SPARE, _LIGHT = (56, 152), 156


def panel_columns(width: int) -> int:
    """Columns of a panel, the widest TMA swizzles (128, 64 or 32 bytes) that divides a padded width."""
    return next(columns for columns in (64, 32, 16) if padded(width) % columns == 0)


@dataclass(frozen=True)
class HopperPlan(Checked):
    """The plan of Hopper's forward kernel.

    Attributes:
        consumers: warpgroups that compute, 64 rows each; one more loads.
        tile_k: keys of a step.
        stages: tiles of K, and of V, that shared memory holds at once.
        takes_turns: warpgroups take turns in starting their products, so that one's softmax meets another's.
        packed_heads: query heads of one head of K and V that are rows of a tile, head fastest: row r is query
            r / packed_heads of head r % packed_heads. A power of 2 up to 64; 1 is a head by itself.
    """

    consumers: int
    tile_k: int
    stages: int = 2
    takes_turns: bool = False
    packed_heads: int = 1
    blocks: ClassVar[int] = 1  # its registers leave room for no other

    @property
    def rows(self) -> int:
        """Rows of a block: of each of its queries as many as heads are packed."""
        return self.consumers * _ROWS

    @property
    def tile_q(self) -> int:
        """Queries of a block."""
        return self.rows // self.packed_heads

    def show_options(self, spec: AttentionSpec) -> str:
        return f"--packed-heads {self.packed_heads}" if self.packed_heads > 1 else ""

    def packing(self, heads: int, spec: AttentionSpec) -> HopperPlan:
        """The plan with so many heads packed.

        What a score function reads by head, lanes then read each for itself. Beside the widest rows that leaves
        registers for fewer keys, and for fewer still where it is read anew for each score.
        """
        demand, most = demand_of(spec), self.tile_k
        if heads > 1 and demand.reads_by_head and max(padded(spec.head_dim), padded(spec.value_dim)) > _WIDE:
            most = 32 if demand.reads_by_head_and_position else 64
        return replace(self, packed_heads=heads, tile_k=min(self.tile_k, most))

    @property
    def threads(self) -> int:
        return (self.consumers + 1) * WARPGROUP

    @property
    def warps(self) -> int:
        """Warps that compute."""
        return self.consumers * 4

    def warpgroup_registers(self, spec: AttentionSpec) -> tuple[int, int]:
        """Registers that a thread of the warpgroup that loads keeps, and that one of those that compute gets."""
        if spec.page_size and self.consumers == 3 and self.registers(spec) <= _LIGHT:
            return _REGISTERS_TO_SPARE
        return (_REGISTERS_OVER_PAGES if spec.page_size else _REGISTERS)[self.consumers]

    @property
    def register_budget(self) -> int:
        return _REGISTERS[self.consumers][1]

    def registers(self, spec: AttentionSpec) -> int:
        """The float32 scores and output of a warp's rows over 32 lanes, and what the variant needs.

        The 16-bit probabilities of one step stand beside the scores of the next.
        """
        rows = self.rows // self.warps
        scores, output = rows * self.tile_k // WARP, rows * padded(spec.value_dim) // WARP
        return scores + scores // 2 + output + _BESIDE[demand_of(spec).weight]

    def matrix_cycles(self, spec: AttentionSpec) -> float:
        """By the rate of the tensor cores."""
        width = padded(spec.head_dim) + padded(spec.value_dim)
        return self.tile_q * self.tile_k * width / _TARGET.multiply_adds_per_cycle

    def exposed(self, blocks: int) -> float:
        return 0.5 if self.consumers == 1 else 0.1 if self.takes_turns else 0.12

    def summary(self, spec: AttentionSpec) -> str:
        """One line for the kernel's header."""
        turns = " that take turns" if self.takes_turns else ""
        heads = f" of {self.packed_heads} heads" if self.packed_heads > 1 else ""
        drawn = f", dropout drawn for {self.drawn_steps(spec)} steps at once" if spec.dropout else ""
        return (
            f"{self.tile_q} queries{heads} x {self.tile_k} keys, {self.consumers} warpgroup(s) of "
            f"{self.warpgroup_registers(spec)[1]} registers{turns}, {self.stages} stage(s) of K and V, "
            f"{self.shared_bytes(spec)} bytes of shared memory{drawn}"
        )

    def shared_memory(self, spec: AttentionSpec) -> SharedMemoryLayout:
        """By warpgroup Q and O; the stages of K and of V; mbarriers; the tile's number; what dropout draws ahead."""
        return self._shared_memory(spec, self.output_apart(spec), self.drawn_steps(spec))

    def output_apart(self, spec: AttentionSpec) -> bool:
        """Whether O has room of its own, so that the next tile's Q can be loaded early; else it overlays Q."""
        return self._shared_memory(spec, True, self._prepared_steps).total_bytes <= _MOST_SHARED

    @property
    def _prepared_steps(self) -> int:
        """The steps that the blocks of keys which a warp prepares at once make."""
        return _DRAWN_BLOCKS // max(1, self.tile_k // DROPOUT_COLUMNS)

    def drawn_steps(self, spec: AttentionSpec) -> int:
        """Steps whose dropout is drawn at once: as many as there is room for, until more would gain little."""
        if not spec.dropout:
            return 0
        apart, most = self.output_apart(spec), _MOST_DRAWN * self._prepared_steps
        for steps in range(most, 0, -self._prepared_steps):
            if self._shared_memory(spec, apart, steps).total_bytes <= _MOST_SHARED:
                return steps
        return self._prepared_steps

    def _shared_memory(self, spec: AttentionSpec, output_apart: bool, drawn_steps: int) -> SharedMemoryLayout:
        rows, keys, stages = literal(_ROWS), Extent("kTileK", self.tile_k), Extent("kStages", self.stages)
        head, value = head_extent(spec), value_extent(spec)
        of_rows = (Buffer("Query", "Q", (rows, head)), Buffer("Output", "O", (rows, value)))
        consumers, label = Extent("kConsumers", self.consumers), "rows of warpgroups"
        barriers = forward_barriers(stages, paged=bool(spec.page_size))
        index_bytes = literal(_WORK_BYTES if spec.is_ragged else _INDEX_BYTES)
        return SharedMemoryLayout(
            (
                Buffer("Rows", label, copies=consumers, parts=of_rows, union=not output_apart),
                Buffer("Key", "K", (keys, head), copies=stages),
                Buffer("Value", "V", (keys, value), copies=stages, alignment=_SWIZZLE_BYTES),
                mbarriers(barriers),
                Buffer("Index", "tile number", (index_bytes,), BYTE),
                *(self._drawing(drawn_steps) if spec.dropout else ()),
            ),
            barriers,
        )

    def _drawing(self, drawn_steps: int) -> tuple[Buffer, Buffer]:
        """Random words of blocks of keys, by warp; and a bit for each score of some steps, in words of a thread."""
        warps, threads = Extent("kConsumers * 4", self.warps), Extent("kConsumers * 128", self.consumers * WARPGROUP)
        words, steps = -(-self.tile_k // (2 * DROPOUT_COLUMNS)), Extent("kDrawnSteps", drawn_steps)
        prepared = Buffer(
            "Blocks", "dropout's blocks", (warps, literal(_DRAWN_BLOCKS)), UINT4, alignment=16, reserves_alignment=True
        )
        return prepared, Buffer("Drawn", "dropped scores", (steps, threads, literal(words)), INT)

    def problem(self, spec: AttentionSpec, target: Target) -> str | None:
        """Why the plan contradicts itself, or does not fit the spec or the target; None where it does."""
        if target.family != "hopper":
            return f"it is a plan of the family hopper, and {target.name} is of {target.family}"
        if self.consumers not in _REGISTERS or (self.takes_turns and self.consumers < 2):
            return f"consumers={self.consumers} must be 1, 2 or 3, and not 1 for taking turns"
        if not _DEPTH <= self.tile_k <= _MOST_COLUMNS or self.tile_k % (DROPOUT_COLUMNS if spec.dropout else _DEPTH):
            return f"tile_k={self.tile_k} must be a multiple of 16, of 32 with dropout, up to {_MOST_COLUMNS}"
        if spec.is_ragged and self.packed_heads != 1:
            return f"packed_heads={self.packed_heads} must be 1 with layout='thd'"
        if why := problem_of_cache(spec):
            return why
        if self.stages < 1:
            return f"stages={self.stages} must be positive"
        if self.packed_heads != 1 and (why := self._problem_of_packing(spec)):
            return f"packed_heads={self.packed_heads} {why}"
        return shared_memory_problem(self.shared_bytes(spec), target, "take fewer keys or stages")

    def _problem_of_packing(self, spec: AttentionSpec) -> str | None:
        if self.packed_heads not in PACKS:
            return f"must be a power of 2 from 1 to {PACKS[-1]}"
        if spec.dropout:
            return "must be 1, as dropout is drawn for rows of one head"
        if spec.mask.expression.has(HEAD):
            return f"must be 1, as {spec.mask.name} differs between heads"
        if self.tile_q * self.tile_k % _LEAST_LISTED and demand_of(spec).listed:
            return (
                f"leaves tiles of {self.tile_q} x {self.tile_k}, too small to be listed: pack fewer, or take more keys"
            )
        return None


def every_hopper_plan(spec: AttentionSpec, target: Target) -> Iterator[HopperPlan]:
    """The plans that tuning may choose from, whether or not they fit."""
    for consumers, tile_k, stages in product((1, 2, 3), range(32, 257, 16), (1, 2, 3)):
        for takes_turns in (False, True) if consumers > 1 else (False,):
            yield HopperPlan(consumers, tile_k, stages=stages, takes_turns=takes_turns)
