"""Sizes of a call, and formulas over them.

A formula is a function of `Sizes`. Called with numbers, it returns the number of a launch: `ceil_div(sizes.len_q, 128)`
is the extent of a grid. Called with `NAMED_SIZES`, it returns an expression tree, from which `formula_text` prints the
C++ of a release and the English of headers and reports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar


@dataclass(frozen=True)
class Formula:
    """An expression tree of nonnegative integers.

    Attributes:
        operation: "+", "-", "*", "/" (rounded down), "ceil_div", "min" or "max"; or the name of a size.
        operands: Formulas and numbers; none if `operation` is a name.
    """

    operation: str
    operands: tuple[Any, ...] = ()

    def __add__(self, other: Any) -> Formula:
        return Formula("+", (self, other))

    def __sub__(self, other: Any) -> Formula:
        return Formula("-", (self, other))

    def __mul__(self, other: Any) -> Formula:
        return Formula("*", (self, other))

    def __rmul__(self, other: int) -> Formula:
        return Formula("*", (other, self))

    def __floordiv__(self, other: Any) -> Formula:
        return Formula("/", (self, other))

    def __rfloordiv__(self, other: int) -> Formula:
        return Formula("/", (other, self))


def _apply(name: str, function: Callable[[Any, Any], Any], first: Any, second: Any) -> Any:
    """Returns the function of two numbers, or a formula if one of them is a formula."""
    named = isinstance(first, Formula) or isinstance(second, Formula)
    return Formula(name, (first, second)) if named else function(first, second)


def ceil_div(dividend: Any, divisor: Any) -> Any:
    """Returns dividend / divisor, rounded up."""
    return _apply("ceil_div", lambda a, b: -(-a // b), dividend, divisor)


def minimum(first: Any, second: Any) -> Any:
    """Returns the smaller of two values."""
    return _apply("min", min, first, second)


def maximum(first: Any, second: Any) -> Any:
    """Returns the larger of two values."""
    return _apply("max", max, first, second)


def reciprocal(divisor: Any) -> Any:
    """Returns 2^31 / divisor, rounded up. Kernels multiply by it to divide the index of a head.

    head / divisor = umulhi(2 * head + 1, reciprocal) for head < 2^16 and divisor <= 2^13, the limits that a call is
    checked for. (2 * head + 1) / (2 * divisor) lies at least 1 / (2 * divisor) >= 2^-14 from every integer, and the
    rounding of the reciprocal changes it by less than (2 * head + 1) / 2^32 < 2^-15. Without the + 1 it could be an
    integer, and a reciprocal that is rounded down would give the integer below.
    """
    return ceil_div(2**31, divisor)


Grid = tuple[Any, Any, Any]
"""Blocks along x, y and z: integers, or formulas of named sizes."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that determine a launch.

    Attributes:
        batch: Number of sequences.
        heads_q, heads_kv: Query heads; KV heads.
        len_q, len_k: Queries and keys of a sequence; the maximum over the sequences of a varlen batch.
        multiprocessors: Multiprocessors of the GPU.
        count: Number of elements for kernels that process an array elementwise, such as a captured array.
        splits: KV splits of a decode kernel.
        total_q, total_k: Rows of q, and of k and v: of a sequence, or of all sequences of a varlen batch.
    """

    batch: Any
    heads_q: Any
    heads_kv: Any
    len_q: Any
    len_k: Any
    multiprocessors: Any = field(default=1, kw_only=True)
    count: Any = field(default=0, kw_only=True)
    splits: Any = field(default=1, kw_only=True)
    total_q: Any = field(default=0, kw_only=True)
    total_k: Any = field(default=0, kw_only=True)

    @property
    def heads_per_kv(self) -> Any:
        """Query heads per KV head; at least 1, also for a call without heads."""
        if isinstance(self.heads_kv, Formula):
            return self.heads_q // self.heads_kv
        return max(self.heads_q // max(self.heads_kv, 1), 1)


SIZE_NAMES = ("batch", "heads_q", "heads_kv", "len_q", "len_k")
AnySizes = TypeVar("AnySizes", bound=Sizes)


def named(kind: type[AnySizes]) -> AnySizes:
    """Returns symbolic sizes: each is the formula of its own name."""
    return kind(**{each.name: Formula(each.name) for each in fields(kind)})


NAMED_SIZES = named(Sizes)


def size_values(sizes: Sizes) -> dict[str, Any]:
    """Returns the struct members that have the names of sizes, or follow from sizes equally in all kernels."""
    values = {name: getattr(sizes, name) for name in (*SIZE_NAMES, "count", "total_q", "total_k")}
    return values | {"heads_per_kv": sizes.heads_per_kv, "kv_reciprocal": reciprocal(sizes.heads_per_kv)}
