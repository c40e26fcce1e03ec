"""Captures: arrays (`Tensor`) and numbers (`Scalar`) that a traced function reads and the call supplies by name."""

from __future__ import annotations

import keyword
from typing import Any

from flashgen.errors import SpecError
from flashgen.language import operations as ops
from flashgen.language.dtypes import CAPTURES, SCALARS, dtype_name
from flashgen.language.trace import Traced, lift
from flashgen.language.well_formed import build, declared

MAX_NDIM = 8

# Keyword arguments of calls, fields of every kernel's arguments, and the names of the traced indices.
# fmt: off
RESERVED = frozenset({
    "b", "h", "q", "k", "v", "score", "len_q", "len_k", "batch", "heads", "seed", "offset", "return_lse", "out",
    "lse", "dout", "dq", "dk", "dv", "on_chip", "stream", "spec", "target", "emulate", "self",
    "tile_lists", "d_out", "d_lse", "into", "num_splits", "page_table", "seqused_k", "k_scale", "v_scale",
    "shard_b", "shard_h", "shard_q", "shard_k", "whole_q", "whole_k", "decode_schedule",
})
CPLUSPLUS_KEYWORDS = frozenset({
    "alignas", "alignof", "and", "and_eq", "asm", "auto", "bitand", "bitor", "bool", "break", "case", "catch",
    "char", "char8_t", "char16_t", "char32_t", "class", "compl", "concept", "const", "const_cast", "consteval",
    "constexpr", "constinit", "continue", "co_await", "co_return", "co_yield", "decltype", "default", "delete",
    "do", "double", "dynamic_cast", "else", "enum", "explicit", "export", "extern", "false", "float", "for",
    "friend", "goto", "if", "inline", "int", "long", "mutable", "namespace", "new", "noexcept", "not", "not_eq",
    "nullptr", "operator", "or", "or_eq", "private", "protected", "public", "register", "reinterpret_cast",
    "requires", "return", "short", "signed", "sizeof", "static", "static_assert", "static_cast", "struct", "switch",
    "template", "this", "thread_local", "throw", "true", "try", "typedef", "typeid", "typename", "union",
    "unsigned", "using", "virtual", "void", "volatile", "wchar_t", "while", "xor", "xor_eq",
})
# fmt: on


def check_name(name: Any) -> str:
    """The name, if a capture may be called so: a C++ and Python identifier that means nothing else in a call."""
    if not isinstance(name, str) or not name.isidentifier() or not name.isascii() or len(name) > 64:
        raise SpecError(f"capture name {name!r} must be an ASCII identifier of at most 64 characters, e.g. 'slopes'")
    if name.startswith("_") or "__" in name:
        raise SpecError(f"capture name {name!r}: leading and double underscores are reserved in C++; use another name")
    if name in CPLUSPLUS_KEYWORDS or keyword.iskeyword(name):
        raise SpecError(f"capture name {name!r} is a keyword of C++ or Python; use another name, e.g. '{name}_table'")
    if name in RESERVED:
        raise SpecError(
            f"capture name {name!r} already names an argument or an index; use another, e.g. '{name}_table'"
        )
    return name


class Tensor:
    """An array given at the call by name: `attention(q, k, v, slopes=array)`.

    Args:
        name: the keyword of the call.
        dtype: bool, int8, uint8, int16, int32, int64, float16, bfloat16 or float32 (a name, NumPy or torch dtype).
        ndim: number of dimensions, 1 to 8.
        grad: whether the backward pass returns its gradient (floating dtypes only).

    Index it inside a traced function: `slopes[h]`, `table[h, q - k]` or `table[h][q - k]`. Each index is clamped to
    its dimension, so a leading dimension of size 1 broadcasts, and nothing counts from the end. All 64 bits of an
    int64 count: ids 1 and 1 + 2**32 differ. Arithmetic that needs them costs a kernel more than int32's.
    """

    def __init__(self, name: str, dtype: Any = "float32", ndim: int = 1, grad: bool = False) -> None:
        check_name(name)
        kind = dtype_name(dtype, CAPTURES, f"Tensor({name!r}): dtype")
        if isinstance(ndim, bool) or not isinstance(ndim, int) or not 1 <= ndim <= MAX_NDIM:
            raise SpecError(
                f"Tensor({name!r}): ndim={ndim!r} must be an integer from 1 to {MAX_NDIM}; Scalar is for numbers"
            )
        if grad and "float" not in kind:
            raise SpecError(f"Tensor({name!r}): grad=True needs a floating dtype, got {kind}")
        self.capture = ops.Capture(name, kind, ndim, bool(grad))

    @property
    def name(self) -> str:
        return self.capture.name

    @property
    def ndim(self) -> int:
        return self.capture.ndim

    def __getitem__(self, index: Any) -> Any:
        return _index(self.capture, (), index)

    def __iter__(self) -> Any:
        raise SpecError(
            f"{self!r} cannot be iterated: its size is known only at the call; index it with traced indices"
        )

    def __repr__(self) -> str:
        return declared(self.capture)


def index_capture(capture: ops.Capture, index: Any, row: int | None = None) -> Any:
    """`capture[index]`: a traced value, or what waits for more indices. row: its last dimension, where it is known."""
    return _index(capture, (), index, row)


class _PartlyIndexed:
    """`table[h]` of a table with more dimensions, waiting for the rest: `table[h][d]`.

    Two rows of arrays that a function closed over have a product, `torch.dot(a[q], b[k])` or `a[q] @ b[k]`: the sum of
    as many products as the arrays have columns, in each score. To append the rows to q and k is much faster.
    """

    def __init__(self, capture: ops.Capture, indices: tuple[Any, ...], row: int | None = None) -> None:
        self.capture, self.indices, self.row = capture, indices, row

    def __getitem__(self, index: Any) -> Any:
        return _index(self.capture, self.indices, index, self.row)

    def __iter__(self) -> Any:
        raise SpecError(f"{self!r} cannot be iterated: index it fully")

    def _refused(self, *_operands: Any, **_more: Any) -> Any:
        raise SpecError(
            f"{self!r} is a whole row, and functions compute of single elements: give one index a dimension. A product "
            "of rows, as of rotary parts, is what q and k are for: append the rows to them, and leave v (value_dim)"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refused
    __array_ufunc__ = __array_function__ = _refused

    def __matmul__(self, other: Any) -> Any:
        return _product_of_rows(self, other) if isinstance(other, _PartlyIndexed) else self._refused()

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, arguments: Any = (), _keywords: Any = None) -> Any:
        given = [each for each in arguments if isinstance(each, _PartlyIndexed)]
        if len(given) == len(arguments) == 2 and function.__name__ in _PRODUCTS:
            return _product_of_rows(*given)
        return given[0]._refused() if given else NotImplemented

    def __repr__(self) -> str:
        return f"{declared(self.capture)} indexed with {len(self.indices)} of {self.capture.ndim} indices"


_PRODUCTS = ("dot", "inner", "vecdot", "matmul", "__matmul__")
_LONGEST_ROW = 16  # with 32 columns a kernel takes NVRTC minutes


def _product_of_rows(left: _PartlyIndexed, right: _PartlyIndexed) -> Any:
    """The sum of the products of elements, added in pairs: rounded less, and as deep as its logarithm."""
    rows = (left, right)
    if any(each.row is None or len(each.indices) != each.capture.ndim - 1 for each in rows) or left.row != right.row:
        return left._refused()
    if not left.row or left.row > _LONGEST_ROW:
        raise SpecError(f"a product of rows of {left.row}: give 1 to {_LONGEST_ROW} columns, or append them to q and k")
    terms = [left[column] * right[column] for column in range(left.row)]
    while len(terms) > 1:
        odd = terms[len(terms) & ~1 :]
        terms = [one + other for one, other in zip(terms[::2], terms[1::2], strict=False)] + odd
    return terms[0]


def _index(capture: ops.Capture, before: tuple[Any, ...], index: Any, row: int | None = None) -> Any:
    added = index if isinstance(index, tuple) else (index,)
    if any(isinstance(item, slice) or item is None or item is Ellipsis for item in added):
        raise SpecError(
            f"{declared(capture)}: slices, None and ... are not traced; give one integer index a dimension, of an "
            "array that is cut outside of the function"
        )
    indices = before + added
    if len(indices) < capture.ndim:
        return _PartlyIndexed(capture, indices, row)
    return Traced(build(ops.Load, capture, *(lift(item) for item in indices)))


class Scalar(Traced):
    """A number given at the call by name, `attention(q, k, v, window=512)`; dtype "int32" or "float32"."""

    def __init__(self, name: str, dtype: Any = "int32") -> None:
        check_name(name)
        super().__init__(ops.Capture(name, dtype_name(dtype, SCALARS, f"Scalar({name!r}): dtype"), 0, False))

    def __repr__(self) -> str:
        return declared(self.node)
