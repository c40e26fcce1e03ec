"""The named masks. Each prints as the call that makes it: `sliding_window(1024)`, `causal(align='top_left')`.

Alignment: if len_q != len_k, there are two conventions for the position of a query among the keys.
`align="bottom_right"`, the default and the convention of flash-attn, aligns the last query with the last key: the
position of q is q + (len_k - len_q). `align="top_left"`, the convention of torch's `is_causal`, aligns the first query
with the first key: the position of q is q.

Parameters that count positions are Python integers, or integer `Scalar`s whose value each call gives.
"""

from __future__ import annotations

from typing import Any

import sympy

from flashgen.errors import SpecError
from flashgen.language import elementary as f
from flashgen.language.bound import is_array
from flashgen.language.captures import Scalar, Tensor
from flashgen.language.closures import BoundTensor
from flashgen.language.modifiers import Mask, trace_mask
from flashgen.language.trace import Traced

# The parser, `flashgen.language` and `flashgen` read the named masks from this list.
__all__ = [
    "block_sparse",
    "causal",
    "dilated_window",
    "document",
    "full",
    "padding",
    "prefix_lm",
    "sliding_window",
    "tree",
]

# One call of each mask, for messages. `flashgen verify` also tests those that none of its variants uses.
EXAMPLES = (
    "full()",
    "causal()",
    "sliding_window(1024)",
    "dilated_window(256, 4)",
    "prefix_lm(512)",
    "document('ids')",
    "block_sparse('layout', 64, 64)",
    "padding('lengths')",
    "tree('bits')",
)

ALIGNMENTS = ("bottom_right", "top_left")
SIDES = ("right", "left")


def full() -> Mask:
    """Keeps every key for every query."""
    return Mask("full()", sympy.true)


def causal(align: str = "bottom_right") -> Mask:
    """Keeps k <= q, after alignment. By default the last query is aligned with the last key, as in flash-attn.

    torch's `scaled_dot_product_attention(is_causal=True)` aligns the first query with the first key, which is a
    different mask if len_q != len_k: use causal(align="top_left").

    Args:
        align: "bottom_right" or "top_left".
    """
    return trace_mask(lambda b, h, q, k: k <= _aligned(q, align), f"causal({_align_text(align)})")


def sliding_window(left: Any, right: Any = 0, align: str = "bottom_right") -> Mask:
    """Keeps q - left <= k <= q + right, both ends included, after alignment.

    Args:
        left: Keys before the query's position, an integer >= 0 or an integer Scalar.
        right: Keys after it, an integer >= 0 or an integer Scalar. 0 gives a causal window.
        align: "bottom_right" or "top_left".
    """
    left, right = _count(left, "sliding_window: left"), _count(right, "sliding_window: right")

    def window(b: Any, h: Any, q: Any, k: Any) -> Traced:
        position = _aligned(q, align)
        # A Scalar may be any int32. Distances fit in 32 bits in every case, but position - left might not.
        looks_back = position - k <= left if isinstance(left, Scalar) else position - left <= k
        if isinstance(right, Scalar):
            return looks_back & (k - position <= right)
        return looks_back & (k <= (position if _is_zero(right) else position + right))

    arguments = [_text(left), *([] if _is_zero(right) else [_text(right)]), _align_text(align)]
    return trace_mask(window, f"sliding_window({_listed(arguments)})")


def dilated_window(window: Any, dilation: Any, align: str = "bottom_right") -> Mask:
    """Keeps |q - k| <= window where q - k is a multiple of dilation, after alignment.

    The window extends in both directions, as in attention-gym; `causal() & dilated_window(256, 4)` looks back only.

    Args:
        window: Distance in positions, so that window // dilation keys are kept on each side. An integer >= 0 or an
            integer Scalar.
        dilation: Distance between kept keys, an integer >= 1 or an integer Scalar.
        align: "bottom_right" or "top_left".
    """
    window, dilation = _count(window, "dilated_window: window"), _count(dilation, "dilated_window: dilation", minimum=1)

    def dilated(b: Any, h: Any, q: Any, k: Any) -> Traced:
        distance = _aligned(q, align) - k
        return (abs(distance) <= window) & (distance % dilation == 0)

    return trace_mask(dilated, f"dilated_window({_listed([_text(window), _text(dilation), _align_text(align)])})")


def prefix_lm(prefix: Any, align: str = "bottom_right") -> Mask:
    """Keeps k <= q, after alignment, and the first `prefix` keys for every query.

    Args:
        prefix: An integer, a Scalar, or one length per batch element: an array of integers, or an integer Tensor of
            ndim 1.
        align: "bottom_right" or "top_left".
    """
    if is_array(prefix) and prefix.ndim:
        prefix = BoundTensor(prefix, "prefix")
    if not isinstance(prefix, Tensor):
        prefix = _count(prefix, "prefix_lm: prefix")
    elif prefix.ndim != 1 or prefix.capture.kind != "int":
        raise SpecError(f"prefix_lm: prefix={prefix!r} must be an integer Tensor of ndim 1, one length for each batch")

    def prefixed(b: Any, h: Any, q: Any, k: Any) -> Traced:
        length = prefix[b] if isinstance(prefix, Tensor) else prefix
        return (k < length) | (k <= _aligned(q, align))

    return trace_mask(prefixed, f"prefix_lm({_listed([_text(prefix), _align_text(align)])})")


def document(ids: Any) -> Mask:
    """Keeps the keys whose document id equals that of the query, for packed documents. It needs len_q == len_k.

    Args:
        ids: An array of integers of shape (positions,) or (batch, positions) (calls then need not supply it); or an
            integer Tensor of ndim 1 or 2; or a name, which stands for Tensor(name, "int32", ndim=1). Ids may be in any
            order.
    """
    ids = _tensor(ids, "document: ids", "int32", 1)
    if ids.ndim > 2 or ids.capture.kind != "int":
        raise SpecError(f"document: ids={ids!r} must be an integer Tensor of ndim 1 (position) or 2 (batch, position)")

    def same_document(b: Any, h: Any, q: Any, k: Any) -> Traced:
        return (ids[q] == ids[k]) if ids.ndim == 1 else (ids[b, q] == ids[b, k])

    return trace_mask(same_document, f"document({_tensor_text(ids, 'int32', 1)})")


def padding(lengths: Any, side: str = "right") -> Mask:
    """Keeps the valid keys of each sequence of a padded batch: the first `lengths[b]`, or the last with side="left".

    A length of 0 or less keeps no key, and one above len_k keeps all keys. Queries are not masked: outputs are also
    computed for padding queries, and should be ignored. The tiles are known in closed form, except for int64 lengths
    with side="left".

    Args:
        lengths: An array of integers, one length per sequence (calls then need not supply it); or an integer Tensor of
            ndim 1; or a name, which stands for Tensor(name, "int32", ndim=1).
        side: "right" if the padding follows the keys, "left" if it precedes them.
    """
    lengths = _tensor(lengths, "padding: lengths", "int32", 1)
    if lengths.ndim != 1 or lengths.capture.kind != "int":
        raise SpecError(
            f"padding: lengths={lengths!r} must be an integer Tensor of ndim 1, one length for each sequence"
        )
    if side not in SIDES:
        raise SpecError(f"padding: side={side!r}: give 'right', where the padding follows the keys, or 'left'")

    def kept(b: Any, h: Any, q: Any, k: Any) -> Traced:
        return k < lengths[b] if side == "right" else f.len_k - k <= lengths[b]

    arguments = [_tensor_text(lengths, "int32", 1), *(["side='left'"] if side == "left" else [])]
    return trace_mask(kept, f"padding({_listed(arguments)})")


def tree(bits: Any) -> Mask:
    """Keeps all keys before a draft and, within a tree of drafted tokens, the keys that `bits` selects.

    The queries are the drafted tokens, and the last len_q keys belong to the same tokens. Query q attends to token j of
    the draft if bit j % 32 of bits[..., q, j // 32] is set. A token attends to itself only if its own bit is set.
    `tree_bits(parents)` computes the bits of a tree. Tiles before the draft are known in closed form and need no mask.

    Args:
        bits: An int32 array of shape (len_q, words) or (batch, len_q, words) with 32 * words >= len_q (calls then need
            not supply it); or an int32 Tensor of ndim 2 or 3; or a name, which stands for Tensor(name, "int32",
            ndim=3).
    """
    bits = _tensor(bits, "tree: bits", "int32", 3)
    if not 2 <= bits.ndim <= 3 or bits.capture.dtype != "int32":
        raise SpecError(f"tree: bits={bits!r} must be an int32 Tensor of ndim 2 (query, word) or 3, batch before them")

    def kept(b: Any, h: Any, q: Any, k: Any) -> Traced:
        token = k - (f.len_k - f.len_q)
        word = bits[(*(b,)[3 - bits.ndim :], q, token >> 5)]
        return (token < 0) | ((word >> (token & 31)) & 1 != 0)

    return trace_mask(kept, f"tree({_tensor_text(bits, 'int32', 3)})")


def block_sparse(layout: Any, block_q: int, block_k: int) -> Mask:
    """Keeps the blocks of block_q queries × block_k keys for which the entry of the layout is true.

    Block (i, j) covers block_q queries from i·block_q and block_k keys from j·block_k. Each dimension of the layout
    must cover every position of a call, or have size 1, which broadcasts. Calls may give a `BlockLayout` instead of an
    array. It is built from a dense array, from CSR or BSR, or from lists of blocks, and must have exactly the blocks of
    the lengths.

    Args:
        layout: A Tensor of bool or integers (nonzero is true), of shape (blocks_q, blocks_k), (heads, blocks_q,
            blocks_k) or (batch, heads, blocks_q, blocks_k); or an array of such a shape; or a name, which stands for
            Tensor(name, "bool", ndim=2).
        block_q: Queries of a block, an integer >= 1.
        block_k: Keys of a block, an integer >= 1.
    """
    layout = _tensor(layout, "block_sparse: layout", "bool", 2)
    if not 2 <= layout.ndim <= 4 or layout.capture.kind == "float":
        raise SpecError(f"block_sparse: layout={layout!r} must be a Tensor of bool or integers, of ndim 2, 3 or 4")
    block_q, block_k = _block(block_q, "block_q"), _block(block_k, "block_k")

    def kept(b: Any, h: Any, q: Any, k: Any) -> Traced:
        entry = layout[(*(b, h)[4 - layout.ndim :], q // block_q, k // block_k)]
        return entry if entry.kind == "bool" else entry != 0

    return trace_mask(kept, f"block_sparse({_tensor_text(layout, 'bool', 2)}, {block_q}, {block_k})")


def _aligned(q: Any, align: str) -> Traced:
    return q + (f.len_k - f.len_q) if align == "bottom_right" else q


def _align_text(align: str) -> str:
    if align not in ALIGNMENTS:
        raise SpecError(f"align={align!r}: give 'bottom_right' (as flash-attn) or 'top_left' (as torch's is_causal)")
    return "" if align == "bottom_right" else f"align={align!r}"


def _count(value: Any, argument: str, minimum: int = 0) -> Any:
    """Checks a number of positions: an integer >= `minimum`, or an integer Scalar."""
    if isinstance(value, Scalar) and value.kind == "int":
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__") or isinstance(value, Traced):
        raise SpecError(f"{argument}={value!r} must be an integer >= {minimum} or an int32 Scalar")
    value = int(value)
    if not minimum <= value < 2**31:
        raise SpecError(f"{argument}={value} must be from {minimum} to 2**31 - 1")
    return value


def _block(value: Any, argument: str) -> int:
    if isinstance(value, Scalar):
        raise SpecError(f"block_sparse: {argument}={value!r} must be an integer: the tiles of a kernel depend on it")
    return _count(value, f"block_sparse: {argument}", minimum=1)


def _tensor(value: Any, argument: str, dtype: str, ndim: int) -> Tensor:
    if isinstance(value, str):
        return Tensor(value, dtype, ndim)
    if is_array(value):
        return BoundTensor(value, argument.rpartition(" ")[2])
    if not isinstance(value, Tensor):
        raise SpecError(
            f"{argument}={type(value).__name__} must be an array, or a Tensor or the name of one, whose array is given "
            "at the call"
        )
    return value


def _is_zero(value: Any) -> bool:
    return isinstance(value, int) and value == 0


def _text(value: Any) -> str:
    if isinstance(value, BoundTensor):
        return f"Tensor({value.name!r}, {value.capture.dtype!r}, ndim={value.ndim})"
    return repr(value)


def _tensor_text(value: Tensor, dtype: str, ndim: int) -> str:
    if isinstance(value, BoundTensor):
        return repr(value.name)
    plain = repr(value) == repr(Tensor(value.name, dtype, ndim))
    return repr(value.name) if plain else repr(value)


def _listed(parts: list[str]) -> str:
    return ", ".join(part for part in parts if part)
