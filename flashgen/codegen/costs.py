"""The cost of each kernel, as formulas of a call's sizes: FLOPs, and the minimum bytes of memory traffic."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from flashgen.codegen.batches import batch_of
from flashgen.codegen.sizes import Sizes
from flashgen.codegen.tiling import padded
from flashgen.dtypes import DTYPES
from flashgen.language.spec import AttentionSpec

_SUM = DTYPES["float32"].bytes
_STATISTICS = 2 * _SUM  # the LSE and D of a row
_FIXED_POINT = 64  # bytes of a fixed-point sum, whose value does not depend on the order of additions


@dataclass(frozen=True)
class Quantities:
    """The quantities of which costs are sums: numbers of a call, or words.

    Attributes:
        scores: Pairs of a query and a key in the tiles that are visited, over all query heads and sequences.
        queries, keys: Rows of Q and of K, over all heads and sequences.
        visited_keys: The part of `keys` in the tiles that are visited.
        elements: Elements of a captured array; NaN if they are not known.
    """

    scores: Any
    queries: Any
    keys: Any
    visited_keys: Any
    elements: Any


@dataclass(frozen=True)
class Count:
    """A sum of quantities, each multiplied by a factor."""

    factors: tuple[tuple[str, int], ...]

    @staticmethod
    def sum(**factors: int) -> Count:
        """Returns the sum of quantities by name; those with a factor of 0 are left out."""
        return Count(tuple((name, factor) for name, factor in factors.items() if factor))

    def value(self, quantities: Quantities) -> float:
        """Returns the sum for the quantities of a call."""
        return sum(factor * getattr(quantities, name) for name, factor in self.factors)

    def text(self, words: Quantities) -> str:
        """Returns the formula, such as "512 * batch * heads_q * len_q", with the quantities in words."""
        return " + ".join(f"{factor} * {getattr(words, name)}" for name, factor in self.factors)


@dataclass(frozen=True)
class Cost:
    """The cost of a kernel.

    Attributes:
        flops: FLOPs of matrix products and of operations per row; None if they are not counted.
        hbm: Bytes if each array is read or written once.
        words: The quantities in words, for `flops_text` and `hbm_text`.
        remark: What `hbm` leaves out.
    """

    flops: Count | None
    hbm: Count
    words: Quantities
    remark: str = ""

    @property
    def flops_text(self) -> str:
        return self.flops.text(self.words) if self.flops else "none"

    @property
    def hbm_text(self) -> str:
        return f"{self.hbm.text(self.words)} bytes, at least{f'; {self.remark}' if self.remark else ''}"


_SHARE = "(share of tiles visited)"


def _in_words(scores: str, queries: str, keys: str, visited_keys: str = "") -> Quantities:
    return Quantities(scores, queries, keys, visited_keys or f"{keys} * {_SHARE}", "elements")


_PREFILL = _in_words(
    f"heads_q * (sum of len_q * len_k over the prefill sequences) * {_SHARE}",
    "heads_q * (queries of prefill sequences)",
    "heads_kv * (keys of prefill sequences)",
)


def _words(spec: AttentionSpec) -> Quantities:
    """Returns the quantities of the calls of a spec, in words."""
    batch = batch_of(spec)
    queries, keys = (" * ".join(batch.row_axes(*rows)) for rows in (("heads_q", "q"), ("heads_kv", "k")))
    return _in_words(f"{batch.scores} * {_SHARE}", queries, keys)


def quantities(sizes: Sizes, share: float = 1.0) -> Quantities:
    """Returns the quantities of a call with sequences of equal length, of whose tiles `share` are visited."""
    rows, keys = sizes.batch * sizes.heads_q * sizes.len_q, sizes.batch * sizes.heads_kv * sizes.len_k
    return Quantities(rows * sizes.len_k * share, rows, keys, keys * share, sizes.count or math.nan)


def _width(spec: AttentionSpec) -> int:
    return spec.head_dim + spec.value_dim


def forward_cost(spec: AttentionSpec) -> Cost:
    """Returns the cost of the forward kernel, without the reads of tile lists and captures."""
    row, width = spec.element.bytes * _width(spec), _width(spec)
    return Cost(Count.sum(scores=2 * width), Count.sum(queries=row + _SUM, keys=row), _words(spec))


def decode_cost(spec: AttentionSpec, tile_q: int, scheduled: bool = False) -> Cost:
    """Returns the cost of the decode kernel: K and V once per tile of rows; partial outputs written and read.

    Args:
        scheduled: Whether blocks share the keys of all sequences as stream-K work units, so that each block has at most
            two partial outputs.
    """
    width, partial = _width(spec), 2 * _SUM * (spec.value_dim + 2)
    row, key = spec.element.bytes * width, spec.kv_element.bytes * width
    hbm = Count.sum(queries=row + _SUM, visited_keys=key)
    if scheduled:
        partials = f"{2 * partial} * splits * heads_q * len_q for partial outputs of tiles of several work units"
    else:
        partials = f"{partial} * splits * {_words(spec).queries} for partial outputs if splits > 1"
    remark = f"+ {partials}; K and V are read once for each {tile_q} rows"
    return Cost(Count.sum(scores=2 * width), hbm, _words(spec), remark)


def mixed_cost(spec: AttentionSpec, tile_q: int) -> Cost:
    """Returns the cost of the kernel of mixed batches: K and V once per tile of decode rows and once per prefill."""
    width, partial = _width(spec), 4 * _SUM * (spec.value_dim + 2)
    row, key = spec.element.bytes * width, spec.kv_element.bytes * width
    hbm = Count.sum(queries=row + _SUM, visited_keys=key)
    remark = f"+ {partial * tile_q} * splits * groups for partial outputs of tiles of several work units"
    words = replace(_words(spec), visited_keys=f"heads_kv * (sum of keys) * {_SHARE}")
    return Cost(Count.sum(scores=2 * width), hbm, words, remark)


def prefill_cost(spec: AttentionSpec) -> Cost:
    """Returns the cost of the kernel for only the prefills of mixed batches."""
    row, width = spec.element.bytes * _width(spec), _width(spec)
    return Cost(Count.sum(scores=2 * width), Count.sum(queries=row + _SUM, keys=row), _PREFILL)


def backward_cost(
    role: str,
    spec: AttentionSpec,
    dq_apart: bool = False,
    exact_sums: bool = False,
    columns: int = 0,
    finishes: bool = False,
) -> Cost:
    """Returns the cost of a backward kernel.

    Args:
        role: Role of the kernel: "preprocess", "dkdv", "dq", "postprocess", "postprocess_dk", "postprocess_dv", "sink",
            or "d_<name>" for a capture.
        dq_apart: Whether this kernel neither zeroes nor adds to a dQ accumulator: another kernel computes dQ or, for
            "preprocess", the first CTA of a tile stores.
        exact_sums: Whether gradients of captures are summed in fixed point.
        columns: Columns of a row of the accumulator; 0 means head_dim, padded.
        finishes: Whether the kernel converts its accumulator to dQ itself.
    """
    capture = next((each for each in spec.captures if role == f"d_{each.name}"), None)
    if capture is not None:
        each = (_FIXED_POINT if exact_sums else _SUM) + DTYPES[capture.dtype].bytes
        words = replace(_words(spec), elements=f"elements of {capture.name}")
        return Cost(None, Count.sum(elements=each), words)
    flops, hbm = _backward_counts(role, spec, dq_apart, columns or padded(spec.head_dim), finishes)
    return Cost(flops, hbm, _words(spec))


def _backward_counts(
    role: str, spec: AttentionSpec, dq_apart: bool, columns: int, finishes: bool
) -> tuple[Count, Count]:
    head, value, element = spec.head_dim, spec.value_dim, spec.element.bytes
    read = element * (head + value)  # bytes of a row of Q and dO, or of K and V
    sums = 0 if dq_apart else 2 * _SUM * columns  # bytes read and written for a row of the dQ accumulator
    products = (2 if dq_apart else 3) * head + 2 * value  # QK, dV, dP, dK, and dQ without a kernel of its own
    converted = element * head if finishes else 0
    written = 2 * element * value + _SUM + _STATISTICS + sums // 2  # reads O, dO and the LSE, zeroes the accumulator
    counts = {
        "preprocess": (Count.sum(queries=2 * value), Count.sum(queries=written)),
        "dkdv": (
            Count.sum(scores=2 * products),
            Count.sum(queries=read + _STATISTICS + sums + converted, keys=2 * read),
        ),
        "dq": (  # QK, dP, dQ
            Count.sum(scores=2 * (2 * head + value)),
            Count.sum(queries=read + _STATISTICS + element * head, keys=read),
        ),
        "postprocess": (Count.sum(queries=head), Count.sum(queries=_SUM * columns + element * head)),
        "postprocess_dk": (Count.sum(keys=head), Count.sum(keys=_SUM * columns + element * head)),
        "postprocess_dv": (Count.sum(keys=value), Count.sum(keys=_SUM * columns + element * value)),
        "sink": (Count.sum(queries=2), Count.sum(queries=_STATISTICS)),
    }
    return counts[role]
