"""Writes argument structs that hold TMA tensor maps of arrays in place of their pointers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Self

from flashgen.codegen.arguments import QUERY_ARRAYS, VALUE_WIDE, ArgumentLayout
from flashgen.codegen.batches import MapAxes, map_axes
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.sizes import Sizes
from flashgen.language.spec import AttentionSpec
from flashgen.launch.argument_writer import Addresses, ArgumentWriter, Value, getter
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
        shapes = dict(sorted(shapes.items(), key=lambda shape: layout.offset(f"{shape[0]}_map")))
        self.shapes = shapes
        self.offsets |= {name: layout.offset(f"{name}_map") for name in shapes}  # a map begins with the address
        self.pointer_names = [*shapes, *self.pointer_names]
        self._arrays = ["o" if name in empty else name for name in shapes]  # a map needs a valid address
        self._sources = getter(self._arrays)
        self._makers = [MapMaker(shape) for shape in shapes.values()]
        self._maps: Cache[tuple[int, ...], bytes] = Cache(_MAX_CACHED)  # of the last sets of addresses

    def by_position(self, positions: Mapping[str, int]) -> Self:
        """See `ArgumentWriter.by_position`. Both writers share the cached maps."""
        other = super().by_position(positions)
        other._sources = getter([positions.get(name, 0) for name in self._arrays])
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
    packed = kernel.plan.packed_heads > 1
    shapes: dict[str, MapShape] = {}
    for name, box in kernel.boxes.items():
        axes = map_axes(spec, name, sizes, pages)
        extents, steps = _extents(spec, axes, name, strides[name])
        if len(box) == _PANEL_BOX_RANK:
            shape = panel_map_shape(name, spec.element_of(name).name, extents, steps, box)
        else:
            argument, dtype = "out" if name == "o" else name, spec.element_of(name).name
            shape = map_shape(argument, dtype, extents, steps, box, packed and name in QUERY_ARRAYS)
            shape = replace(shape, rows_before=axes.rows_before)
        shapes[name] = replace(shape, l2_promotion=kernel.l2_promotion)
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
        f"{name}_head_panels": panels_between_heads(
            name, *_extents(spec, map_axes(spec, name, sizes, pages), name, strides[name]), box
        )
        for name, box in kernel.boxes.items()
        if len(box) == _PANEL_BOX_RANK
    }


def _extents(
    spec: AttentionSpec, axes: MapAxes, name: str, strides: tuple[int, int, int]
) -> tuple[tuple[int, int, int, int], tuple[int, int, int]]:
    """Returns the extents of the axes of a map, and the strides of the last three of them."""
    columns, heads = spec.value_dim if name in VALUE_WIDE else spec.head_dim, axes.sizes[1]
    outer, head, row = strides if axes.rows and axes.sizes[2] else (columns,) * 3  # an empty array may have any strides
    row = columns * heads if axes.rows == 1 else row  # as may the only row
    by_name = {"row": row, "head": head, "batch": outer, "page": outer}
    first, second, third = (by_name[stride] for stride in axes.strides)
    return (columns, *axes.sizes), (first, second, third)
