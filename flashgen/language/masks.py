"""The named masks. Each prints as the call that makes it: `sliding_window(1024)`, `causal(align='top_left')`.

Alignment. With len_q != len_k a query's own position among the keys is ambiguous. `align="bottom_right"`, the default
and flash-attn's choice, puts the last query on the last key: position q + (len_k - len_q). `align="top_left"`, torch's
`is_causal`, puts the first on the first: position q.

Parameters that count positions are Python integers or integer `Scalar`s, which are given at the call.
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

# The parser, `flashgen.language` and `flashgen` take the named masks from here.
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

# A call of each, as messages show it. `flashgen verify` also meets those that none of its variants has.
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
    """Every query attends to every key."""
    return Mask("full()", sympy.true)


def causal(align: str = "bottom_right") -> Mask:
    """Keeps k <= q, after alignment: by default the last query stands on the last key, as in flash-attn.

    torch's `scaled_dot_product_attention(is_causal=True)` lays the first query on the first key, which is another mask
    where len_q != len_k: causal(align="top_left").
    """
    return trace_mask(lambda b, h, q, k: k <= _aligned(q, align), f"causal({_align_shown(align)})")


def sliding_window(left: Any, right: Any = 0, align: str = "bottom_right") -> Mask:
    """Keeps q - left <= k <= q + right, both ends included, after alignment. right=0 is a causal window."""
    left, right = _count(left, "sliding_window: left"), _count(right, "sliding_window: right")

    def window(b: Any, h: Any, q: Any, k: Any) -> Traced:
        position = _aligned(q, align)
        # A Scalar may be any int32. Distances fit in 32 bits beside it; position - left might not.
        looks_back = position - k <= left if isinstance(left, Scalar) else position - left <= k
        if isinstance(right, Scalar):
            return looks_back & (k - position <= right)
        return looks_back & (k <= (position if _is_zero(right) else position + right))

    shown = [_shown(left), *([] if _is_zero(right) else [_shown(right)]), _align_shown(align)]
    return trace_mask(window, f"sliding_window({_listed(shown)})")


def dilated_window(window: Any, dilation: Any, align: str = "bottom_right") -> Mask:
    """Keeps |q - k| <= window where q - k is a multiple of dilation, after alignment.

    It looks both ways, as attention-gym's does; `causal() & dilated_window(256, 4)` looks back only. `window` counts
    positions, so it reaches window // dilation keys on each side.
    """
    window, dilation = _count(window, "dilated_window: window"), _count(dilation, "dilated_window: dilation", least=1)

    def dilated(b: Any, h: Any, q: Any, k: Any) -> Traced:
        distance = _aligned(q, align) - k
        return (abs(distance) <= window) & (distance % dilation == 0)

    return trace_mask(dilated, f"dilated_window({_listed([_shown(window), _shown(dilation), _align_shown(align)])})")


def prefix_lm(prefix: Any, align: str = "bottom_right") -> Mask:
    """Causal, and every query also attends to the first `prefix` keys.

    prefix: an integer, a Scalar, or one length for each batch: an array of integers, or a Tensor of ndim 1.
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

    return trace_mask(prefixed, f"prefix_lm({_listed([_shown(prefix), _align_shown(align)])})")


def document(ids: Any) -> Mask:
    """Packed documents: a query attends to the keys with its own document id. It needs len_q == len_k.

    ids: an array of integers, of shape (positions,) or (batch, positions), which need not be given at the call; or a
    Tensor of ndim 1 or 2, or the name of Tensor(name, "int32", ndim=1). Any order of ids is right.
    """
    ids = _tensor(ids, "document: ids", "int32", 1)
    if ids.ndim > 2 or ids.capture.kind != "int":
        raise SpecError(f"document: ids={ids!r} must be an integer Tensor of ndim 1 (position) or 2 (batch, position)")

    def same_document(b: Any, h: Any, q: Any, k: Any) -> Traced:
        return (ids[q] == ids[k]) if ids.ndim == 1 else (ids[b, q] == ids[b, k])

    return trace_mask(same_document, f"document({_tensor_shown(ids, 'int32', 1)})")


def padding(lengths: Any, side: str = "right") -> Mask:
    """Keeps the keys that a sequence of a padded batch has: its first `lengths[b]`, or with side="left" its last.

    lengths: an array of integers, a length for each sequence, which need not be given at the call; or a Tensor of ndim
    1, or the name of Tensor(name, "int32", ndim=1). A
    length of 0 or less leaves no key, one beyond len_k all. Queries are not masked: what a query of the padding attends
    to is computed, and nobody's. Its tiles are known in closed form, but for int64 lengths with side="left".
    """
    lengths = _tensor(lengths, "padding: lengths", "int32", 1)
    if lengths.ndim != 1 or lengths.capture.kind != "int":
        raise SpecError(
            f"padding: lengths={lengths!r} must be an integer Tensor of ndim 1, one length for each sequence"
        )
    if side not in SIDES:
        raise SpecError(f"padding: side={side!r}: give 'right', where the padding is behind the keys, or 'left'")

    def kept(b: Any, h: Any, q: Any, k: Any) -> Traced:
        return k < lengths[b] if side == "right" else f.len_k - k <= lengths[b]

    shown = [_tensor_shown(lengths, "int32", 1), *(["side='left'"] if side == "left" else [])]
    return trace_mask(kept, f"padding({_listed(shown)})")


def tree(bits: Any) -> Mask:
    """Drafted tokens that branch: each attends to all keys before the draft, and to those of the draft that it says.

    The queries are the draft, and the last len_q keys are theirs: query q attends to the draft's token j where bit
    j % 32 of bits[..., q, j // 32] is set, its own among them if it is to. `tree_bits(parents)` makes them of a tree.

    bits: an array of int32, of shape (len_q, words) or (batch, len_q, words) with 32 * words >= len_q, which need not
    be given at the call; or a Tensor of ndim 2 or 3, or the name of Tensor(name, "int32", ndim=3). Keys before the
    draft need no mask: those tiles are known in closed form.
    """
    bits = _tensor(bits, "tree: bits", "int32", 3)
    if not 2 <= bits.ndim <= 3 or bits.capture.dtype != "int32":
        raise SpecError(f"tree: bits={bits!r} must be an int32 Tensor of ndim 2 (query, word) or 3, batch before them")

    def kept(b: Any, h: Any, q: Any, k: Any) -> Traced:
        token = k - (f.len_k - f.len_q)
        word = bits[(*(b,)[3 - bits.ndim :], q, token >> 5)]
        return (token < 0) | ((word >> (token & 31)) & 1 != 0)

    return trace_mask(kept, f"tree({_tensor_shown(bits, 'int32', 3)})")


def block_sparse(layout: Any, block_q: int, block_k: int) -> Mask:
    """Keeps the blocks of block_q queries × block_k keys whose entry of the layout is true.

    layout: a Tensor of bool (or of integers: all but 0 are true), of shape (blocks_q, blocks_k), (heads, blocks_q,
    blocks_k) or (batch, heads, blocks_q, blocks_k), leading dimensions of size 1 broadcast; or its name for
    Tensor(name, "bool", ndim=2). Block (i, j) covers queries i·block_q... and keys j·block_k...; there must be one for
    every position of a call, or 1 for all. At the call, a `BlockLayout` may be given instead of the array: it is made
    from a dense array, from CSR/BSR or from lists, and must have exactly the blocks of the lengths.
    """
    layout = _tensor(layout, "block_sparse: layout", "bool", 2)
    if not 2 <= layout.ndim <= 4 or layout.capture.kind == "float":
        raise SpecError(f"block_sparse: layout={layout!r} must be a Tensor of bool or integers, of ndim 2, 3 or 4")
    block_q, block_k = _block(block_q, "block_q"), _block(block_k, "block_k")

    def kept(b: Any, h: Any, q: Any, k: Any) -> Traced:
        entry = layout[(*(b, h)[4 - layout.ndim :], q // block_q, k // block_k)]
        return entry if entry.kind == "bool" else entry != 0

    return trace_mask(kept, f"block_sparse({_tensor_shown(layout, 'bool', 2)}, {block_q}, {block_k})")


def _aligned(q: Any, align: str) -> Traced:
    return q + (f.len_k - f.len_q) if align == "bottom_right" else q


def _align_shown(align: str) -> str:
    if align not in ALIGNMENTS:
        raise SpecError(f"align={align!r}: give 'bottom_right' (as flash-attn) or 'top_left' (as torch's is_causal)")
    return "" if align == "bottom_right" else f"align={align!r}"


def _count(value: Any, argument: str, least: int = 0) -> Any:
    """A number of positions: an integer >= least, or an integer Scalar."""
    if isinstance(value, Scalar) and value.kind == "int":
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__") or isinstance(value, Traced):
        raise SpecError(f"{argument}={value!r} must be an integer >= {least} or an int32 Scalar")
    value = int(value)
    if not least <= value < 2**31:
        raise SpecError(f"{argument}={value} must be from {least} to 2**31 - 1")
    return value


def _block(value: Any, argument: str) -> int:
    if isinstance(value, Scalar):
        raise SpecError(f"block_sparse: {argument}={value!r} must be an integer: the tiles of a kernel depend on it")
    return _count(value, f"block_sparse: {argument}", least=1)


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


def _shown(value: Any) -> str:
    if isinstance(value, BoundTensor):
        return f"Tensor({value.name!r}, {value.capture.dtype!r}, ndim={value.ndim})"
    return repr(value)


def _tensor_shown(value: Tensor, dtype: str, ndim: int) -> str:
    if isinstance(value, BoundTensor):
        return repr(value.name)
    plain = repr(value) == repr(Tensor(value.name, dtype, ndim))
    return repr(value.name) if plain else repr(value)


def _listed(parts: list[str]) -> str:
    return ", ".join(part for part in parts if part)
