"""Named masks and scores against plain loops; their names and combinations."""

import math
import operator

import numpy as np
import pytest
import sympy

import flashgen as fg
from flashgen.errors import SpecError
from flashgen.language import masks, scores
from flashgen.language import operations as ops
from flashgen.language.evaluate import evaluate
from flashgen.language.operations import BATCH, HEAD, KEY, LEN_K, LEN_Q, QUERY, SCORE


def grid(expression, len_q=6, len_k=9, batch=2, heads=3, score=None, **captures):
    """Evaluates the expression at all indices, as (batch, heads, len_q, len_k)."""
    shape = (batch, heads, len_q, len_k)
    b, h, q, k = np.ogrid[tuple(slice(n) for n in shape)]
    values = {BATCH: b, HEAD: h, QUERY: q, KEY: k, LEN_Q: len_q, LEN_K: len_k}
    if score is not None:
        values[SCORE] = score
    return np.broadcast_to(evaluate(expression, values, captures), shape)


def loops(function, len_q=6, len_k=9, batch=2, heads=3):
    return np.array([[[[function(b, h, q, k) for k in range(len_k)] for q in range(len_q)] for h in range(heads)]
                     for b in range(batch)])  # fmt: skip


rng = np.random.default_rng(3)
IDS = rng.integers(0, 3, (2, 9))
LAYOUT = rng.random((2, 3, 3, 3)) < 0.5
BITS = rng.integers(0, 64, (2, 6, 1))

MASKS = [
    ("full()", fg.full(), lambda b, h, q, k: True, {}),
    ("causal()", fg.causal(), lambda b, h, q, k: k <= q + 3, {}),
    ("causal(align='top_left')", fg.causal("top_left"), lambda b, h, q, k: k <= q, {}),
    ("sliding_window(2)", fg.sliding_window(2), lambda b, h, q, k: q + 1 <= k <= q + 3, {}),
    ("sliding_window(2, 1)", fg.sliding_window(2, 1), lambda b, h, q, k: q + 1 <= k <= q + 4, {}),
    (
        "sliding_window(0, 2, align='top_left')",
        fg.sliding_window(0, 2, align="top_left"),
        lambda b, h, q, k: q <= k <= q + 2,
        {},
    ),
    (
        "sliding_window(Scalar('left', 'int32'))",
        fg.sliding_window(fg.Scalar("left")),
        lambda b, h, q, k: q + 3 - 2 <= k <= q + 3,
        {"left": 2},
    ),
    (
        "dilated_window(4, 2)",
        fg.dilated_window(4, 2),
        lambda b, h, q, k: abs(q + 3 - k) <= 4 and (q + 3 - k) % 2 == 0,
        {},
    ),
    ("prefix_lm(4)", fg.prefix_lm(4), lambda b, h, q, k: k < 4 or k <= q + 3, {}),
    (
        "prefix_lm(Tensor('prefix', 'int32', ndim=1))",
        fg.prefix_lm(fg.Tensor("prefix", "int32", 1)),
        lambda b, h, q, k: k < (5, 7)[b] or k <= q + 3,
        {"prefix": np.array([5, 7], np.int32)},
    ),
    (
        "document('ids')",
        fg.document("ids"),
        lambda b, h, q, k: IDS[0, q] == IDS[0, k],
        {"ids": IDS[0].astype(np.int32)},
    ),
    (
        "document(Tensor('ids', 'int64', ndim=2))",
        fg.document(fg.Tensor("ids", "int64", 2)),
        lambda b, h, q, k: IDS[b, q] == IDS[b, k],
        {"ids": IDS},
    ),
    (
        "padding('lengths')",
        fg.padding("lengths"),
        lambda b, h, q, k: k < (5, 0)[b],
        {"lengths": np.array([5, 0], np.int32)},
    ),
    (
        "padding(Tensor('lengths', 'int64', ndim=1), side='left')",
        fg.padding(fg.Tensor("lengths", "int64", 1), side="left"),
        lambda b, h, q, k: k >= 9 - (5, 0)[b],
        {"lengths": np.array([5, -(2**63)])},
    ),
    (
        "block_sparse('layout', 2, 3)",
        fg.block_sparse("layout", 2, 3),
        lambda b, h, q, k: LAYOUT[0, 0, q // 2, k // 3],
        {"layout": LAYOUT[0, 0]},
    ),
    (
        "block_sparse(Tensor('layout', 'uint8', ndim=3), 2, 3)",
        fg.block_sparse(fg.Tensor("layout", "uint8", 3), 2, 3),
        lambda b, h, q, k: LAYOUT[0, h, q // 2, k // 3],
        {"layout": LAYOUT[0].astype(np.uint8) * 7},
    ),
    (
        "block_sparse(Tensor('layout', 'bool', ndim=4), 2, 3)",
        fg.block_sparse(fg.Tensor("layout", "bool", 4), 2, 3),
        lambda b, h, q, k: LAYOUT[b, 0, q // 2, k // 3],
        {"layout": LAYOUT[:, :1]},
    ),
    (
        "tree('bits')",
        fg.tree("bits"),
        lambda b, h, q, k: k < 3 or BITS[b, q, 0] >> (k - 3) & 1,
        {"bits": BITS.astype(np.int32)},
    ),
    (
        "tree(Tensor('bits', 'int32', ndim=2))",
        fg.tree(fg.Tensor("bits", "int32", 2)),
        lambda b, h, q, k: k < 3 or BITS[1, q, 0] >> (k - 3) & 1,
        {"bits": BITS[1].astype(np.int32)},
    ),
]


@pytest.mark.parametrize(("name", "mask", "expected", "captures"), MASKS, ids=[row[0] for row in MASKS])
def test_named_masks(name, mask, expected, captures):
    assert mask.name == str(mask) == name
    assert np.array_equal(grid(mask.expression, **captures), loops(expected))
    assert [capture.name for capture in mask.captures] == sorted(captures)
    assert fg.parse_mask(name) == mask


SCORES = [
    ("alibi(16)", fg.alibi(16), lambda s, b, h, q, k: s + 2 ** (-8 * (h + 1) / 16) * (k - q), {}),
    (
        "alibi('slopes')",
        fg.alibi("slopes"),
        lambda s, b, h, q, k: s + (0.5, 0.25, 0.125)[h] * (k - q),
        {"slopes": np.array([0.5, 0.25, 0.125], np.float32)},
    ),
    (
        "alibi(Tensor('slopes', 'bfloat16', ndim=2, grad=True))",
        fg.alibi(fg.Tensor("slopes", "bf16", 2, grad=True)),
        lambda s, b, h, q, k: s + 0.5 * (k - q),
        {"slopes": np.full((1, 1), 0.5)},
    ),
    ("softcap(30)", fg.softcap(30), lambda s, b, h, q, k: 30 * math.tanh(s / 30), {}),
    ("softcap(0.5)", fg.softcap(np.float32(0.5)), lambda s, b, h, q, k: 0.5 * math.tanh(s / 0.5), {}),
    (
        "softcap(Scalar('cap', 'float32'))",
        fg.softcap(fg.Scalar("cap", "float32")),
        lambda s, b, h, q, k: 2 * math.tanh(s / 2),
        {"cap": 2},
    ),
    (
        "relative_bias('table', 2)",
        fg.relative_bias("table", 2),
        lambda s, b, h, q, k: s + 10 * h + min(max(k - q, -2), 2),
        {"table": (np.arange(3)[:, None] * 10 + np.arange(-2, 3)).astype(np.float32)},
    ),
    (
        "relative_bias(Tensor('table', 'float32', ndim=1), Scalar('far', 'int32'))",
        fg.relative_bias(fg.Tensor("table", "float32", 1), fg.Scalar("far")),
        lambda s, b, h, q, k: s + min(max(k - q, -2), 2),
        {"table": np.arange(-2.0, 3.0), "far": 2},
    ),
    (
        "softcap(30)(alibi(16))",
        fg.softcap(30)(fg.alibi(16)),
        lambda s, b, h, q, k: 30 * math.tanh((s + 2 ** (-8 * (h + 1) / 16) * (k - q)) / 30),
        {},
    ),
]


@pytest.mark.parametrize(("name", "score", "expected", "captures"), SCORES, ids=[row[0] for row in SCORES])
def test_named_scores(name, score, expected, captures):
    assert score.name == str(score) == name
    given = rng.standard_normal((2, 3, 6, 9)) * 20
    got = grid(score.expression, score=given, **captures)
    assert got == pytest.approx(loops(lambda b, h, q, k: expected(given[b, h, q, k], b, h, q, k)), rel=1e-7)
    assert fg.parse_score(name) == score


@pytest.mark.parametrize(("table", "module"), [(MASKS, masks), (SCORES, scores)], ids=["masks", "scores"])
def test_every_named_variant_is_in_the_tables_above(table, module):
    missing = set(module.__all__) - {row[0].partition("(")[0] for row in table}
    assert not missing, "add a row: printed form, call, meaning by plain loops, captures"


def near(b, h, q, k):
    return abs(q - k) <= 1


def test_masks_combine_with_masks_and_functions():
    names = {"&": operator.and_, "|": operator.or_, "^": operator.xor}
    causal, a, b = (
        fg.causal("top_left"),
        np.tril(np.ones((6, 9), bool)),
        abs(np.subtract.outer(range(6), range(9))) <= 1,
    )
    for symbol, combine in names.items():
        for mask, name in [
            (combine(causal, near), f"causal(align='top_left') {symbol} near"),
            (combine(near, causal), f"near {symbol} causal(align='top_left')"),
        ]:
            assert mask.name == name
            assert np.array_equal(grid(mask.expression)[0, 0], combine(a, b))
    assert np.array_equal(grid((~causal).expression)[0, 0], ~a)


def test_names_have_the_necessary_parentheses():
    a, b, c = fg.full(), fg.causal(), fg.sliding_window(3)
    for mask, name in [
        (a & b & c, "full() & causal() & sliding_window(3)"), (a & (b & c), "full() & (causal() & sliding_window(3))"),
        ((a | b) & c, "(full() | causal()) & sliding_window(3)"), (a | b & c, "full() | causal() & sliding_window(3)"),
        (~(a & b), "~(full() & causal())"), (~a & b, "~full() & causal()"), (~~b, "~~causal()"),
        (a ^ b | c, "full() ^ causal() | sliding_window(3)"), (a ^ (b | c), "full() ^ (causal() | sliding_window(3))"),
    ]:  # fmt: skip
        assert mask.name == name
        assert fg.parse_mask(name) == mask


def test_masks_can_be_called_in_traced_functions():
    causal = fg.causal()
    swapped = fg.trace_mask(lambda b, h, q, k: causal(b, h, k, q))
    assert swapped.expression == ops.LessEqual(QUERY, ops.Add(KEY, ops.Sub(LEN_K, LEN_Q)))
    first = fg.trace_mask(lambda b, h, q, k: causal(b, h, q // 2, 0) & near(b, h, q, k))
    assert np.array_equal(grid(first.expression)[0, 0], grid(fg.trace_mask(near).expression)[0, 0])
    with pytest.raises(SpecError, match="index q must be an integer, got float"):
        fg.trace_mask(lambda b, h, q, k: causal(b, h, q / 2, k))
    with pytest.raises(SpecError, match="neither true nor false"):
        bool(causal)
    nothing_yet = fg.trace_score(lambda s, b, h, q, k: fg.where(causal(b, h, q, k), s, -float("inf")))
    assert grid(nothing_yet.expression, score=1.0)[0, 0, 0, 8] == -np.inf


def test_scores_compose_with_functions():
    def doubled(score, b, h, q, k):
        return score * 2

    capped = fg.softcap(30)(doubled)
    assert capped.name == "softcap(30)(doubled)"
    inside = fg.trace_score(lambda s, b, h, q, k: fg.softcap(30)(doubled(s, b, h, q, k), b, h, q, k))
    assert inside.expression == capped.expression
    for arguments in [(), (1, 2), (fg.causal(),), (3,)]:
        with pytest.raises(SpecError):
            fg.softcap(30)(*arguments)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: fg.causal("bottom"), "align='bottom'.*top_left"),
    (lambda: fg.sliding_window(-1), "left=-1 must be from 0"),
    (lambda: fg.sliding_window(1.5), "left=1.5 must be an integer"), (lambda: fg.sliding_window(True), "left=True"),
    (lambda: fg.sliding_window(1, fg.Scalar("r", "float32")), "right=.*int32 Scalar"),
    (lambda: fg.dilated_window(4, 0), "dilation=0 must be from 1"), (lambda: fg.prefix_lm(2**31), "prefix"),
    (lambda: fg.prefix_lm(fg.Tensor("p", "float32", 1)), "ndim 1"),
    (lambda: fg.document([0, 1]), "must be an array, or a Tensor"),
    (lambda: fg.document(fg.Tensor("i", "int32", 3)), "ndim 1"), (lambda: fg.document("q"), "capture name 'q'"),
    (lambda: fg.block_sparse("layout", 0, 8), "block_q=0"), (lambda: fg.block_sparse("layout", 8, 1.0), "block_k=1.0"),
    (lambda: fg.padding(fg.Tensor("l", "int32", 2)), "ndim 1"), (lambda: fg.padding("l", "middle"), "side='middle'"),
    (lambda: fg.block_sparse(fg.Tensor("l", "bool", 1), 8, 8), "ndim 2, 3 or 4"),
    (lambda: fg.block_sparse("l", fg.Scalar("s"), 8), "must be an integer"), (lambda: fg.alibi(0), "number of heads"),
    (lambda: fg.alibi(2.5), "number of heads"), (lambda: fg.alibi(fg.Tensor("s", "int32", 1)), "floating Tensor"),
    (lambda: fg.softcap(0), "finite and > 0"), (lambda: fg.softcap(math.nan), "finite"),
    (lambda: fg.softcap("3"), "cap='3'"),
    (lambda: fg.softcap(fg.Scalar("c")), "float32"), (lambda: fg.relative_bias("t", -1), "max_distance=-1"),
    (lambda: fg.relative_bias(fg.Tensor("t", "float32", 3), 4), "table"), (lambda: fg.relative_bias(3, 4), "table=3"),
    (lambda: fg.causal() & 3, "right side of &=3"), (lambda: fg.causal() & fg.softcap(3), "score function"),
    (lambda: fg.Mask("a*/b", sympy.true), "name"), (lambda: fg.Mask("m", ops.Add(QUERY, 1)), "must be boolean"),
    (lambda: fg.Mask("m", ops.Less(SCORE, 1)), "reads the score"),
    (lambda: fg.Mask("m", QUERY < KEY), "not an expression"),
    (lambda: fg.Score("s", ops.Add(QUERY, 1)), "must be a float"), (lambda: fg.Mask("m\n", sympy.true), "name"),
])  # fmt: skip
def test_refusals(make, message):
    with pytest.raises(SpecError, match=message):
        make()


def test_functions_name_their_masks():
    class Callable:
        def __call__(self, b, h, q, k):
            return q > k

    def маска(b, h, q, k):
        return q > k

    import functools

    def window(size, b, h, q, k):
        return q - k < size

    assert fg.trace_mask(Callable()).name == "Callable"
    assert fg.trace_mask(маска).name == "mask"
    assert fg.trace_mask(functools.partial(window, 3)).name == "window"
    assert fg.trace_mask(lambda b, h, q, k: q > k).name == "mask"
