"""The cost of each kernel, as formulas of a call's sizes: FLOPs, and the minimum bytes of memory traffic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from flashgen.codegen.batches import DenseBatch, VarlenBatch, batch_of
from flashgen.codegen.formula_text import english
from flashgen.codegen.padding import padded
from flashgen.codegen.sizes import Sizes, named
from flashgen.dtypes import DTYPES
from flashgen.language.operations import Capture
from flashgen.language.spec import AttentionSpec

_SUM = DTYPES["float32"].bytes
_LSE_AND_D = 2 * _SUM  # the LSE and D of a row
_OF_WORK_UNITS = "of tiles of several work units"
_PREFILL_WORDS = {
    "pairs": "(sum of len_q * len_k over the prefill sequences)",
    "total_q": "(queries of prefill sequences)",
    "total_k": "(keys of prefill sequences)",
}
_FIXED_POINT = 64  # bytes of a fixed-point sum, whose value does not depend on the order of additions


@dataclass(frozen=True)
class WorkSizes(Sizes):
    """The sizes of a call, and what its work depends on beyond them.

    Attributes:
        pairs: Sum of len_q * len_k over the sequences of a varlen batch.
        visited: Share of the tiles that are visited.
    """

    pairs: Any = field(default=0, kw_only=True)
    visited: Any = field(default=1, kw_only=True)


NAMED_WORK = named(WorkSizes)
Count = Callable[[WorkSizes], Any]
_Pass = Literal["forward", "backward"]


class _Amounts(NamedTuple):
    """What costs are sums of, over all heads and sequences.

    Attributes:
        queries, keys: Rows of Q and of K.
        scores: Pairs of a query and a key in the tiles that are visited, over all query heads.
    """

    queries: Count
    keys: Count
    scores: Count


_AMOUNTS = {
    DenseBatch: _Amounts(
        queries=lambda work: work.batch * work.heads_q * work.len_q,
        keys=lambda work: work.batch * work.heads_kv * work.len_k,
        scores=lambda work: work.batch * work.heads_q * work.len_q * work.len_k * work.visited,
    ),
    VarlenBatch: _Amounts(
        queries=lambda work: work.heads_q * work.total_q,
        keys=lambda work: work.heads_kv * work.total_k,
        scores=lambda work: work.heads_q * work.pairs * work.visited,
    ),
}


def _amounts(spec: AttentionSpec) -> _Amounts:
    return _AMOUNTS[type(batch_of(spec))]


@dataclass(frozen=True)
class Cost:
    """The cost of a kernel.

    Attributes:
        flops: FLOPs of matrix products and of operations per row; None if they are not counted.
        hbm: Bytes if each array is read or written once.
        partials: Bytes for partial outputs, which `hbm` leaves out; None if there are none.
        remark: When there are partial outputs, and what else `hbm` leaves out.
        words: English of sizes that differs from that of other kernels.
    """

    flops: Count | None
    hbm: Count
    partials: Count | None = None
    remark: str = ""
    words: Mapping[str, str] = field(default_factory=dict)

    @property
    def flops_text(self) -> str:
        return self._text(self.flops) if self.flops else "none"

    @property
    def hbm_text(self) -> str:
        partials = f"; + {self._text(self.partials)} for partial outputs {self.remark}" if self.partials else ""
        return f"{self._text(self.hbm)} bytes, at least{partials}"

    def _text(self, count: Count) -> str:
        return english(count(NAMED_WORK), self.words)


def products(spec: AttentionSpec, pass_: _Pass) -> int:
    """Returns the multiply-adds per score: QK and PV in the forward; QK, dV, dP, dQ and dK in the backward."""
    head, value = spec.head_dim, spec.value_dim
    return head + value if pass_ == "forward" else 3 * head + 2 * value


def product_flops(spec: AttentionSpec, pass_: _Pass, work: WorkSizes) -> Any:
    """Returns the FLOPs of the matrix products of a pass."""
    return 2 * products(spec, pass_) * _amounts(spec).scores(work)


def _attention_cost(spec: AttentionSpec, keys: Count, **details: Any) -> Cost:
    """Returns the cost of a kernel that reads Q and `keys` rows of K and V, and writes O and the LSE."""
    queries = _amounts(spec).queries
    of_query = spec.element.bytes * spec.head_dim + spec.out_element.bytes * spec.value_dim + _SUM
    of_key = spec.kv_element.bytes * spec.kv_columns
    return Cost(
        lambda work: product_flops(spec, "forward", work),
        lambda work: of_query * queries(work) + of_key * keys(work),
        **details,
    )


def forward_cost(spec: AttentionSpec) -> Cost:
    """Returns the cost of the forward kernel, without the reads of tile lists and captures."""
    return _attention_cost(spec, _amounts(spec).keys)


def prefill_cost(spec: AttentionSpec) -> Cost:
    """Returns the cost of the kernel for only the prefills of mixed batches."""
    return replace(forward_cost(spec), words=_PREFILL_WORDS)


def decode_cost(spec: AttentionSpec, tile_q: int, scheduled: bool = False) -> Cost:
    """Returns the cost of the decode kernel: K and V once per KV head; partial outputs written and read.

    Args:
        scheduled: Whether blocks share the keys of all sequences as stream-K work units, so that each block has at most
            two partial outputs.
    """
    partial, rows = 2 * _SUM * (spec.value_dim + 2), f"K and V are read once for each {tile_q} rows"
    if scheduled:
        of_units: Count = lambda work: 2 * partial * work.splits * work.heads_q * work.len_q
        return _split_cost(spec, of_units, f"{_OF_WORK_UNITS}; {rows}")
    return _split_cost(
        spec, lambda work: partial * work.splits * _AMOUNTS[DenseBatch].queries(work), f"if splits > 1; {rows}"
    )


def merge_splits_cost(spec: AttentionSpec, scheduled: bool = False) -> Cost:
    """Returns the cost of the kernel that merges partial outputs: it reads them, and writes O and the LSE."""
    partial, result = _SUM * (spec.value_dim + 2), spec.out_element.bytes * spec.value_dim + _SUM
    slots = 2 if scheduled else 1
    rows = _AMOUNTS[DenseBatch].queries
    if scheduled:
        return Cost(None, lambda work: slots * partial * work.splits * work.heads_q * work.len_q + result * rows(work))
    return Cost(None, lambda work: (partial * work.splits + result) * rows(work))


def mixed_cost(spec: AttentionSpec, tile_q: int, head_groups: Callable[[Sizes], Any]) -> Cost:
    """Returns the cost of the kernel of mixed batches: K and V once per KV head of each sequence.

    Args:
        head_groups: Returns the groups of query heads that share tiles.
    """
    slot = 4 * _SUM * (spec.value_dim + 2) * tile_q  # of the two that a work unit writes, which are read once
    cost = _split_cost(spec, lambda work: slot * work.splits * head_groups(work), _OF_WORK_UNITS)
    return replace(cost, words={"total_k": "(sum of keys)"})


def _split_cost(spec: AttentionSpec, partials: Count, remark: str) -> Cost:
    """Returns the cost of a kernel whose blocks divide the keys of a row."""
    keys = _amounts(spec).keys
    return _attention_cost(spec, lambda work: keys(work) * work.visited, partials=partials, remark=remark)


def backward_cost(
    role: str,
    spec: AttentionSpec,
    dq_apart: bool = False,
    exact_sums: bool = False,
    columns: int = 0,
    finishes: bool = False,
    dense: bool = False,
) -> Cost:
    """Returns the cost of a backward kernel.

    Args:
        role: Role of the kernel: "preprocess", "dkdv", "dq", "postprocess", "postprocess_dk", "postprocess_dv", "sink",
            or "dense_<name>" or "d_<name>" for a capture.
        dq_apart: Whether this kernel neither zeroes nor adds to a dQ accumulator: another kernel computes dQ or, for
            "preprocess", the first CTA of a tile stores.
        exact_sums: Whether gradients of captures are summed in fixed point.
        columns: Columns of a row of the accumulator; 0 means head_dim, padded.
        finishes: Whether the kernel converts its accumulator to dQ itself.
        dense: Whether the kernel of a capture computes the gradient from the scores, instead of converting sums.
    """
    capture = next((each for each in spec.captures if role in (f"d_{each.name}", f"dense_{each.name}")), None)
    if capture is not None and dense:
        return _dense_gradient_cost(spec, capture)
    if capture is not None:
        each = (_FIXED_POINT if exact_sums else _SUM) + DTYPES[capture.dtype].bytes
        return Cost(None, lambda work: each * work.count, words={"count": f"elements of {capture.name}"})
    flops, hbm = _backward_counts(role, spec, dq_apart, columns or padded(spec.head_dim), finishes)
    return Cost(flops, hbm)


def _dense_gradient_cost(spec: AttentionSpec, capture: Capture) -> Cost:
    """Returns the cost of a kernel that computes QK and dP again, and reads and writes each element of an array."""
    of, columns, element = _amounts(spec), spec.head_dim + spec.value_dim, spec.element.bytes

    def hbm(work: WorkSizes) -> Any:
        of_query, of_key = element * columns + _LSE_AND_D, element * spec.kv_columns
        rows = of_query * of.queries(work) + of_key * of.keys(work)
        return rows + 2 * DTYPES[capture.dtype].bytes * work.count

    return Cost(lambda work: 2 * columns * of.scores(work), hbm, words={"count": f"elements of {capture.name}"})


def _backward_counts(
    role: str, spec: AttentionSpec, dq_apart: bool, columns: int, finishes: bool
) -> tuple[Count | None, Count]:
    of, head, value = _amounts(spec), spec.head_dim, spec.value_dim
    element, gradient = spec.element.bytes, spec.grad_element.bytes
    read, read_key = element * (head + value), element * spec.kv_columns  # bytes of a row of Q and dO, of K and V
    sums = 0 if dq_apart else 2 * _SUM * columns  # bytes read and written for a row of the dQ accumulator
    per_score = products(spec, "backward") - (head if dq_apart else 0)  # without dQ if it has a kernel of its own
    converted = gradient * head if finishes else 0
    reduced = (spec.out_element.bytes + element) * value + _SUM  # bytes of a row of O, dO and the LSE
    written = reduced + _LSE_AND_D + sums // 2  # zeroes the accumulator
    of_query, of_key = read + _LSE_AND_D + sums + converted, read_key + gradient * spec.kv_columns
    counts: dict[str, tuple[Count | None, Count]] = {
        "preprocess": (lambda work: 2 * value * of.queries(work), lambda work: written * of.queries(work)),
        "dkdv": (
            lambda work: 2 * per_score * of.scores(work),
            lambda work: of_query * of.queries(work) + of_key * of.keys(work),
        ),
        "dq": (  # QK, dP, dQ
            lambda work: 2 * (2 * head + value) * of.scores(work),
            lambda work: (read + _LSE_AND_D + gradient * head) * of.queries(work) + read_key * of.keys(work),
        ),
        "postprocess": _conversion(of.queries, head, columns, gradient),
        "postprocess_dk": _conversion(of.keys, head, columns, gradient),
        "postprocess_dv": _conversion(of.keys, value, columns, gradient),
        "sink": (lambda work: 2 * of.queries(work), lambda work: _LSE_AND_D * of.queries(work)),
    }
    return counts[role]


def _conversion(rows: Count, width: int, columns: int, element: int) -> tuple[Count, Count]:
    """Returns the FLOPs and bytes of the conversion of an accumulator of `columns` to rows of `width` elements."""
    return lambda work: width * rows(work), lambda work: (_SUM * columns + element * width) * rows(work)
