"""Sizes of a call, as integers or as symbolic names. The same code computes with both.

A grid such as `ceil_div(sizes.len_q, 128)` is an integer when a call is launched, and the formula
"ceil_div(len_q, 128)" in the manifest of a release.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_SUM, _PRODUCT, _ATOM = 0, 1, 2  # precedence of a formula's outermost operation


@dataclass(frozen=True)
class Formula:
    """A C++ integer expression of named sizes; `binds` is the precedence of its outermost operation."""

    text: str
    binds: int = _ATOM

    def __add__(self, other: Any) -> Formula:
        return Formula(f"{self} + {other}", _SUM)

    def __sub__(self, other: Any) -> Formula:
        loose = isinstance(other, Formula) and other.binds == _SUM
        return Formula(f"{self} - ({other})" if loose else f"{self} - {other}", _SUM)

    def __mul__(self, other: Any) -> Formula:
        return Formula(f"{_factor(self)} * {_factor(other, right=True)}", _PRODUCT)

    def __rmul__(self, other: int) -> Formula:
        return Formula(f"{other} * {_factor(self, right=True)}", _PRODUCT)

    def __floordiv__(self, other: Any) -> Formula:
        return Formula(f"{_factor(self)} / {_factor(other, right=True)}", _PRODUCT)

    def __rfloordiv__(self, other: int) -> Formula:
        return Formula(f"{other} / {_factor(self, right=True)}", _PRODUCT)

    def __str__(self) -> str:
        return self.text


def _factor(value: Any, right: bool = False) -> str:
    """Returns a factor's text: sums need parentheses, and so do products on the right, because division rounds."""
    loose = isinstance(value, Formula) and (value.binds == _SUM or (right and value.binds == _PRODUCT))
    return f"({value})" if loose else str(value)


def ceil_div(dividend: Any, divisor: Any) -> Any:
    """Returns dividend / divisor, rounded up."""
    if isinstance(dividend, Formula) or isinstance(divisor, Formula):
        return Formula(f"ceil_div({dividend}, {divisor})")
    return -(-dividend // divisor)


def minimum(first: Any, second: Any) -> Any:
    """Returns the smaller of two values."""
    named = isinstance(first, Formula) or isinstance(second, Formula)
    return Formula(f"min({first}, {second})") if named else min(first, second)


def maximum(first: Any, second: Any) -> Any:
    """Returns the larger of two values."""
    named = isinstance(first, Formula) or isinstance(second, Formula)
    return Formula(f"max({first}, {second})") if named else max(first, second)


def reciprocal(divisor: Any) -> Any:
    """Returns 2^31 / divisor, rounded up. Kernels multiply by it to divide the index of a head."""
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
        total_q, total_k: Rows of the packed arrays of a varlen batch.
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
        """Query heads per KV head."""
        return max(self.heads_q // max(self.heads_kv, 1), 1)


@dataclass(frozen=True)
class _NamedSizes(Sizes):
    @property
    def heads_per_kv(self) -> Any:
        return self.heads_q // self.heads_kv


SIZE_NAMES = ("batch", "heads_q", "heads_kv", "len_q", "len_k")
NAMED_SIZES: Sizes = _NamedSizes(
    *map(Formula, SIZE_NAMES),
    multiprocessors=Formula("multiprocessors"),
    count=Formula("count"),
    splits=Formula("splits"),
    total_q=Formula("total_q"),
    total_k=Formula("total_k"),
)
"""Symbolic sizes: each is the formula of its own name."""


def size_values(sizes: Sizes) -> dict[str, Any]:
    """Returns the struct members that have the names of sizes, or follow from sizes equally in all kernels."""
    values = {name: getattr(sizes, name) for name in (*SIZE_NAMES, "count", "total_q", "total_k")}
    return values | {"heads_per_kv": sizes.heads_per_kv, "kv_reciprocal": reciprocal(sizes.heads_per_kv)}
