"""Rows of arrays inside a traced function: element-wise operations and reductions over a few columns, unrolled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from flashgen.errors import SpecError
from flashgen.language import operations as ops
from flashgen.language.trace import Columns, Traced, apply, lift, logic, shift

MAX_COLUMNS = 16
"""The largest number of columns of a row. With 32 columns NVRTC takes minutes for a kernel."""
ROW_ANSWERS: dict[str, Callable[..., Any]] = {}
"""The handlers of rows for torch functions and tensor methods, filled in by `protocols`, a higher layer."""


class Row(Columns):
    """A row of up to MAX_COLUMNS traced values. Operations with numbers, traced values and rows are element-wise."""

    __hash__ = None  # type: ignore[assignment]  # == builds expressions
    __array_ufunc__ = None

    def elements(self) -> tuple[Traced, ...]:
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.elements())

    def __iter__(self) -> NoReturn:
        raise SpecError(f"{self!r} cannot be iterated: index it fully")

    def __bool__(self) -> bool:
        raise SpecError("a row of traced values is neither true nor false: reduce it, as in (row == k).any(-1)")

    @property
    def ndim(self) -> int:
        return 1

    @property
    def shape(self) -> tuple[int]:
        return (len(self),)

    def __add__(self, other: Any) -> Row:
        return map_columns(lambda a, b: apply(ops.Add, a, b), self, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Row:
        return map_columns(lambda a, b: apply(ops.Sub, a, b), self, other)

    def __rsub__(self, other: Any) -> Row:
        return map_columns(lambda a, b: apply(ops.Sub, b, a), self, other)

    def __mul__(self, other: Any) -> Row:
        return map_columns(lambda a, b: apply(ops.Mul, a, b), self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Row:
        return map_columns(lambda a, b: apply(ops.Divide, a, b), self, other)

    def __rtruediv__(self, other: Any) -> Row:
        return map_columns(lambda a, b: apply(ops.Divide, b, a), self, other)

    def __floordiv__(self, other: Any) -> Row:
        return map_columns(lambda a, b: apply(ops.FloorDiv, a, b), self, other)

    def __mod__(self, other: Any) -> Row:
        return map_columns(lambda a, b: apply(ops.FloorMod, a, b), self, other)

    def __pow__(self, exponent: Any) -> Row:
        return map_columns(lambda a: a**exponent, self)

    def __neg__(self) -> Row:
        return map_columns(lambda a: -a, self)

    def __abs__(self) -> Row:
        return map_columns(lambda a: apply(ops.Abs, a), self)

    def __invert__(self) -> Row:
        return map_columns(lambda a: ~a, self)

    def __rshift__(self, other: Any) -> Row:
        return map_columns(lambda a, b: shift(ops.ShiftRight, a, b), self, other)

    def __lshift__(self, other: Any) -> Row:
        return map_columns(lambda a, b: shift(ops.ShiftLeft, a, b), self, other)

    def __and__(self, other: Any) -> Row:
        return map_columns(lambda a, b: logic(ops.And, ops.BitAnd, a, b), self, other)

    __rand__ = __and__

    def __or__(self, other: Any) -> Row:
        return map_columns(lambda a, b: logic(ops.Or, ops.BitOr, a, b), self, other)

    __ror__ = __or__

    def __xor__(self, other: Any) -> Row:
        return map_columns(lambda a, b: logic(ops.Xor, ops.BitXor, a, b), self, other)

    __rxor__ = __xor__

    def __eq__(self, other: Any) -> Row:  # type: ignore[override]
        return map_columns(lambda a, b: apply(ops.Equal, a, b), self, other)

    def __ne__(self, other: Any) -> Row:  # type: ignore[override]
        return map_columns(lambda a, b: apply(ops.NotEqual, a, b), self, other)

    def __lt__(self, other: Any) -> Row:
        return map_columns(lambda a, b: apply(ops.Less, a, b), self, other)

    def __le__(self, other: Any) -> Row:
        return map_columns(lambda a, b: apply(ops.LessEqual, a, b), self, other)

    def __gt__(self, other: Any) -> Row:
        return map_columns(lambda a, b: apply(ops.Greater, a, b), self, other)

    def __ge__(self, other: Any) -> Row:
        return map_columns(lambda a, b: apply(ops.GreaterEqual, a, b), self, other)

    def __matmul__(self, other: Any) -> Traced:
        return dot(self, other)

    def __getattr__(self, name: str) -> Any:
        return ROW_ANSWERS["method"](self, name)

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        return ROW_ANSWERS["torch"](function, arguments, keywords or {})


class ComputedRow(Row):
    """A row that is the result of operations."""

    def __init__(self, values: tuple[Traced, ...]) -> None:
        self._values = values

    def elements(self) -> tuple[Traced, ...]:
        return self._values

    def __getitem__(self, index: Any) -> Traced:
        if not isinstance(index, int):
            raise SpecError("a computed row of traced values is indexed by integers: reduce it, or index the array")
        return self._values[index]

    def __repr__(self) -> str:
        return f"a row of {len(self._values)} traced values"


def map_columns(function: Callable[..., Traced], *operands: Any) -> Row:
    """Applies a function to each column. Traced values, numbers and rows of one column broadcast."""
    columns = [operand.elements() if isinstance(operand, Row) else (lift(operand),) for operand in operands]
    length = max([len(column) for column in columns])
    for column in columns:
        if len(column) not in (1, length):
            raise SpecError(f"rows of {len(column)} and {length} columns do not broadcast: slice the array outside")
    values = [function(*[x[0] if len(x) == 1 else x[number] for x in columns]) for number in range(length)]
    return ComputedRow(tuple(values))


def reduce_columns(function: Callable[[Traced, Traced], Traced], row: Row) -> Traced:
    """Reduces the columns pairwise, which rounds less than a sequential reduction and has logarithmic depth."""
    terms = list(row.elements())
    while len(terms) > 1:
        odd = terms[len(terms) & ~1 :]
        terms = [function(terms[i], terms[i + 1]) for i in range(0, len(terms) - 1, 2)] + odd
    return terms[0]


def dot(left: Any, right: Any) -> Traced:
    """Returns the dot product of two rows of the same length."""
    if not (isinstance(left, Row) and isinstance(right, Row)):
        raise SpecError(f"a product of a row and {right!r}: give two rows, or one index per dimension")
    if len(left.elements()) != len(right.elements()):
        raise SpecError(f"a product of rows of {len(left)} and {len(right)} columns: give two of the same length")
    return reduce_columns(lambda a, b: apply(ops.Add, a, b), left * right)
