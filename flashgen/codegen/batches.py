"""The batch layouts of kernels: what each decides about argument structs, grids and workspaces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flashgen.codegen.arguments import ArgumentLayout, Field
from flashgen.codegen.rendered_kernel import Grid
from flashgen.codegen.sizes import Sizes, ceil_div
from flashgen.codegen.varlen import sequences_text, slots, varlen_fields
from flashgen.language.spec import AttentionSpec

_VARLEN_COMMENTS = {
    "statistics": "(heads_q, rows, 2): base-2 LSE and D",
    "dq_accum": "(heads_q, rows, padded head_dim), in fragment order",
    "rows": "rows of all sequences, each rounded up",
}


class DenseBatch:
    """A batch of sequences of equal length.

    Attributes:
        is_varlen: Whether the templates emit the search for the sequence of a tile slot.
        lse: The member of the LSE.
        outer_sizes: The members that count the sequences and query heads, for kernels without a search.
    """

    is_varlen = False
    lse = Field("float*", "lse", comment="(batch, heads_q, len_q), or null")
    outer_sizes: tuple[str, ...] = ("batch", "heads_q")

    def fields(self, *sizes: str | Field, keys: bool = True) -> list[Field]:
        """Returns the members of `size_fields` and `search_fields`."""
        return self.size_fields(*sizes) + self.search_fields(keys)

    def size_fields(self, *sizes: str | Field) -> list[Field]:
        """Returns the members for sizes, given by name or as they are, and for the number of query heads if needed."""
        return _members("heads_q", *sizes)

    def search_fields(self, keys: bool = True) -> list[Field]:
        """Returns the members by which a kernel finds its sequence; without `keys` only those about the queries."""
        return []

    def describe(self, layout: ArgumentLayout) -> ArgumentLayout:
        """Returns the layout with comments that give the shapes of the backward workspaces."""
        return layout

    def sequences(self, struct: str, layout: ArgumentLayout, slot_rows: str, **options: Any) -> dict[str, Any]:
        """Returns the template context by which a kernel finds its sequence. Arguments: see `sequences_text`."""
        return {}

    def query_tiles(self, tile: int, sizes: Sizes) -> Any:
        """Returns the query tiles of a head: of one sequence, or of all sequences that are packed."""
        return ceil_div(sizes.len_q, tile)

    def key_tiles(self, tile: int, sizes: Sizes) -> Any:
        """Returns the key tiles of a head: of one sequence, or of all sequences that are packed."""
        return ceil_div(sizes.len_k, tile)

    def outer(self, sizes: Sizes) -> Any:
        """Returns the extent of the batch dimension of grids: 1 if sequences are packed."""
        return sizes.batch

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

    is_varlen = True
    lse = Field("float*", "lse", comment="(heads_q, total_q), or null")
    outer_sizes = ()

    def size_fields(self, *sizes: str | Field) -> list[Field]:
        return _members(*sizes)

    def search_fields(self, keys: bool = True) -> list[Field]:
        return varlen_fields(keys)

    def describe(self, layout: ArgumentLayout) -> ArgumentLayout:
        return ArgumentLayout(
            tuple(replace(field, comment=_VARLEN_COMMENTS.get(field.name, field.comment)) for field in layout.fields)
        )

    def sequences(self, struct: str, layout: ArgumentLayout, slot_rows: str, **options: Any) -> dict[str, Any]:
        return {"sequences": sequences_text(struct, layout, slot_rows, **options)}

    def query_tiles(self, tile: int, sizes: Sizes) -> Any:
        return slots(sizes.total_q, sizes, tile)

    def key_tiles(self, tile: int, sizes: Sizes) -> Any:
        return slots(sizes.total_k, sizes, tile)

    def outer(self, sizes: Sizes) -> Any:
        return 1

    def padded_rows(self, multiple: int, sizes: Sizes) -> Any:
        return slots(sizes.total_q, sizes, multiple) * multiple

    def workspace_shape(self, sizes: Sizes, rows: Any, *columns: int) -> tuple[Any, ...]:
        return sizes.heads_q, rows, *columns


def _members(*sizes: str | Field) -> list[Field]:
    return [Field("int", size) if isinstance(size, str) else size for size in sizes]


_DENSE, _VARLEN = DenseBatch(), VarlenBatch()


def batch_of(spec: AttentionSpec) -> DenseBatch:
    """Returns the batch layout of a spec's kernels."""
    return _VARLEN if spec.is_varlen else _DENSE
