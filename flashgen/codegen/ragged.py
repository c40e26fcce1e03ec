"""Ragged batches: what kernels of layout "thd" have beside the others'.

The sequences of a batch lie one behind the other in packed arrays (tokens, heads, dim), and only the device knows where
each begins. Tiles are numbered by slots: those of sequence b begin at first_row / tile + b + 1, which leaves room for
all tiles of those before it whatever their lengths are, so that a launch depends on none of them. A block finds the
sequence of its slot by a binary search, makes the arguments those of that sequence (its lengths, arrays that begin with
its rows), and goes on as in any batch.
"""

from __future__ import annotations

from typing import Any

from flashgen.codegen.arguments import QUERY_ARRAYS, ArgumentLayout, Field
from flashgen.codegen.environment import environment
from flashgen.codegen.rendered_kernel import Grid
from flashgen.codegen.sizes import Sizes, ceil_div
from flashgen.language.spec import AttentionSpec

MAP_ROWS = 256
"""Rows along the second axis of a tensor map of a packed array: as many as a copy may move, or more."""
EXTRA_SEQUENCES = 2
"""Rows before the first sequence, and behind the last, are sequences of their own."""
_OF_ROWS = frozenset(("lse", "d_lse"))
_PADDED_ROWS = frozenset(("statistics", "dq_sums"))


def varlen_fields(keys: bool = True) -> list[Field]:
    """Members of a kernel's struct by which it finds its sequence; of the queries alone where it needs no more."""
    fields = [Field("const int*", "cu_seqlens_q", comment="(batch + 1): where sequences begin among the rows of q")]
    if keys:
        fields.append(Field("const int*", "cu_seqlens_k", comment="(batch + 1): and among those of k and v"))
        fields.append(Field("const int*", "seqused_k", comment="(batch): keys of a sequence that count, or null"))
    fields += [Field("int", "batch"), Field("int", "total_q", comment="rows of q")]
    return fields + ([Field("int", "total_k", comment="rows of k")] if keys else [])


def slots(total: Any, sizes: Sizes, tile: int) -> Any:
    """How many slots the tiles of a ragged batch have, of arrays of so many rows."""
    return total // tile + (sizes.batch + EXTRA_SEQUENCES)


def tiles_of_queries(spec: AttentionSpec, tile: int, sizes: Sizes) -> Grid:
    """A block for each tile of queries, head and batch; in a ragged batch for each slot and head."""
    if spec.is_ragged:
        return slots(sizes.total_q, sizes, tile), sizes.heads_q, 1
    return ceil_div(sizes.len_q, tile), sizes.heads_q, sizes.batch


def tiles_of_keys(spec: AttentionSpec, tile: int, sizes: Sizes) -> Grid:
    """The same of keys, and of heads of K and V."""
    if spec.is_ragged:
        return slots(sizes.total_k, sizes, tile), sizes.heads_kv, 1
    return ceil_div(sizes.len_k, tile), sizes.heads_kv, sizes.batch


def sequences_text(
    struct: str,
    layout: ArgumentLayout,
    slot_rows: str,
    of_keys: bool = False,
    row_multiple: str = "",
    moves_rows: bool = True,
) -> str:
    """The text by which a kernel finds the sequence of a slot, and makes the arguments those of the sequence.

    slot_rows: the constant that holds how many rows a slot is for. of_keys: slots are of tiles of keys, else of
    queries. row_multiple: the constant of what rows of the backward's own arrays are rounded up to, where it has any;
    moves_rows: whether those arrays begin with the sequence's first row, which the kernel adds otherwise.
    """
    names = {field.name for field in layout.fields}
    stay = set() if moves_rows else _PADDED_ROWS
    moved = [_moved(field.name, names) for field in layout.fields if field.name not in stay]
    told = {
        "struct": struct,
        "own": "k" if of_keys else "q",
        "other": "q" if of_keys else "k",
        "both": "total_k" in names,
        "slot_rows": slot_rows,
        "row_multiple": row_multiple,
        "moved": [line for line in moved if line],
        "sums": "dq_sums" in names,
        "lengths": [name for name in ("len_q", "len_k") if name in names],
    }
    return environment().get_template("ragged.cuh.jinja").render(told).strip()


def _moved(name: str, members: set[str]) -> str:
    """How far the pointer of that name is from where it begins for the sequence, as text; nothing if it stays."""
    if f"{name}_strides" in members:
        return (
            f"arguments.{name} += sequence.first_{'q' if name in QUERY_ARRAYS else 'k'} * arguments.{name}_strides.row;"
        )
    if name in _OF_ROWS:
        return f"if (arguments.{name}) arguments.{name} += sequence.first_q;"
    if name == "statistics":
        return "arguments.statistics += sequence.first_row * 2ll;"
    return (
        "arguments.dq_sums += static_cast<long long>(sequence.first_row) * kHeadDimPadded;" if name == "dq_sums" else ""
    )
