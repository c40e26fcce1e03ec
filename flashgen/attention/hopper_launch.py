"""The launch of Hopper's forward kernel: its grid, and its arguments, in which tensor maps stand for q, k, v and o."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from operator import itemgetter

from flashgen.attention.launches import Launch, capture_values, list_shape, list_strides
from flashgen.attention.marshal import ArgumentWriter, Value
from flashgen.attention.problem import Problem, contiguous_strides, in_layout, reciprocal
from flashgen.codegen.arguments import ArgumentLayout
from flashgen.codegen.hopper.forward import HopperKernel
from flashgen.errors import ArgumentError
from flashgen.language.spec import AttentionSpec
from flashgen.runtime.arrays import View
from flashgen.runtime.remembered import Remembered
from flashgen.runtime.tensor_maps import MAP_BYTES, MapMaker, MapShape, emulated_map, map_shape

_SECTION_BYTES = 32 * 2**20  # of K and V, which blocks that run side by side should find in the L2
_MOST_TILES = 2**30 - 1  # so that a step past the last is a number, too
_MOST_KEPT = 64  # sets of maps


class MapWriter(ArgumentWriter):
    """Writes a struct whose first members are tensor maps of arrays."""

    def __init__(
        self,
        layout: ArgumentLayout,
        values: Mapping[str, Value],
        shapes: Mapping[str, MapShape],
        empty: Collection[str] = (),
        counts_tiles: bool = False,
    ) -> None:
        """`shapes`: of the maps by their arrays' names. empty: those of them that have no element, nor an address.

        counts_tiles: blocks take tiles by a counter, `next_tile`.
        """
        super().__init__(layout, values)
        self.counts_tiles = counts_tiles
        self.shapes = shapes
        self.offsets |= {name: layout.offset(f"{name}_map") for name in shapes}  # a map begins with the address
        self.pointer_names = [*shapes, *self.pointer_names]
        self._sources = itemgetter(*("o" if name in empty else name for name in shapes))
        self._makers = [MapMaker(shape) for shape in shapes.values()]
        self._maps: Remembered[tuple[int, ...], bytes] = Remembered(_MOST_KEPT)  # of the last sets of addresses

    def write(self, pointers: Mapping[str, int], numbers: Mapping[str, int | float]) -> bytearray:
        """The struct of one call on a GPU."""
        buffer = super().write(pointers, numbers)
        addresses = self._sources(pointers)
        maps = self._maps.get(addresses)
        if maps is None:
            maps = self._maps.get_or_make(addresses, partial(self._made, addresses))
        buffer[: len(maps)] = maps  # the struct begins with them
        return buffer

    def _made(self, addresses: tuple[int, ...]) -> bytes:
        return b"".join([make(address) for make, address in zip(self._makers, addresses, strict=True)])

    def write_emulated(self, numbers: Mapping[str, int | float]) -> bytearray:
        """The struct of one call on the emulator, with maps as it has them."""
        buffer = super().write({}, numbers)
        for name, shape in self.shapes.items():
            at = self.offsets[name]
            buffer[at : at + MAP_BYTES] = emulated_map(shape)
        return buffer


def hopper_launch(
    spec: AttentionSpec,
    kernel: HopperKernel,
    problem: Problem,
    arrays: Mapping[str, View],
    multiprocessors: int,
) -> Launch:
    """The launch for calls of these sizes and strides, on a GPU of so many multiprocessors.

    Raises:
        ArgumentError: TMA cannot walk along a stride, or heads are to be packed that share no head of k and v.
    """
    packed = kernel.plan.packed_heads
    if problem.heads_per_kv % packed and problem.heads_q:
        raise ArgumentError(
            f"q has {problem.heads_per_kv} heads for each head of k and v, no multiple of the {packed} that the plan "
            f"packs: {kernel.plan}; compile without a plan, or with another packed_heads"
        )
    heads, tiles_q = problem.batch * (problem.heads_q // packed), -(-problem.len_q // kernel.plan.tile_q)
    if heads * tiles_q > _MOST_TILES:
        raise ArgumentError(f"{heads} heads in all of {problem.len_q} queries are too many tiles; split the batch")
    values: dict[str, Value] = {
        "tiles": heads * tiles_q,
        "tiles_q": tiles_q,
        "heads": heads,
        "section": section_heads(spec, kernel, problem),
        "heads_q": problem.heads_q,
        "kv_reciprocal": reciprocal(max(problem.heads_per_kv // packed, 1)),
        "len_q": problem.len_q,
        "len_k": problem.len_k,
    }
    if kernel.uses_lists:
        values["list_strides"] = list_strides(list_shape(spec, problem, (kernel.plan.tile_q, kernel.plan.tile_k)))
    values |= capture_values(kernel.layout, spec, arrays)
    blocks = min(heads * tiles_q, multiprocessors)  # of which each multiprocessor holds one
    empty = () if problem.len_k else ("k", "v")
    shapes, counts_tiles = _shapes(spec, kernel, problem), blocks < heads * tiles_q
    writer = MapWriter(kernel.layout, values, shapes, empty, counts_tiles)
    return Launch((max(blocks, 1), 1, 1), writer)


def _shapes(spec: AttentionSpec, kernel: HopperKernel, problem: Problem) -> dict[str, MapShape]:
    output = in_layout(contiguous_strides(problem.output_shape(spec)), spec.layout)[:3]
    packed, shapes = kernel.plan.packed_heads > 1, {}
    for name in "qkvo":
        columns = spec.value_dim if name in "vo" else spec.head_dim
        rows, heads = (problem.len_q, problem.heads_q) if name in "qo" else (problem.len_k, problem.heads_kv)
        batch, head, row = problem.strides.get(name, output) if rows else (columns,) * 3  # of nothing, they may be any
        sizes, strides = (columns, rows, heads, problem.batch), (row, head, batch)
        called = "out" if name == "o" else name
        shapes[name] = map_shape(called, spec.dtype, sizes, strides, kernel.boxes[name], packed and name in "qo")
    return shapes


def section_heads(spec: AttentionSpec, kernel: HopperKernel, problem: Problem) -> int:
    """Query heads, or packs, whose longest tiles run first together: as many as share the L2 with K and V of theirs.

    Where all tiles are alike a head's tiles run after another's.
    """
    packed = kernel.plan.packed_heads
    heads = problem.batch * (problem.heads_q // packed)
    if not kernel.longest_first:
        return 1
    head_bytes = 2 * max(problem.len_k, 1) * (spec.head_dim + spec.value_dim)
    fitting = max(_SECTION_BYTES // head_bytes, 1) * (problem.heads_per_kv // packed)
    return max(min(fitting, heads), 1)
