"""Ranges of named and similar masks: tight compared with brute force, and printed as written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sympy

import flashgen as fg
from flashgen.analysis.closed_forms.tile_ranges import TileRange, evaluate_range, key_range, query_range
from flashgen.analysis.expression_text import to_text
from flashgen.language import operations as ops
from flashgen.language.evaluate import evaluate
from flashgen.language.modifiers import trace_mask

SCALARS = {"window": 50, "prefix": 70}
window, prefix = fg.Scalar("window", "int32"), fg.Scalar("prefix", "int32")


def batchify(inner: Callable[..., Any], size: int) -> Callable[..., Any]:
    return lambda b, h, q, k: (q // size == k // size) & inner(b, h, q % size, k % size)


def plain_causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


# fmt: off
ONE_RUN: dict[str, Any] = {
    "full": fg.full(),
    "nothing": ~fg.full(),
    "causal": fg.causal(),
    "causal, top left": fg.causal("top_left"),
    "anti-causal": ~fg.causal(),
    "strictly causal": lambda b, h, q, k: (q >= k) & (q != k),
    "window": fg.sliding_window(100),
    "window on both sides": fg.sliding_window(30, 45, align="top_left"),
    "window of no width": fg.sliding_window(0),
    "run-time window": fg.sliding_window(window, window),
    "distance": lambda b, h, q, k: (q >= k) & (abs(q - k) <= 70),
    "prefix": fg.prefix_lm(100),
    "prefix, top left": fg.prefix_lm(100, align="top_left"),
    "run-time prefix": fg.prefix_lm(prefix),
    "prefix in a window": lambda b, h, q, k: ((k < 100) | (q >= k)) & (q - k <= 150),
    "dilated": fg.dilated_window(100, 4),
    "dilated causal": fg.causal() & fg.dilated_window(100, 4),
    "blocks": lambda b, h, q, k: q // 100 == k // 100,
    "batched causal": batchify(plain_causal, 48),
    "batched causal window": batchify(lambda b, h, q, k: (q >= k) & (q - k <= 20), 100),
    "chunks looking back": lambda b, h, q, k: (q >= k) & (q // 64 - k // 64 <= 1),
    "slower keys": lambda b, h, q, k: 4 * k <= q,
    "faster keys": lambda b, h, q, k: k // 4 <= q,
    "rows of a prefix": lambda b, h, q, k: (q < 100) & (q >= k),
    "in proportion": lambda b, h, q, k: k <= q * fg.len_k // fg.len_q,
    "clamped": lambda b, h, q, k: k < fg.clamp(q, 40, fg.len_k - 10),
    "every other key": lambda b, h, q, k: k % 2 == 0,
    "not a run of keys' complement": ~fg.prefix_lm(100),
}
# fmt: on
GLOBAL_KEYS = trace_mask(lambda b, h, q, k: (abs(q - k) <= 40) | (k < 4), "global_keys")
GLOBAL_QUERIES = trace_mask(lambda b, h, q, k: (abs(q - k) <= 40) | (q < 4), "global_queries")
LENGTHS = ((1, 1), (257, 257), (300, 170), (170, 300), (60, 400), (400, 60))


def expression_of(mask: Any) -> sympy.Basic:
    return mask.expression if isinstance(mask, fg.Mask) else trace_mask(mask, "mask").expression


def holds_by_brute_force(
    expression: sympy.Basic, len_q: int, len_k: int, captures: dict[str, Any] = SCALARS, batch: int = 0
) -> np.ndarray:
    values = {
        ops.QUERY: np.arange(len_q)[:, None], ops.KEY: np.arange(len_k), ops.LEN_Q: len_q, ops.LEN_K: len_k,
        ops.HEAD: 0, ops.BATCH: batch,
    }  # fmt: skip
    return np.broadcast_to(evaluate(expression, values, captures), (len_q, len_k))


def check(
    tile_range: TileRange,
    holds: np.ndarray,
    len_q: int,
    len_k: int,
    rows: int,
    columns: int,
    captures: dict[str, Any] = SCALARS,
    batch: int = 0,
) -> int:
    """Asserts soundness for every row of tiles, and that no empty tile within the range is visited.

    Returns the full tiles that are not recognized.
    """
    first = np.arange(0, len(holds), rows)
    last = np.minimum(first + rows, len(holds)) - 1
    missed = 0
    for start, begin, end, full_begin, full_end in zip(
        first, *evaluate_range(tile_range, first, last, len_q, len_k, captures, batch), strict=True
    ):
        tile = holds[start : start + rows]
        attended = np.flatnonzero(tile.any(axis=0))
        assert begin >= 0 and end <= tile.shape[1]
        assert not attended.size or (begin <= attended[0] and attended[-1] < end)
        assert tile[:, full_begin : max(full_begin, full_end)].all()
        for left in range(0, tile.shape[1], columns):
            right = min(left + columns, tile.shape[1])
            visited = begin < right and left < end and begin < end
            assert visited == tile[:, left:right].any(), "an empty tile is visited, or a tile is missed"
            missed += bool(tile[:, left:right].all() and not (full_begin <= left and right <= full_end))
    return missed


@pytest.mark.parametrize("name", ONE_RUN)
@pytest.mark.parametrize("transposed", [False, True], ids=["keys", "queries"])
def test_every_empty_tile_is_proven(name: str, transposed: bool) -> None:
    expression = expression_of(ONE_RUN[name])
    tile_range = (query_range if transposed else key_range)(expression)
    if transposed and name in ("in proportion", "clamped"):
        assert tile_range is None
        return
    assert tile_range is not None
    for len_q, len_k in LENGTHS:
        holds = holds_by_brute_force(expression, len_q, len_k)
        missed = check(tile_range, holds.T if transposed else holds, len_q, len_k, 64, 32)
        assert missed == 0 or tile_range.full_begin == tile_range.full_end, "a full tile is not recognized"


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (fg.full(), "begin = 0, end = len_k, full_begin = 0, full_end = len_k"),
        (~fg.full(), "begin = 0, end = 0, full_begin = 0, full_end = 0"),
        (
            fg.causal(),
            "begin = 0, end = min(len_k, q_last + len_k - len_q + 1), "
            "full_begin = 0, full_end = min(len_k, q_first + len_k - len_q + 1)",
        ),
        (
            fg.sliding_window(128, align="top_left"),
            "begin = max(0, q_first - 128), end = min(len_k, q_last + 1), "
            "full_begin = max(0, q_last - 128), full_end = min(len_k, q_first + 1)",
        ),
        (
            fg.sliding_window(window, align="top_left"),
            "begin = min(len_k, max(0, q_first - window)), end = min(len_k, q_last + 1), "
            "full_begin = min(len_k, max(0, q_last - window)), full_end = min(len_k, q_first + 1)",
        ),
        (
            fg.prefix_lm(100, align="top_left"),
            "begin = 0, end = min(len_k, max(100, q_last + 1)), "
            "full_begin = 0, full_end = min(len_k, max(100, q_first + 1))",
        ),
        (
            trace_mask(lambda b, h, q, k: k // 65536 < q, "slow keys"),
            "begin = 0, end = min(len_k, 65536 * q_last), full_begin = 0, full_end = min(len_k, 65536 * q_first)",
        ),
        (
            fg.sliding_window(3, 2**31 - 1, align="top_left"),
            "begin = max(0, q_first - 3), end = len_k, full_begin = max(0, q_last - 3), full_end = len_k",
        ),
        (
            trace_mask(batchify(plain_causal, 100), "batched"),
            "begin = 100 * (q_first // 100), end = min(len_k, q_last + 1), "
            "full_begin = 100 * (q_last // 100), full_end = min(len_k, q_first + 1)",
        ),
        (
            GLOBAL_QUERIES,
            "begin = where(q_first < 4, 0, max(0, q_first - 40)), "
            "end = where(q_first < 4, len_k, min(len_k, q_last + 41)), "
            "full_begin = where(q_last < 4, 0, max(0, q_last - 40)), "
            "full_end = where(q_last < 4, len_k, min(len_k, q_first + 41))",
        ),
    ],
    ids=lambda value: value.name if isinstance(value, fg.Mask) else "",
)
def test_bounds_read_as_written_by_hand(mask: fg.Mask, expected: str) -> None:
    assert str(key_range(mask.expression)) == expected


def test_transposed_bounds_read_as_written_by_hand() -> None:
    assert str(query_range(fg.causal("top_left").expression)) == (
        "begin = k_first, end = len_q, full_begin = k_last, full_end = len_q"
    )


@pytest.mark.parametrize(
    "mask",
    [
        fg.document("ids"),
        fg.document("ids") & fg.causal(),
        fg.block_sparse("layout", 64, 64),
        GLOBAL_KEYS,
        GLOBAL_KEYS & fg.causal(),
        lambda b, h, q, k: abs(q // 32 - k // 32) % 2 == 0,
        lambda b, h, q, k: (abs(q // 32 - k // 32) <= 1) & (abs(q % 32 - k % 32) <= 3),
        lambda b, h, q, k: k == 1000 * q,
        lambda b, h, q, k: (k >= q) & (k >= 200 - q) & (k < 150),
        lambda b, h, q, k: (q % 64 < 4) & (q >= k),
        lambda b, h, q, k: (h < 4) & (q >= k),
        lambda b, h, q, k: q - k <= 64 * (h + 1),
        lambda b, h, q, k: fg.to_float(q - k) * 0.5 < 10.0,
        lambda b, h, q, k: abs(q * k) < 100,
        lambda b, h, q, k: k <= q * q * q,  # may wrap
        lambda b, h, q, k: (k * 2**30 * 2**30 * 16) // 2**30 >= q,  # may wrap, although its affine form does not
        lambda b, h, q, k: (k // 2**30) // 2**30 >= q * 2**30,  # one of its bounds may wrap
    ],
)
def test_masks_without_a_range_need_lists(mask: Any) -> None:
    assert key_range(expression_of(mask)) is None


def test_global_keys_are_full_columns_in_the_backward() -> None:
    assert key_range(GLOBAL_KEYS.expression) is None
    tile_range = query_range(GLOBAL_KEYS.expression)
    assert tile_range is not None
    check(tile_range, holds_by_brute_force(GLOBAL_KEYS.expression, 300, 200).T, 300, 200, 64, 32)


def test_bounds_by_head_where_requested() -> None:
    expression = expression_of(lambda b, h, q, k: (q >= k) & (q - k <= 16 * (h + 1)))
    tile_range = key_range(expression, per_head=True)
    assert tile_range is not None
    assert to_text(tile_range.begin) == "max(0, q_first - 16 * h - 16)"
    begin = evaluate_range(tile_range, 100, 163, 500, 500, head=np.arange(3))[0]
    assert begin.tolist() == [84, 68, 52]


OF_SEQUENCES: dict[str, Any] = {
    "padding": fg.padding("lengths"),
    "padding on the left": fg.padding("lengths", side="left"),
    "padding, int64": fg.padding(fg.Tensor("lengths", "int64", 1)),
    "causal padding": fg.causal() & fg.padding("lengths"),
    "a window of padded keys": fg.sliding_window(40) & fg.padding("lengths", side="left"),
    "a prefix of each": fg.prefix_lm(fg.Tensor("lengths", "int32", 1)),
    "what the next has not": lambda b, h, q, k: (k >= LENGTHS_OF[b + 1]) & (k < 200),
    "queries, too": lambda b, h, q, k: (q < LENGTHS_OF[b]) & (k < LENGTHS_OF[b]),
    "one sequence of all": lambda b, h, q, k: (q >= k) & (b == 1),
}
LENGTHS_OF = fg.Tensor("lengths", "int32", 1)


@pytest.mark.parametrize("name", OF_SEQUENCES)
@pytest.mark.parametrize("made", [key_range, query_range])
def test_every_empty_tile_of_each_sequence_is_proven(name: str, made: Any) -> None:
    """Bounds read from an array per sequence, also below 0 and beyond the lengths."""
    expression = expression_of(OF_SEQUENCES[name])
    tile_range = made(expression)
    assert tile_range is not None and tile_range.depends_on(ops.BATCH)
    captures = {"lengths": np.array([37, 0, -5, 400, 129])}
    for len_q, len_k in ((257, 257), (300, 170), (60, 400)):
        for batch in range(5):
            holds = holds_by_brute_force(expression, len_q, len_k, captures, batch)
            check(tile_range, holds.T if made is query_range else holds, len_q, len_k, 64, 32, captures, batch)


def test_bounds_read_at_a_position_need_lists() -> None:
    starts = fg.Tensor("starts", "int32", 2)
    assert key_range(expression_of(lambda b, h, q, k: k >= starts[b, q])) is None


def test_the_captures_of_a_range() -> None:
    tile_range = key_range(fg.sliding_window(window).expression)
    assert tile_range is not None and [capture.name for capture in tile_range.captures] == ["window"]


def test_a_predicate_with_many_alternatives_is_not_solved() -> None:
    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        kept = q >= k
        for step in range(1, 12):
            kept = kept & ((q - k) != 3 * step)
        return kept

    assert key_range(expression_of(mask)) is None


# ---- masks in which arrays decide few keys


def test_the_prefix_of_a_tree_needs_no_mask() -> None:
    expected = {"begin": "0", "end": "len_k", "full_begin": "0", "full_end": "len_k - len_q"}
    for mask in (fg.tree("bits"), fg.tree(fg.Tensor("bits", "int32", 2)), fg.tree("bits") & fg.full()):
        found = key_range(mask.expression)
        assert found and {name: to_text(getattr(found, name)) for name in expected} == expected
    causal = key_range((fg.tree("bits") & fg.causal()).expression)
    assert causal and to_text(causal.full_end) == "len_k - len_q" and "q_last" in to_text(causal.end)


def not_forbidden(b: Any, h: Any, q: Any, k: Any) -> Any:
    """The complement of a tree: everything that its bits do not forbid."""
    token = k - (fg.len_k - fg.len_q)
    return ~((token >= 0) & (fg.Tensor("bits", "int32", 3)[b, q, token >> 5] >> (token & 31) & 1 != 0))


@pytest.mark.parametrize(("len_q", "len_k"), [(1, 40), (33, 33), (64, 200), (40, 25), (100, 101)])
@pytest.mark.parametrize("tree", [fg.tree("bits"), trace_mask(not_forbidden)], ids=str)
def test_ranges_of_a_tree_hold_for_any_bits(tree: Any, len_q: int, len_k: int) -> None:
    """Nothing outside the range is attended to and everything in the full part is, for tiles of queries and of keys."""
    random = np.random.default_rng(len_k)
    mask = tree.expression
    for bits in (random.integers(-(2**31), 2**31, (1, len_q, 4)), np.zeros((1, len_q, 4)), np.full((1, len_q, 4), -1)):
        q, k = np.ogrid[:len_q, :len_k]
        values = {ops.BATCH: 0, ops.QUERY: q, ops.KEY: k, ops.LEN_Q: len_q, ops.LEN_K: len_k}
        kept = np.broadcast_to(evaluate(mask, values, {"bits": bits.astype(np.int32)}), (len_q, len_k))
        for find, rows in ((key_range, kept), (query_range, kept.T)):
            found = find(mask)
            assert found
            for first in range(0, len(rows), 16):
                last = min(first + 16, len(rows)) - 1
                ends = evaluate_range(found, first, last, len_q, len_k)
                begin, end, full_begin, full_end = (max(int(each), 0) for each in ends)
                tile = rows[first : last + 1]
                assert not tile[:, :begin].any() and not tile[:, max(begin, end) :].any()
                assert tile[:, full_begin:full_end].all()


# fmt: off
LISTED: dict[str, Any] = {
    "documents": lambda b, h, q, k: IDS[q] == IDS[k],
    "documents behind a prefix": lambda b, h, q, k: (k < 100) | (IDS[q] == IDS[k]),
    "causal but for some": lambda b, h, q, k: (k <= q) & (IDS[k] != 0),
    "a tree but for some": lambda b, h, q, k: fg.tree("bits")(b, h, q, k) & (IDS[k] != 0),
    "one or the other": lambda b, h, q, k: (k < fg.len_k - 64) ^ (IDS[k] != 0),
    "a prefix that a call says": lambda b, h, q, k: (k < fg.len_k - prefix) | (IDS[k] != 0),
}
# fmt: on
IDS = fg.Tensor("ids", "int32", 1)


@pytest.mark.parametrize("name", LISTED)
def test_masks_in_which_arrays_decide_many_keys_need_lists(name: str) -> None:
    mask = trace_mask(LISTED[name]).expression
    assert key_range(mask) is None and query_range(mask) is None
