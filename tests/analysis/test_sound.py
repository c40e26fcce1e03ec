"""Random predicates of the language against brute force: no element is ever classified wrongly.

FLASHGEN_EXAMPLES=5000 pytest tests/analysis/test_sound.py searches longer.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import sympy
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from flashgen.analysis.closed_forms.affine import affine
from flashgen.analysis.closed_forms.tile_ranges import evaluate_range, key_range, query_range
from flashgen.analysis.expression_text import to_text
from flashgen.analysis.intervals.evaluation import EMPTY, FULL, PARTIAL, classify, interval_of
from flashgen.analysis.tile_classes import tile_map
from flashgen.language import operations as ops
from flashgen.language.evaluate import evaluate

EXAMPLES = int(os.environ.get("FLASHGEN_EXAMPLES", "150"))
thorough = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)

SCALAR = ops.Capture("window", "int32", 0)
IDS = ops.Capture("ids", "int32", 1)
TABLE = ops.Capture("table", "float32", 2)
ODD = ops.Capture("odd", "float32", 1)  # NaN, infinities and both zeros, among others
AMOUNTS = ops.Capture("amounts", "int32", 1)  # divisors and shifts: 0, and beyond both ends of the valid shifts
COMPARISONS = (ops.Equal, ops.NotEqual, ops.Less, ops.LessEqual, ops.Greater, ops.GreaterEqual)

small = st.integers(-20, 40).map(sympy.Integer)
positive = st.integers(1, 17).map(sympy.Integer)
divisor = st.one_of(positive, positive, st.integers(-5, 5).map(sympy.Integer))


def node(kind: type[ops.Operation], *operands: st.SearchStrategy[sympy.Basic]) -> st.SearchStrategy[sympy.Basic]:
    return st.tuples(*operands).map(lambda values: kind(*values))


def grown(terms: st.SearchStrategy[sympy.Basic]) -> st.SearchStrategy[sympy.Basic]:
    """Returns integer terms of integer terms."""
    return st.one_of(
        *(node(kind, terms, terms) for kind in (ops.Add, ops.Sub, ops.Minimum, ops.Maximum)),
        *(node(kind, terms) for kind in (ops.Neg, ops.Abs)),
        *(node(kind, terms, divisor) for kind in (ops.FloorDiv, ops.FloorMod, ops.Mul)),
        node(ops.ShiftRight, terms, st.integers(0, 4).map(sympy.Integer)),
        node(ops.BitAnd, terms, st.sampled_from([1, 3, 7, 5, -4]).map(sympy.Integer)),
        node(ops.Where, st.sampled_from(COMPARISONS).flatmap(lambda kind: node(kind, terms, terms)), terms, terms),
    )


leaves = st.one_of(st.sampled_from([ops.QUERY, ops.KEY, ops.LEN_Q, ops.LEN_K, SCALAR, ops.QUERY, ops.KEY]), small)
terms = st.recursive(leaves, grown, max_leaves=6)

# Terms of one index, of the kinds that ranges solve.
aligned = node(ops.Add, st.just(ops.QUERY), node(ops.Sub, st.just(ops.LEN_K), st.just(ops.LEN_Q)))


def of_index(index: st.SearchStrategy[sympy.Basic]) -> st.SearchStrategy[sympy.Basic]:
    shifted = st.one_of(index, node(ops.Add, index, st.one_of(small, st.just(SCALAR))), node(ops.Sub, index, small))
    divided = node(ops.FloorDiv, shifted, positive)
    clamped = node(ops.Maximum, node(ops.Minimum, shifted, st.one_of(small, st.just(ops.LEN_K))), small)
    return st.one_of(shifted, divided, node(ops.Mul, divided, positive), node(ops.FloorMod, shifted, positive), clamped)


queries, keys = of_index(st.one_of(st.just(ops.QUERY), aligned)), of_index(st.just(ops.KEY))
distance = node(ops.Sub, st.one_of(st.just(ops.QUERY), aligned), st.just(ops.KEY))
tame = st.one_of(
    *(node(kind, keys, st.one_of(queries, queries, small)) for kind in COMPARISONS),
    *(node(kind, node(ops.Abs, distance), small) for kind in COMPARISONS),
    *(node(kind, queries, small) for kind in COMPARISONS),
    node(ops.Equal, node(ops.FloorMod, distance, positive), st.just(sympy.Integer(0))),
)


def combined(parts: st.SearchStrategy[sympy.Basic]) -> st.SearchStrategy[sympy.Basic]:
    return st.one_of(
        node(ops.And, parts, parts),
        node(ops.And, parts, parts),
        node(ops.Or, parts, parts),
        node(ops.Xor, parts, parts),
        node(ops.Not, parts),
        node(ops.Where, parts, parts, parts),
    )


wild = st.sampled_from(COMPARISONS).flatmap(lambda kind: node(kind, terms, terms))
predicates = st.recursive(st.one_of(tame, tame, wild), combined, max_leaves=4)

# Terms that only intervals and lists handle: captured arrays, floats, bits.
amounts = node(ops.Load, st.just(AMOUNTS), terms)
loads = st.one_of(node(ops.Load, st.just(IDS), terms), terms)
any_integers = st.one_of(
    loads,
    *(node(kind, loads, loads) for kind in (ops.BitAnd, ops.BitOr, ops.BitXor, ops.Mul, ops.FloorDiv, ops.FloorMod)),
    *(node(kind, loads, amounts) for kind in (ops.FloorDiv, ops.FloorMod, ops.ShiftLeft, ops.ShiftRight)),
    node(ops.ShiftLeft, loads, st.integers(-2, 40).map(sympy.Integer)),
    node(ops.ShiftRight, loads, loads),
)


def clamped(parts: tuple[type[ops.Operation], sympy.Basic, sympy.Basic]) -> sympy.Basic:
    """A number limited by a bound, as fg.clamp does it."""
    beyond, number, bound = parts
    return ops.Where(beyond(number, bound), bound, number)


odd = node(ops.Load, st.just(ODD), terms)
numbers = st.one_of(
    st.sampled_from([0.37, -1.5, 8.0, 0.0, 1e30]).map(sympy.Float),
    st.sampled_from([sympy.oo, -sympy.oo, ops.Neg(sympy.Float(0.0))]),
)
any_floats = st.recursive(
    st.one_of(node(ops.ToFloat, loads), numbers, node(ops.Load, st.just(TABLE), terms, terms), odd),
    lambda parts: st.one_of(
        *(
            node(kind, parts, parts)
            for kind in (ops.Add, ops.Sub, ops.Mul, ops.Divide, ops.Minimum, ops.Maximum, ops.FloorDiv, ops.FloorMod)
        ),
        *(
            node(kind, parts)
            for kind in (ops.Exp, ops.Exp2, ops.Log, ops.Log2, ops.Tanh, ops.Sigmoid, ops.Sqrt, ops.Sin, ops.Cos)
        ),
        *(node(kind, parts) for kind in (ops.Neg, ops.Abs, ops.Floor)),
        *(node(ops.Divide, parts, node(kind, odd, parts)) for kind in (ops.Minimum, ops.Maximum, ops.Mul)),
        node(ops.Where, tame, parts, parts),
        st.tuples(st.sampled_from(COMPARISONS), parts, st.one_of(parts, loads)).map(clamped),
    ),
    max_leaves=4,
)
any_numbers = st.one_of(any_integers, any_floats, node(ops.ToInt, any_floats))
any_comparisons = st.sampled_from(COMPARISONS).flatmap(lambda kind: node(kind, any_numbers, any_numbers))
any_predicates = st.recursive(st.one_of(any_comparisons, tame), combined, max_leaves=3)

lengths = st.integers(1, 70)


@thorough
@given(term=any_integers)
def test_canonical_forms(term: sympy.Basic) -> None:
    """The node of a form has that form and the same value."""
    form = affine(term)
    assert affine(form.node()) == form
    assert (by_brute_force(term, 9, 12) == by_brute_force(form.node(), 9, 12)).all()


CAPTURES = {
    "window": np.int32(9),
    "ids": np.sort(np.random.default_rng(0).integers(0, 6, 50)).astype(np.int32),
    "table": np.random.default_rng(1).normal(size=(20, 30)).astype(np.float32),
    "odd": np.array(
        [
            3,
            2,
            1,
            np.nan,
            5,
            6,
            np.inf,
            np.inf,
            0.0,
            0.0,
            -0.0,
            -0.0,
            0.0,
            4,
            4,
            -np.inf,
            -1,
            1,
            np.nan,
            np.nan,
            7,
            0.5,
        ],
        np.float32,
    ),
    "amounts": np.array([3, 2, 1, 0, 0, 1, 2, -1, -2, 29, 30, 31, 32, 40, 1, 1, 0, -3], np.int32),
}


def by_brute_force(predicate: sympy.Basic, len_q: int, len_k: int) -> np.ndarray:
    values = {
        ops.QUERY: np.arange(len_q)[:, None], ops.KEY: np.arange(len_k)[None, :],
        ops.LEN_Q: len_q, ops.LEN_K: len_k, ops.BATCH: 0, ops.HEAD: 0,
    }  # fmt: skip
    return np.broadcast_to(evaluate(predicate, values, CAPTURES), (len_q, len_k))


@pytest.mark.parametrize("transposed", [False, True], ids=["keys", "queries"])
@thorough
@given(predicate=predicates, len_q=lengths, len_k=lengths, rows=st.integers(1, 20), clamped=st.booleans())
def test_ranges(transposed: bool, predicate: sympy.Basic, len_q: int, len_k: int, rows: int, clamped: bool) -> None:
    tile_range = (query_range if transposed else key_range)(predicate)
    if tile_range is None:
        return
    note(f"{to_text(predicate)}: {tile_range}")
    holds = by_brute_force(predicate, len_q, len_k)
    holds = holds.T if transposed else holds
    first = np.arange(0, len(holds), rows)
    last = first + rows - 1
    bounds = evaluate_range(
        tile_range, first, np.minimum(last, len(holds) - 1) if clamped else last, len_q, len_k, CAPTURES
    )
    for start, begin, end, full_begin, full_end in zip(first, *bounds, strict=True):
        tile = holds[start : start + rows]
        assert begin >= 0 and end <= tile.shape[1]
        attended = np.flatnonzero(tile.any(axis=0))
        assert not attended.size or (begin <= attended[0] and attended[-1] < end)
        if full_begin < full_end:
            assert full_begin >= 0 and full_end <= tile.shape[1]
            assert tile[:, full_begin:full_end].all()


# Numbers at both ends of int32, at any position of a predicate; lengths up to the maximum.
extreme = st.one_of(
    st.sampled_from([-(2**31), 1 - 2**31, -(2**30), -65536, 65536, 3_000_000, 2**30, 2**31 - 2, 2**31 - 1]),
    st.integers(-(2**31), 2**31 - 1),
)
long_lengths = st.one_of(st.integers(1, 70), st.integers(1, ops.LONGEST), st.just(ops.LONGEST))


@pytest.mark.parametrize("transposed", [False, True], ids=["keys", "queries"])
@thorough
@given(
    predicate=predicates, numbers=st.lists(extreme, min_size=3, max_size=3), window=extreme, len_q=long_lengths,
    len_k=long_lengths, seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_ranges_of_extreme_numbers(
    transposed: bool, predicate: sympy.Basic, numbers: list[int], window: int, len_q: int, len_k: int, seed: int
) -> None:
    """At random elements and at bounds, no element is classified wrongly, and no bound exceeds int32."""
    constants = sorted(predicate.atoms(sympy.Integer), key=int)[:3]
    predicate = predicate.xreplace(dict(zip(constants, map(sympy.Integer, numbers), strict=False)))
    tile_range = (query_range if transposed else key_range)(predicate)
    if tile_range is None:
        return
    note(f"{to_text(predicate)}: {tile_range}")
    random, length = np.random.default_rng(seed), len_q if transposed else len_k
    row_length = len_k if transposed else len_q
    first = random.integers(0, row_length, 40) // 64 * 64
    last = np.minimum(first + 63, row_length - 1)
    bounds = evaluate_range(tile_range, first, last, len_q, len_k, {"window": np.int32(window)})
    assert all((abs(bound) < 2**31 - 4096).all() for bound in bounds)
    begin, end, full_begin, full_end = (bound[:, None] for bound in bounds)
    near = [bound[:, None] + np.arange(-2, 3) for bound in bounds]
    columns = np.concatenate([*near, random.integers(0, length, (40, 20))], axis=1).clip(0, length - 1)
    rows = first[:, None] + random.integers(0, 64, columns.shape) % (last - first + 1)[:, None]
    values = dict(zip((ops.QUERY, ops.KEY), (columns, rows) if transposed else (rows, columns), strict=True))
    values |= {ops.LEN_Q: len_q, ops.LEN_K: len_k, ops.BATCH: 0, ops.HEAD: 0}
    holds = np.broadcast_to(evaluate(predicate, values, {"window": np.int32(window)}), columns.shape)
    visited = (begin <= columns) & (columns < end)
    full = (full_begin <= columns) & (columns < full_end)
    assert not (holds & ~visited).any() and not (full & ~holds).any()


@thorough
@given(predicate=any_predicates, len_q=lengths, len_k=lengths, rows=st.integers(1, 20), columns=st.integers(1, 20))
def test_intervals(predicate: sympy.Basic, len_q: int, len_k: int, rows: int, columns: int) -> None:
    note(to_text(predicate))
    first_q, first_k = np.arange(0, len_q, rows)[:, None], np.arange(0, len_k, columns)
    boxes = {
        ops.QUERY: (first_q, np.minimum(first_q + rows, len_q) - 1),
        ops.KEY: (first_k, np.minimum(first_k + columns, len_k) - 1),
        ops.LEN_Q: (len_q, len_q), ops.LEN_K: (len_k, len_k),
    }  # fmt: skip
    classes = np.broadcast_to(classify(predicate, boxes, CAPTURES), (len(first_q), len(first_k)))
    holds = by_brute_force(predicate, len_q, len_k)
    for row, column in np.argwhere(classes != PARTIAL):
        tile = holds[row * rows : (row + 1) * rows, column * columns : (column + 1) * columns]
        assert (tile == (classes[row, column] == FULL)).all()


@thorough
@given(number=any_numbers, len_q=lengths, len_k=lengths, size=st.integers(1, 20))
def test_intervals_of_numbers(number: sympy.Basic, len_q: int, len_k: int, size: int) -> None:
    note(to_text(number))
    first = np.arange(0, len_q, size)[:, None]
    boxes = {
        ops.QUERY: (first, np.minimum(first + size, len_q) - 1), ops.KEY: (0, len_k - 1),
        ops.LEN_Q: (len_q, len_q), ops.LEN_K: (len_k, len_k),
    }  # fmt: skip
    values = by_brute_force(number, len_q, len_k)
    interval = interval_of(number, boxes, CAPTURES)
    low, high, nan = (np.broadcast_to(part, first.shape) for part in (interval.low, interval.high, interval.nan))
    for row, start in enumerate(first[:, 0]):
        found = values[start : start + size]
        assert nan[row, 0] or not np.isnan(found).any()
        found = found[~np.isnan(found)]
        assert (low[row, 0] <= found).all() and (found <= high[row, 0]).all()


# Few distinct values, so that ties occur: zeros of both signs, NaN, infinities, divisors and shifts.
odd_floats = st.lists(
    st.one_of(st.sampled_from([0.0, -0.0, np.nan, np.inf, -np.inf, 1.0, -1.0, 2.0]), st.floats(-20, 20, width=32)),
    min_size=1, max_size=6,
)  # fmt: skip
odd_integers = st.lists(st.one_of(st.integers(-3, 4), st.sampled_from([29, 30, 31, 32])), min_size=1, max_size=4)
FLOATS = (ops.Add, ops.Sub, ops.Mul, ops.Divide, ops.Minimum, ops.Maximum, ops.FloorDiv, ops.FloorMod)
INTEGERS = (ops.Mul, ops.FloorDiv, ops.FloorMod, ops.ShiftLeft, ops.ShiftRight, ops.BitAnd, ops.BitXor)
FUNCTIONS = (ops.Sin, ops.Cos, ops.Exp, ops.Log, ops.Sqrt, ops.Tanh, ops.Abs, ops.Floor, ops.Neg)


def assert_sound(made: sympy.Basic, captures: dict[str, np.ndarray]) -> None:
    """The bounds of a number contain each of its values, and claims about its comparisons hold for each."""
    sizes = {ops.QUERY: len(captures["a"]), ops.KEY: len(captures["b"])}
    boxes = {symbol: (0, size - 1) for symbol, size in sizes.items()}
    values = {ops.QUERY: np.arange(sizes[ops.QUERY])[:, None], ops.KEY: np.arange(sizes[ops.KEY])}
    whole = ops.ToInt(made)
    quotient = ops.Divide(sympy.Float(1.0), made)
    for number in (made, whole, quotient):
        found, right = interval_of(number, boxes, captures), evaluate(number, values, captures)
        assert found.nan or not np.isnan(right).any(), number
        right = right[~np.isnan(right)]
        assert (found.low <= right).all() and (right <= found.high).all(), number
    for predicate in (ops.Less(quotient, sympy.Float(0.0)), ops.Not(ops.Less(quotient, sympy.Float(0.0)))):
        kind, holds = int(classify(predicate, boxes, captures)), evaluate(predicate, values, captures)
        assert kind == PARTIAL or (holds == (kind == FULL)).all(), predicate


@settings(thorough, max_examples=EXAMPLES // 3)
@given(a=odd_floats, b=odd_floats)
def test_intervals_of_odd_floats(a: list[float], b: list[float]) -> None:
    left, right = (
        ops.Load(ops.Capture(name, "float32", 1), index) for name, index in (("a", ops.QUERY), ("b", ops.KEY))
    )
    captures = {"a": np.array(a, np.float32), "b": np.array(b, np.float32)}
    for made in (*(kind(left, right) for kind in FLOATS), *(kind(left) for kind in FUNCTIONS)):
        assert_sound(made, captures)


@settings(thorough, max_examples=EXAMPLES // 3)
@given(a=odd_integers, b=odd_integers)
def test_intervals_of_odd_integers(a: list[int], b: list[int]) -> None:
    left, right = (ops.Load(ops.Capture(name, "int32", 1), index) for name, index in (("a", ops.QUERY), ("b", ops.KEY)))
    for kind in INTEGERS:
        assert_sound(kind(left, right), {"a": np.array(a, np.int32), "b": np.array(b, np.int32)})


@thorough
@given(predicate=any_predicates, len_q=lengths, len_k=lengths, rows=st.integers(1, 20), columns=st.integers(1, 20))
def test_tile_maps(predicate: sympy.Basic, len_q: int, len_k: int, rows: int, columns: int) -> None:
    """Never wrong, and exact where the map does not come from a range."""
    note(to_text(predicate))
    found = tile_map(predicate, (rows, columns), len_q, len_k, captures=CAPTURES)
    holds = by_brute_force(predicate, len_q, len_k)
    exact = key_range(predicate) is None
    assert found.classes.shape == (1, 1, -(-len_q // rows), -(-len_k // columns))
    for row, column in np.ndindex(found.classes.shape[2:]):
        tile = holds[row * rows : (row + 1) * rows, column * columns : (column + 1) * columns]
        overhangs = (column + 1) * columns > len_k
        expected = EMPTY if not tile.any() else FULL if tile.all() and not overhangs else PARTIAL
        assert found.classes[0, 0, row, column] in ({expected} if exact else {expected, PARTIAL})
