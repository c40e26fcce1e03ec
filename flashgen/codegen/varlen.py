"""Varlen batches: the arguments, grids and device functions that kernels of layout "thd" have in addition.

The sequences of a batch are concatenated in packed arrays (tokens, heads, dim). Their first rows are known only on the
device (`cu_seqlens`). Tiles are numbered by slots. The slots of sequence b begin at first_row / tile + b + 1, which
leaves enough slots for the tiles of all earlier sequences whatever their lengths, so that the launch does not depend on
the lengths. A block finds the sequence of its slot by a binary search, replaces the lengths and array pointers of its
arguments with those of the sequence, and then proceeds as in any other batch.
"""

from __future__ import annotations

from typing import Any

from flashgen.codegen.arguments import QUERY_ARRAYS, ArgumentLayout, Field
from flashgen.codegen.environment import environment
from flashgen.codegen.sizes import Sizes

MAP_ROWS = 256
"""Rows along the second axis of a tensor map of a packed array: at least as many as one copy may move."""
EXTRA_SEQUENCES = 2
"""Extra sequences of a batch: the rows before the first sequence, and those after the last."""
_ROW_ARRAYS = frozenset(("lse", "d_lse"))
_PADDED_ROWS = frozenset(("lse_and_d", "dq_accum"))


def varlen_fields(keys: bool = True) -> list[Field]:
    """Returns the members by which a kernel finds its sequence; without `keys` only those about the queries."""
    fields = [Field("const int*", "cu_seqlens_q", comment="(batch + 1): first row of each sequence in q")]
    if keys:
        fields.append(Field("const int*", "cu_seqlens_k", comment="(batch + 1): first row of each sequence in k and v"))
        fields.append(Field("const int*", "seqused_k", comment="(batch): keys of each sequence that are used, or null"))
    fields += [Field("int", "batch"), Field("int", "total_q", comment="rows of q")]
    return fields + ([Field("int", "total_k", comment="rows of k")] if keys else [])


def slots(total: Any, sizes: Sizes, tile: int) -> Any:
    """Returns the number of tile slots of a varlen batch whose packed arrays have `total` rows."""
    return total // tile + (sizes.batch + EXTRA_SEQUENCES)


def sequences_text(
    struct: str,
    layout: ArgumentLayout,
    slot_rows: str,
    of_keys: bool = False,
    row_multiple: str = "",
    moves_rows: bool = True,
) -> str:
    """Returns the text that finds the sequence of a slot and sets the arguments to those of the sequence.

    Args:
        struct: Name of the argument struct.
        layout: Members of the struct.
        slot_rows: Name of the constant with the rows of a slot.
        of_keys: Whether slots are tiles of keys; otherwise they are tiles of queries.
        row_multiple: Name of the constant to whose multiples the backward workspaces round the rows of a sequence up;
            empty if the kernel has no workspaces.
        moves_rows: Whether the pointers of these workspaces are advanced to the first row of the sequence; otherwise
            the kernel adds the first row itself.
    """
    names = {field.name for field in layout.fields}
    stay = set() if moves_rows else _PADDED_ROWS
    moved = [_moved(field.name, names) for field in layout.fields if field.name not in stay]
    context = {
        "struct": struct,
        "own": "k" if of_keys else "q",
        "other": "q" if of_keys else "k",
        "both": "total_k" in names,
        "slot_rows": slot_rows,
        "row_multiple": row_multiple,
        "moved": [line for line in moved if line],
        "lengths": [name for name in ("len_q", "len_k") if name in names],
    }
    return environment().get_template("varlen.cuh.jinja").render(context).strip()


def _moved(name: str, members: set[str]) -> str:
    """Returns the statement that advances a pointer to the sequence's rows; "" if the pointer does not move."""
    if f"{name}_strides" in members:
        return (
            f"arguments.{name} += sequence.first_{'q' if name in QUERY_ARRAYS else 'k'} * arguments.{name}_strides.row;"
        )
    if name in _ROW_ARRAYS:
        return f"if (arguments.{name}) arguments.{name} += sequence.first_q;"
    if name == "lse_and_d":
        return "arguments.lse_and_d += sequence.first_row * 2ll;"
    if name == "dq_accum":
        return "arguments.dq_accum += static_cast<long long>(sequence.first_row) * kHeadDimPadded;"
    return ""
