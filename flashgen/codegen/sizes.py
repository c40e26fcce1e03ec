"""Sizes of a call, as numbers or as names; what follows from them is one text for both.

A grid such as `ceil_div(sizes.len_q, 128)` is a number where a call is launched, and the formula "ceil_div(len_q, 128)"
where a release says how a kernel is launched.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_SUM, _PRODUCT, _ATOM = 0, 1, 2  # how strongly a formula's outermost operation binds


@dataclass(frozen=True)
class Formula:
    """An integer of sizes that are not known yet, in C++."""

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
    """A factor: a sum needs parentheses, and a product does on the right, where division rounds."""
    loose = isinstance(value, Formula) and (value.binds == _SUM or (right and value.binds == _PRODUCT))
    return f"({value})" if loose else str(value)


def ceil_div(dividend: Any, divisor: Any) -> Any:
    """dividend / divisor, rounded up."""
    if isinstance(dividend, Formula) or isinstance(divisor, Formula):
        return Formula(f"ceil_div({dividend}, {divisor})")
    return -(-dividend // divisor)


def minimum(first: Any, second: Any) -> Any:
    """The smaller of two."""
    named = isinstance(first, Formula) or isinstance(second, Formula)
    return Formula(f"min({first}, {second})") if named else min(first, second)


def maximum(first: Any, second: Any) -> Any:
    """The larger of two."""
    named = isinstance(first, Formula) or isinstance(second, Formula)
    return Formula(f"max({first}, {second})") if named else max(first, second)


def reciprocal(divisor: Any) -> Any:
    """2^31 / divisor, rounded up: by which kernels divide a head's number."""
    return ceil_div(2**31, divisor)


@dataclass(frozen=True)
class Sizes:
    """What a launch depends on beside the arrays.

    batch: sequences. heads_q, heads_kv: of q; of k and v. len_q, len_k: queries and keys of a sequence, in a ragged
    batch at most. total_q, total_k: rows of the packed arrays of a ragged batch.
    multiprocessors: of the GPU. count: elements of the captured array that a kernel is for. splits: parts into which a
    decode kernel splits the keys.
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
        """Query heads that share a head of k and v."""
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
"""The sizes of any call, by name."""


def size_values(sizes: Sizes) -> dict[str, Any]:
    """The members of kernels' structs that bear the names of sizes, or follow from them in every kernel alike."""
    values = {name: getattr(sizes, name) for name in (*SIZE_NAMES, "count", "total_q", "total_k")}
    return values | {"heads_per_kv": sizes.heads_per_kv, "kv_reciprocal": reciprocal(sizes.heads_per_kv)}
