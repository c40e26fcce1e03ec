"""The kernel that lists tiles, for masks whose tiles no closed form describes."""

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
from flashgen.codegen.environment import environment
from flashgen.codegen.expressions.interval_text import interval_text
from flashgen.codegen.expressions.printer import statements
from flashgen.codegen.ragged import sequences_text, slots, varlen_fields
from flashgen.codegen.rendered_kernel import Direction, Grid, RenderedKernel, entry_name, kernel_name
from flashgen.codegen.shared_memory import slot_per_warp
from flashgen.codegen.sizes import Sizes, ceil_div, maximum
from flashgen.codegen.targets import Target
from flashgen.codegen.tiling import WARP
from flashgen.codegen.variant import Variant, captures_read, variant_of
from flashgen.language.operations import BATCH, HEAD, KEY, QUERY, And, Load
from flashgen.language.spec import AttentionSpec


class Tiles(Protocol):
    """What lists depend on of a plan: queries and keys of a tile."""

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
# What the template calls each side of a tile: one of it, its number, its size, the length.
_QUERIES = {"one": "query", "tile": "q_tile", "size": "kTileQ", "length": "arguments.len_q"}
_KEYS = {"one": "key", "tile": "k_tile", "size": "kTileK", "length": "arguments.len_k"}


def depends_on_head(spec: AttentionSpec) -> bool:
    """Whether the mask differs between query heads."""
    return bool(spec.mask.expression.has(HEAD))


def depends_on_batch(spec: AttentionSpec) -> bool:
    """Whether the mask differs between batches."""
    return bool(spec.mask.expression.has(BATCH))


@dataclass(frozen=True)
class ListShape:
    """How many lists there are, `tiles` for each batch and head, and of how many tiles each may be at most.

    batch, heads: 1 where the mask does not depend on them; in a ragged batch `tiles` are slots, of all its sequences.
    strides: from list to list along (batch, head, tile); 0 where the lists are the same for all.
    """

    batch: Any
    heads: Any
    tiles: Any
    listed: Any
    strides: tuple[Any, Any, Any]

    @property
    def rows(self) -> Any:
        """All lists."""
        return self.batch * self.heads * self.tiles

    @property
    def grid(self) -> Grid:
        """Blocks of the kernel that makes them: one for each list."""
        return self.tiles, self.heads, self.batch


def list_shape(spec: AttentionSpec, plan: Tiles, direction: Direction, sizes: Sizes) -> ListShape:
    """The lists of a call, for tiles of a plan."""
    tiles = ceil_div(sizes.len_q, plan.tile_q), ceil_div(sizes.len_k, plan.tile_k)
    rows, listed = tiles if direction == "keys" else tiles[::-1]
    of_head, of_batch = depends_on_head(spec), depends_on_batch(spec) and not spec.is_ragged
    if spec.is_ragged:
        total, tile = (sizes.total_q, plan.tile_q) if direction == "keys" else (sizes.total_k, plan.tile_k)
        rows = slots(total, sizes, tile)
    of_sequence = sizes.heads_q * rows if of_head else rows
    strides = (of_sequence if of_batch else 0, rows if of_head else 0, 1)
    return ListShape(sizes.batch if of_batch else 1, sizes.heads_q if of_head else 1, rows, listed, strides)


def list_layout(spec: AttentionSpec) -> ArgumentLayout:
    """The argument struct of the list kernel."""
    fields = [Field("int*", "counts"), Field("long long*", "offsets"), Field("int*", "entries")]
    fields += [Field("int", name) for name in ("len_q", "len_k")]
    fields += varlen_fields() if spec.is_ragged else []
    fields.append(Field("int", "spacing", comment="entries from list to list; 0 where `offsets` says"))
    return ordered(fields + capture_fields(captures_read(spec, score=False)))


def render_lists(spec: AttentionSpec, target: Target, plan: Tiles, direction: Direction = "keys") -> RenderedKernel:
    """The kernel that lists, per tile of queries of `plan`, the tiles of keys that the forward kernel visits.

    With direction="queries" the transpose: per tile of keys, the tiles of queries. A class is the same in both: EMPTY
    tiles are not listed, FULL is exact, and a tile that overhangs len_k is never FULL.
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
        "types": templates.get_template("types.cuh.jinja").render(struct=_STRUCT, dtype=None, layout=layout).strip(),
        "variant": templates.get_template("variant.cuh.jinja")
        .render(struct=_STRUCT, variant=variant, position=False)
        .strip(),
        "bounds": _bounds(spec.mask.expression, direction),
        "ragged": spec.is_ragged,
    }
    if spec.is_ragged:
        size = "kTileQ" if direction == "keys" else "kTileK"
        context["sequences"] = sequences_text(_STRUCT, layout, size, of_keys=direction == "queries")
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
    """What the template calls the rows (a list each) and the columns (what is listed)."""
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
    """How the mask is called for an element, and what is handed down to where it is called."""
    assert variant.mask is not None
    used = variant.mask.used
    place = [symbol for symbol in used if symbol in (BATCH, HEAD)]
    return {
        "mask_call": variant.mask.call({symbol: str(symbol) for symbol in used}),
        "mask_reads_q": QUERY in used,
        "mask_reads_k": KEY in used,
        "place_parameters": "".join(f"int {symbol}, " for symbol in place),
        "place_call": "".join(f"{symbol}, " for symbol in place),
    }


def _within(spec: AttentionSpec, variant: Variant, plan: Tiles) -> dict[str, Any]:
    """The mask over a tile by ranges, and what that needs."""
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
        "most_scanned": 2 * max(plan.tile_q, plan.tile_k),
    }


def _bounds(mask: sympy.Basic, direction: Direction) -> dict[str, Any] | None:
    """Texts of where the tiles of a list begin and end, by the conjuncts of the mask that have a closed form."""
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
    """The range of as many conjuncts of the mask as have one together; None where none has."""
    range_of = key_range if direction == "keys" else query_range
    taken, found = None, None
    for conjunct in _conjuncts(mask):
        if conjunct.atoms(Load) or conjunct.has(BATCH):
            continue  # the kernel that lists has no names for them where it bounds a list
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
