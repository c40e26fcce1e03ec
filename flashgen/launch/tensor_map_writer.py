"""Writes argument structs that hold TMA tensor maps of arrays in place of their pointers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, Self

from flashgen.codegen.arguments import QUERY_ARRAYS, VALUE_WIDE, ArgumentLayout
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.sizes import Sizes
from flashgen.codegen.varlen import MAP_ROWS
from flashgen.language.spec import AttentionSpec
from flashgen.launch.argument_writer import Addresses, ArgumentWriter, Value
from flashgen.runtime.caching import Cache
from flashgen.runtime.tensor_maps import (
    MAP_BYTES,
    MapMaker,
    MapShape,
    emulated_map,
    map_shape,
    panel_map_shape,
    panels_between_heads,
)

_MAX_CACHED = 64  # sets of maps
_PANEL_BOX_RANK = 4  # the rank of a box with several panels


class TensorMapWriter(ArgumentWriter):
    """Writes a struct that begins with the tensor maps of arrays."""

    def __init__(
        self,
        layout: ArgumentLayout,
        values: Mapping[str, Value],
        shapes: Mapping[str, MapShape],
        empty: Collection[str] = (),
    ) -> None:
        """shapes: of the maps, by array. empty: the arrays without elements, which have no address."""
        super().__init__(layout, values)
        self.shapes = shapes
        self.offsets |= {name: layout.offset(f"{name}_map") for name in shapes}  # a map begins with the address
        self.pointer_names = [*shapes, *self.pointer_names]
        self._arrays = ["o" if name in empty else name for name in shapes]  # a map needs a valid address
        self._sources: Any = itemgetter(*self._arrays)
        self._makers = [MapMaker(shape) for shape in shapes.values()]
        self._maps: Cache[tuple[int, ...], bytes] = Cache(_MAX_CACHED)  # of the last sets of addresses

    def by_position(self, positions: Mapping[str, int]) -> Self:
        """See `ArgumentWriter.by_position`. Both writers share the cached maps."""
        other = super().by_position(positions)
        other._sources = itemgetter(*(positions.get(name, 0) for name in self._arrays))
        return other

    def write_into(
        self, struct: bytearray | memoryview, pointers: Addresses | list[int], numbers: Mapping[str, int | float]
    ) -> None:
        """See `ArgumentWriter.write_into`. Also writes the maps of the arrays at these addresses."""
        super().write_into(struct, pointers, numbers)
        addresses = self._sources(pointers)
        maps = self._maps.get(addresses)
        if maps is None:
            maps = self._maps.get_or_make(addresses, partial(self._encode, addresses))
        struct[: len(maps)] = maps  # the struct begins with them

    def _encode(self, addresses: tuple[int, ...]) -> bytes:
        return b"".join([make(address) for make, address in zip(self._makers, addresses, strict=True)])

    def write_emulated(self, numbers: Mapping[str, int | float]) -> bytearray:
        """Returns the struct of one call on the emulator, with maps in its format."""
        struct = self.template.copy()
        super().write_into(struct, Addresses(), numbers)
        for name, shape in self.shapes.items():
            offset = self.offsets[name]
            struct[offset : offset + MAP_BYTES] = emulated_map(shape)
        return struct


def map_shapes(
    spec: AttentionSpec,
    kernel: RenderedKernel,
    sizes: Sizes,
    strides: Mapping[str, tuple[int, int, int]],
    pages: int = 0,
) -> dict[str, MapShape]:
    """Returns the shapes of the maps of a kernel's arrays. Raises ArgumentError if TMA does not support a stride.

    pages: the number of pages of k and v, if they are paged.
    """
    packed, shapes = kernel.plan.packed_heads > 1, {}
    for name, box in kernel.boxes.items():
        if spec.is_varlen and (name in QUERY_ARRAYS or not spec.page_size):
            shapes[name] = _varlen_shape(spec, kernel, sizes, name, strides[name])
            continue
        extents, steps = _map_axes(spec, sizes, name, strides[name], pages)
        if len(box) == _PANEL_BOX_RANK:
            shapes[name] = panel_map_shape(name, spec.element_of(name).name, extents, steps, box)
            continue
        argument, dtype = "out" if name == "o" else name, spec.element_of(name).name
        shapes[name] = map_shape(argument, dtype, extents, steps, box, packed and name in QUERY_ARRAYS)
    return shapes


def head_panels(
    spec: AttentionSpec,
    kernel: RenderedKernel,
    sizes: Sizes,
    strides: Mapping[str, tuple[int, int, int]],
    pages: int,
) -> dict[str, int]:
    """Returns struct members: the panels from one head to the next, of arrays with several panels in one copy."""
    return {
        f"{name}_head_panels": panels_between_heads(name, *_map_axes(spec, sizes, name, strides[name], pages), box)
        for name, box in kernel.boxes.items()
        if len(box) == _PANEL_BOX_RANK
    }


def _map_axes(
    spec: AttentionSpec, sizes: Sizes, name: str, strides: tuple[int, int, int], pages: int
) -> tuple[tuple[int, int, int, int], tuple[int, int, int]]:
    """Returns the sizes (columns, rows, heads, sequences or pages) of an array, and the strides of the last three."""
    columns = spec.value_dim if name in VALUE_WIDE else spec.head_dim
    rows, heads, outermost = _extents(spec, sizes, name, pages)
    outer, head, row = strides if rows and outermost else (columns,) * 3  # an empty array may have invalid strides
    return (columns, rows, heads, outermost), (row, head, outer)


def _extents(spec: AttentionSpec, sizes: Sizes, name: str, pages: int) -> tuple[int, int, int]:
    """Returns (rows, heads, sequences or pages) of an array."""
    if name in QUERY_ARRAYS:
        return sizes.len_q, sizes.heads_q, sizes.batch
    return (spec.page_size, sizes.heads_kv, pages) if spec.page_size else (sizes.len_k, sizes.heads_kv, sizes.batch)


def _varlen_shape(
    spec: AttentionSpec, kernel: RenderedKernel, sizes: Sizes, name: str, strides: tuple[int, int, int]
) -> MapShape:
    """Returns the map of a varlen array, with its rows along two axes: see templates/hopper/copies.cuh.jinja."""
    columns = spec.value_dim if name in VALUE_WIDE else spec.head_dim
    rows, heads = (sizes.total_q, sizes.heads_q) if name in QUERY_ARRAYS else (sizes.total_k, sizes.heads_kv)
    _, head, row = strides
    if rows <= 1:  # arrays of at most one row may have invalid strides
        row, head = columns * heads, head if rows else columns
    argument, sizes_of_map = "out" if name == "o" else name, (columns, MAP_ROWS, heads, rows + 1)
    shape = map_shape(argument, spec.element_of(name).name, sizes_of_map, (row, head, row), kernel.boxes[name])
    return replace(shape, rows_before=MAP_ROWS)
