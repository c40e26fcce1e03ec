"""The kernel that writes lists of visited tiles, for masks without a closed form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import sympy

from flashgen.analysis.closed_forms.inequalities import K_FIRST, K_LAST, Q_FIRST, Q_LAST
from flashgen.analysis.closed_forms.tile_ranges import TileRange, key_range, query_range
from flashgen.codegen.arguments import ArgumentLayout, Field, capture_fields, ordered
from flashgen.codegen.assembly import assemble
from flashgen.codegen.batches import batch_of
from flashgen.codegen.environment import environment
from flashgen.codegen.expressions.interval_text import interval_text
from flashgen.codegen.expressions.printer import statements
from flashgen.codegen.padding import WARP
from flashgen.codegen.rendered_kernel import Direction, RenderedKernel, entry_name, kernel_name
from flashgen.codegen.shared_memory import slot_per_warp
from flashgen.codegen.sizes import Grid, Sizes, ceil_div, maximum
from flashgen.codegen.targets import Target
from flashgen.codegen.variant import Variant, captures_read, variant_of
from flashgen.language.operations import BATCH, HEAD, KEY, QUERY, And, Load
from flashgen.language.spec import AttentionSpec


class Tiles(Protocol):
    """The tile sizes of a plan, on which lists depend."""

    @property
    def tile_q(self) -> int: ...

    @property
    def tile_k(self) -> int: ...


WARPS = 16
TILES_PER_WARP = 8
_STRUCT = "ListArguments"
_KINDS: dict[Direction, tuple[str, str]] = {
    "keys": ("lists", "list_key_tiles"),
    "queries": ("query-lists", "list_query_tiles"),
}
# Names of each side of a tile in the template: an element, elements, the tile index, the tile size, the length.
_QUERIES = {"one": "query", "many": "queries", "tile": "q_tile", "size": "kTileQ", "length": "arguments.len_q"}
_KEYS = {"one": "key", "many": "keys", "tile": "k_tile", "size": "kTileK", "length": "arguments.len_k"}


def depends_on_head(spec: AttentionSpec) -> bool:
    """Whether the mask differs between query heads."""
    return bool(spec.mask.expression.has(HEAD))


def depends_on_batch(spec: AttentionSpec) -> bool:
    """Whether the mask differs between sequences of the batch."""
    return bool(spec.mask.expression.has(BATCH))


@dataclass(frozen=True)
class ListShape:
    """The number of lists and their maximum length.

    Attributes:
        batch, heads: 1 if the mask does not depend on them.
        tiles: Lists per batch and head: one per tile, or per tile slot of a varlen batch.
        listed: Maximum number of tiles in a list.
        strides: Strides from list to list along (batch, head, tile); 0 along axes on which lists do not depend.
    """

    batch: Any
    heads: Any
    tiles: Any
    listed: Any
    strides: tuple[Any, Any, Any]

    @property
    def rows(self) -> Any:
        """The number of lists."""
        return self.batch * self.heads * self.tiles

    @property
    def grid(self) -> Grid:
        """The grid of the list kernel: one block per list."""
        return self.tiles, self.heads, self.batch


def list_shape(spec: AttentionSpec, plan: Tiles, direction: Direction, sizes: Sizes) -> ListShape:
    """Returns the shape of the lists of a call for the tiles of a plan."""
    batch = batch_of(spec)
    if direction == "keys":
        rows, listed = batch.query_tiles(plan.tile_q, sizes), ceil_div(sizes.len_k, plan.tile_k)
    else:
        rows, listed = batch.key_tiles(plan.tile_k, sizes), ceil_div(sizes.len_q, plan.tile_q)
    by_head, by_batch = depends_on_head(spec), depends_on_batch(spec)
    batch_stride = sizes.heads_q * rows if by_head else rows
    strides = (batch_stride if by_batch else 0, rows if by_head else 0, 1)
    return ListShape(batch.outer(sizes) if by_batch else 1, sizes.heads_q if by_head else 1, rows, listed, strides)


def list_layout(spec: AttentionSpec) -> ArgumentLayout:
    """Returns the argument struct of the list kernel."""
    fields = [Field("int*", "counts"), Field("long long*", "offsets"), Field("int*", "entries")]
    fields += [Field("int", name) for name in ("len_q", "len_k")] + batch_of(spec).search_fields()
    fields.append(Field("int", "spacing", comment="entries from list to list, or 0 if `offsets` is given"))
    return ordered(fields + capture_fields(captures_read(spec, score=False)))


def render_lists(spec: AttentionSpec, target: Target, plan: Tiles, direction: Direction = "keys") -> RenderedKernel:
    """Renders the kernel that lists, for each query tile of `plan`, the key tiles that the forward kernel visits.

    With direction="queries" it lists the query tiles of each key tile. Both classify tiles equally: EMPTY tiles are not
    listed, and a tile is FULL if and only if the mask allows all its scores and it does not extend beyond len_k.
    """
    layout, variant = list_layout(spec), variant_of(spec, score=False)
    assert variant.mask is not None, "full() needs no lists"
    templates = environment()
    kind, function = _KINDS[direction]
    context: dict[str, Any] = {
        "spec": spec,
        "plan": plan,
        "warps": WARPS,
        "tiles_per_warp": TILES_PER_WARP,
        "entry": entry_name(function, spec),
        "struct": _STRUCT,
        "types": templates.get_template("types.cuh.jinja").render(struct=_STRUCT, element=None, layout=layout).strip(),
        "variant": templates.get_template("variant.cuh.jinja")
        .render(struct=_STRUCT, variant=variant, position=False)
        .strip(),
        "bounds": _bounds(spec.mask.expression, direction),
        **batch_of(spec).template_context,
    }
    size = "kTileQ" if direction == "keys" else "kTileK"
    context |= batch_of(spec).sequences(_STRUCT, layout, size, of_keys=direction == "queries")
    context |= _names(spec, direction) | _mask(variant) | _within(spec, variant, plan)
    source = assemble("tile_lists/list_tiles.cu.jinja", context, target)
    name, threads = kernel_name(kind, target, spec), WARPS * WARP
    shape = partial(list_shape, spec, plan, direction)
    return RenderedKernel(
        name,
        context["entry"],
        source,
        target,
        layout,
        threads,
        slot_per_warp("visited tiles of warps", WARPS),
        plan=plan,
        role="lists" if direction == "keys" else "query_lists",
        lists=direction,
        grid=lambda sizes: shape(sizes).grid,
        values=lambda sizes: {"spacing": maximum(shape(sizes).listed, 1)},
    )


def _names(spec: AttentionSpec, direction: Direction) -> dict[str, Any]:
    """Returns the template's names for the row tiles, which have a list each, and the listed column tiles."""
    keys = direction == "keys"
    return {
        "row": _QUERIES if keys else _KEYS,
        "column": _KEYS if keys else _QUERIES,
        "first_q": "q_tile * kTileQ" if keys else "(first_tile + tile) * kTileQ",
        "first_k": "(first_tile + tile) * kTileK" if keys else "k_tile * kTileK",
        "uses_head": depends_on_head(spec),
        "uses_batch": depends_on_batch(spec),
    }


def _mask(variant: Variant) -> dict[str, Any]:
    """Returns the texts that call the mask for one element, and that pass batch and head down to that call."""
    assert variant.mask is not None
    used = variant.mask.used
    passed = [symbol for symbol in used if symbol in (BATCH, HEAD)]
    return {
        "mask_call": variant.mask.call({symbol: str(symbol) for symbol in used}),
        "mask_reads_q": QUERY in used,
        "mask_reads_k": KEY in used,
        "index_parameters": "".join(f"int {symbol}, " for symbol in passed),
        "index_call": "".join(f"{symbol}, " for symbol in passed),
    }


def _within(spec: AttentionSpec, variant: Variant, plan: Tiles) -> dict[str, Any]:
    """Returns the texts that evaluate the mask over a tile by interval arithmetic; `within` is None if impossible."""
    assert variant.mask is not None
    within = interval_text(spec.mask.expression)
    if within is None:
        return {"within": None, "operations": (), "scanned": (), "wide": False}
    used = [symbol for symbol in variant.mask.used if symbol in within.symbols]
    types = {BATCH: "int", HEAD: "int", QUERY: "Range", KEY: "Range"}
    names = {capture.name for capture in within.scanned}
    return {
        "within": within,
        "within_parameters": "".join(f"{types[symbol]} {symbol}, " for symbol in used),
        "within_call": ", ".join([*map(str, used), "arguments"]),
        "within_reads_q": QUERY in used,
        "within_reads_k": KEY in used,
        "operations": within.operations,
        "wide": within.wide,
        "scanned": [array for array in variant.arrays if array.name in names],
        "max_scanned": 2 * max(plan.tile_q, plan.tile_k),
    }


def _bounds(mask: sympy.Basic, direction: Direction) -> dict[str, Any] | None:
    """Returns the texts of the first and last tile of a list, from the conjuncts of the mask with a closed form."""
    found = _analysable(mask, direction)
    if found is None:
        return None
    declarations, (begin, end) = statements(found.begin, found.end)
    row, tile = (_QUERIES, (Q_FIRST, Q_LAST)) if direction == "keys" else (_KEYS, (K_FIRST, K_LAST))
    lines = (
        f"const int {tile[0]} = {row['tile']} * {row['size']};",
        f"const int {tile[1]} = min(({row['tile']} + 1) * {row['size']}, {row['length']}) - 1;",
    )
    used = [line for symbol, line in zip(tile, lines, strict=True) if found.begin.has(symbol) or found.end.has(symbol)]
    return {"declarations": [*used, *declarations], "begin": begin, "end": end}


def _analysable(mask: sympy.Basic, direction: Direction) -> TileRange | None:
    """Returns the range of the conjuncts of the mask that together have a closed form; None if there are none."""
    range_of = key_range if direction == "keys" else query_range
    taken, found = None, None
    for conjunct in _conjuncts(mask):
        if conjunct.atoms(Load) or conjunct.has(BATCH):
            continue  # arrays and the batch are not available where the list kernel bounds a list
        joined = conjunct if taken is None else And(taken, conjunct)
        tile_range = range_of(joined)
        if tile_range is not None:
            taken, found = joined, tile_range
    return found


def _conjuncts(node: sympy.Basic) -> Iterator[sympy.Basic]:
    if isinstance(node, And):
        for operand in node.args:
            yield from _conjuncts(operand)
    else:
        yield node
