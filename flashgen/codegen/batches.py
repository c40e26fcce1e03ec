"""The batch layouts of kernels: what each decides about argument structs, grids and workspaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

from flashgen.codegen.arguments import QUERY_ARRAYS, ArgumentLayout, Field
from flashgen.codegen.sizes import NAMED_SIZES, Grid, Sizes, ceil_div
from flashgen.codegen.varlen import MAP_ROWS, sequences_text, slots, varlen_fields
from flashgen.language.spec import AttentionSpec

_GRADIENTS = {
    "dq": ("heads_q", "q", "head_dim"),
    "dk": ("heads_kv", "k", "head_dim"),
    "dv": ("heads_kv", "k", "value_dim"),
}
_VARLEN_COMMENTS = {
    "lse_and_d": "(heads_q, rows, 2): base-2 LSE and D",
    "dq_accum": "(heads_q, rows, padded head_dim), in fragment order",
    "rows": "rows of all sequences, each rounded up",
}


class MapAxes(NamedTuple):
    """The axes of the tensor map of an array, without its columns.

    Attributes:
        sizes: The extents of the three axes.
        strides: Which stride of the array each axis has: "row", "head", "batch" or "page".
        rows: The rows of the array: of a sequence or a page, or of all sequences that are packed.
        rows_before: The number of rows by which the address of the map precedes that of the array.
    """

    sizes: tuple[Any, Any, Any]
    strides: tuple[str, str, str]
    rows: Any
    rows_before: int = 0


class DenseBatch:
    """A batch of sequences of equal length.

    Attributes:
        template: The template with the fragments of kernels that differ between batch layouts.
        scheduler: The template of the tile scheduler of Hopper's forward kernel.
        backward_scheduler: The template of the tile scheduler of Hopper's backward kernels of dK and dV.
        grid_axes: The axes of grids with a block per tile, head and sequence, in words.
        lengths: What `len_q` and `len_k` are, in words.
        tile: What a query tile or a key tile is called, in words.
        scores: The pairs of a query and a key over all sequences and heads, in words.
        outer_sizes: The members that count the sequences and query heads, for kernels without a search.
    """

    template = "batch/dense.cuh.jinja"
    scheduler = "hopper/scheduler.cuh.jinja"
    backward_scheduler = "hopper/backward/scheduler.cuh.jinja"
    grid_axes = "x, y and z"
    lengths: ClassVar[Mapping[str, str]] = {"len_q": "queries", "len_k": "keys"}
    tile = "tile"
    scores = "batch * heads_q * len_q * len_k"
    outer_sizes: tuple[str, ...] = ("batch", "heads_q")

    @property
    def template_context(self) -> dict[str, Any]:
        """The context of all templates: the fragments of the layout, and no search for a sequence unless added."""
        return {
            "batch_template": self.template,
            "scheduler_template": self.scheduler,
            "backward_scheduler_template": self.backward_scheduler,
            "sequences": "",
        }

    @property
    def lse(self) -> Field:
        """The member of the LSE."""
        return Field("float*", "lse", comment=f"({', '.join(self.row_axes('heads_q', 'q'))}), or null")

    def axes(self, heads: str, side: str) -> tuple[str, ...]:
        """Returns the axes of an array without its columns, by name. side: "q" or "k"."""
        return "batch", heads, f"len_{side}"

    def row_axes(self, heads: str, side: str) -> tuple[str, ...]:
        """Returns the axes of an array that has a number for each row of each head, by name. side: "q" or "k"."""
        return "batch", heads, f"len_{side}"

    def grid_text(self, tile: str, heads: str) -> str:
        """Returns the axes of the grid of a block per tile, head and sequence, in words."""
        return f"({tile}, {heads}, batch)"

    def map_axes(self, name: str, sizes: Sizes) -> MapAxes:
        """Returns the axes of the tensor map of q, the output, k, v, or a gradient of them, by name."""
        rows, heads = (sizes.len_q, sizes.heads_q) if name in QUERY_ARRAYS else (sizes.len_k, sizes.heads_kv)
        return MapAxes((rows, heads, sizes.batch), ("row", "head", "batch"), rows)

    def fields(self, *sizes: str | Field, keys: bool = True) -> list[Field]:
        """Returns the members of `size_fields` and `search_fields`."""
        return self.size_fields(*sizes) + self.search_fields(keys)

    def size_fields(self, *sizes: str | Field) -> list[Field]:
        """Returns the members for sizes, given by name or as they are, and for the number of query heads if needed."""
        return self.outer_fields("heads_q") + _members(*sizes)

    def outer_fields(self, *sizes: str | Field) -> list[Field]:
        """Returns members by which a kernel without a search numbers the heads and sequences of its tiles."""
        return _members(*sizes)

    def search_fields(self, keys: bool = True) -> list[Field]:
        """Returns the members by which a kernel finds its sequence; without `keys` only those about the queries."""
        return []

    def describe(self, layout: ArgumentLayout) -> ArgumentLayout:
        """Returns the layout with comments that give the shapes of gradients and of the backward workspaces."""
        shapes = {name: (*self.axes(heads, side), columns) for name, (heads, side, columns) in _GRADIENTS.items()}
        return _commented(layout, {name: f"({', '.join(shape)})" for name, shape in shapes.items()})

    def sequences(self, struct: str, layout: ArgumentLayout, slot_rows: str, **options: Any) -> dict[str, Any]:
        """Returns the template context by which a kernel finds its sequence. Arguments: see `sequences_text`."""
        return {}

    def query_tiles(self, tile: int, sizes: Sizes) -> Any:
        """Returns the number of query tiles of a head in a sequence, or of tile slots in all packed sequences."""
        return ceil_div(sizes.len_q, tile)

    def key_tiles(self, tile: int, sizes: Sizes) -> Any:
        """Returns the number of key tiles of a head in a sequence, or of tile slots in all packed sequences."""
        return ceil_div(sizes.len_k, tile)

    def outer(self, sizes: Sizes) -> Any:
        """Returns the extent of the batch dimension of grids: 1 if sequences are packed."""
        return sizes.batch

    def all_heads(self, heads: Any, sizes: Sizes) -> Any:
        """Returns the number of heads with tiles of their own: of all sequences, or `heads` if sequences are packed."""
        return sizes.batch * heads

    def query_grid(self, tile: int, sizes: Sizes) -> Grid:
        """Returns the grid of one block per query tile, query head and sequence."""
        return self.query_tiles(tile, sizes), sizes.heads_q, self.outer(sizes)

    def key_grid(self, tile: int, sizes: Sizes) -> Grid:
        """Returns the grid of one block per key tile, KV head and sequence."""
        return self.key_tiles(tile, sizes), sizes.heads_kv, self.outer(sizes)

    def padded_rows(self, multiple: int, sizes: Sizes) -> Any:
        """Returns the rows of backward workspaces: the queries of each sequence are rounded up to a multiple."""
        return ceil_div(sizes.len_q, multiple) * multiple

    def workspace_shape(self, sizes: Sizes, rows: Any, *columns: int) -> tuple[Any, ...]:
        """Returns the shape of a workspace with `rows` rows of `columns` for every query head."""
        return sizes.batch, sizes.heads_q, rows, *columns


class VarlenBatch(DenseBatch):
    """Packed sequences of different lengths, which only the device knows. Tiles are numbered by slots (`varlen`)."""

    template = "batch/varlen.cuh.jinja"
    scheduler = "hopper/varlen_scheduler.cuh.jinja"
    backward_scheduler = "hopper/backward/varlen_scheduler.cuh.jinja"
    grid_axes = "x and y"
    lengths: ClassVar[Mapping[str, str]] = {
        "len_q": "maximum queries of a sequence",
        "len_k": "maximum keys of a sequence",
    }
    tile = "tile slot"
    scores = "heads_q * (sum of len_q * len_k over the sequences)"
    outer_sizes = ()

    def axes(self, heads: str, side: str) -> tuple[str, ...]:
        return f"total_{side}", heads

    def row_axes(self, heads: str, side: str) -> tuple[str, ...]:
        return heads, f"total_{side}"

    def grid_text(self, tile: str, heads: str) -> str:
        return f"({tile} of the packed sequences, {heads})"

    def map_axes(self, name: str, sizes: Sizes) -> MapAxes:
        """Returns the axes of a map whose rows have two axes: see templates/hopper/copies.cuh.jinja."""
        rows, heads = (sizes.total_q, sizes.heads_q) if name in QUERY_ARRAYS else (sizes.total_k, sizes.heads_kv)
        return MapAxes((MAP_ROWS, heads, rows + 1), ("row", "head", "row"), rows, MAP_ROWS)

    def outer_fields(self, *sizes: str | Field) -> list[Field]:
        return []

    def search_fields(self, keys: bool = True) -> list[Field]:
        return varlen_fields(keys)

    def describe(self, layout: ArgumentLayout) -> ArgumentLayout:
        return _commented(super().describe(layout), _VARLEN_COMMENTS)

    def sequences(self, struct: str, layout: ArgumentLayout, slot_rows: str, **options: Any) -> dict[str, Any]:
        return {"sequences": sequences_text(struct, layout, slot_rows, **options)}

    def query_tiles(self, tile: int, sizes: Sizes) -> Any:
        return slots(sizes.total_q, sizes, tile)

    def key_tiles(self, tile: int, sizes: Sizes) -> Any:
        return slots(sizes.total_k, sizes, tile)

    def outer(self, sizes: Sizes) -> Any:
        return 1

    def all_heads(self, heads: Any, sizes: Sizes) -> Any:
        return heads

    def padded_rows(self, multiple: int, sizes: Sizes) -> Any:
        return slots(sizes.total_q, sizes, multiple) * multiple

    def workspace_shape(self, sizes: Sizes, rows: Any, *columns: int) -> tuple[Any, ...]:
        return sizes.heads_q, rows, *columns


def _commented(layout: ArgumentLayout, comments: Mapping[str, str]) -> ArgumentLayout:
    """Returns the layout with these comments, by the names of the members."""
    return ArgumentLayout(
        tuple(replace(field, comment=comments.get(field.name, field.comment)) for field in layout.fields)
    )


def _members(*sizes: str | Field) -> list[Field]:
    return [Field("int", size) if isinstance(size, str) else size for size in sizes]


_DENSE, _VARLEN = DenseBatch(), VarlenBatch()


def batch_of(spec: AttentionSpec) -> DenseBatch:
    """Returns the batch layout of a spec's kernels."""
    return _VARLEN if spec.is_varlen else _DENSE


def map_axes(spec: AttentionSpec, name: str, sizes: Sizes, pages: Any) -> MapAxes:
    """Returns the axes of the tensor map of an array. pages: the number of pages, if k and v are paged."""
    if spec.page_size and name not in QUERY_ARRAYS:
        return MapAxes((spec.page_size, sizes.heads_kv, pages), ("row", "head", "page"), spec.page_size)
    return batch_of(spec).map_axes(name, sizes)


def describe_maps(spec: AttentionSpec, layout: ArgumentLayout, boxes: Mapping[str, tuple[int, ...]]) -> ArgumentLayout:
    """Returns the layout with comments that give the axes of each tensor map, and the box of one copy.

    boxes: See `RenderedKernel`.
    """
    return _commented(layout, {f"{name}_map": _map_comment(spec, name, box) for name, box in boxes.items()})


def _map_comment(spec: AttentionSpec, name: str, box: tuple[int, ...]) -> str:
    """Returns the comment of the tensor map of an array: its axes in the order of the map, and the box of one copy."""
    first, head, last = map_axes(spec, name, NAMED_SIZES, None).strides
    if first == last:  # packed sequences have two axes of rows
        first, last = "row x", "row y"
    axes: tuple[str, ...] = "column", first, head, last
    units: tuple[str, ...] = "columns", "rows"
    if len(box) == 3:
        axes, units = ("column", head, first, last), ("columns", "heads", "rows")
    elif len(box) == 4:
        axes, units = ("column", "row", "panel", "group of rows", last), ("columns", "rows", "panels", "groups")
    extents = " x ".join(f"{extent} {unit}" for extent, unit in zip(box, units, strict=True))
    return f"axes: {', '.join(axes)}; box: {extents}"
