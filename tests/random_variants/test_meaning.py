"""The reference of random cases, checked by hand, with Python's numbers element by element, and by differences."""

from __future__ import annotations

import numpy as np
import pytest

from flashgen import reference
from random_variants.meaning import Meaning, Sizes
from random_variants.standard import Call, Unjudged, random_bytes
from random_variants.terms import Declared, Term, integer, number

SIZES = Sizes(2, 3, 7, 11)
Q, K = Term("q"), Term("k")


def of(term: Term, **captures: object) -> np.ndarray:
    return np.broadcast_to(Meaning(SIZES, captures).of(term), SIZES)


PYTHON = {
    "//": lambda q, k: q // k if k else 0,
    "%": lambda q, k: q % k if k else 0,
    "<<": lambda q, k: q << min(max(k, 0), 31),
    ">>": lambda q, k: q >> min(max(k, 0), 31),
    "^": lambda q, k: q ^ k,
    "&": lambda q, k: q & k,
    "|": lambda q, k: q | k,
    "-": lambda q, k: q - k,
    "*": lambda q, k: q * k,
    "min": min,
    "max": max,
}


@pytest.mark.parametrize("op", PYTHON)
@pytest.mark.parametrize("shift", [0, 3, -40])
def test_integers_are_pythons(op: str, shift: int) -> None:
    left, right = Term("-", Q, integer(3)), Term("+", K, integer(shift))
    found = of(Term(op, left, right))[0, 0]
    expected = [[PYTHON[op](q - 3, k + shift) for k in range(SIZES.len_k)] for q in range(SIZES.len_q)]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("term", "value"),
    [
        (Term("+", K, integer(2**31 - 5)), 2**31 + 5),
        (Term("neg", integer(-(2**31))), 2**31),
        (Term("<<", Term("*", K, integer(2**31 - 1)), integer(3)), 80 * (2**31 - 1)),
        (Term("*", Term("*", integer(2**30), integer(2**30)), K), (10 * 2**60 + 2**63) % 2**64 - 2**63),
        (Term("+", Term("scalar", "ids"), K), -(2**63) + 9),
    ],
)
def test_integers_are_exact_to_64_bits_and_wrap(term: Term, value: int) -> None:
    assert int(of(term, ids=np.int64(2**63 - 1))[0, 0, 0, 10]) == value


def test_deciding_floats_of_a_score_are_float32() -> None:
    third = Term("*", Q, number(1 / 3))
    meaning = Meaning(SIZES, {}, np.float64)
    assert meaning.of(Term("floor", Term("*", Q, number(0.1 / 0.3)))).dtype == np.float64
    assert (meaning.of(Term("==", third, number(1.0)))[0, 0, 3] == (np.float32(3) * np.float32(1 / 3) == 1)).all()
    assert meaning.of(third)[0, 0, 1, 0] == 1 / 3


def test_named_masks_count_in_integers_of_any_size() -> None:
    window = Term("sliding_window", Term("scalar", "width"), integer(2**31 - 1), "top_left")
    assert of(window, width=2**31 - 1).all()
    assert not of(Term("sliding_window", Term("scalar", "width"), integer(0), "top_left"), width=-(2**31)).any()


def test_floats_of_a_mask_are_float32() -> None:
    """q · 1.1 and k · 0.1 are rounded separately: 3 · 1.1 is more than 33 · 0.1 in float32, and not in float64."""
    difference = Term("-", Term("*", Q, number(1.1)), Term("*", K, number(0.1)))
    positive = Meaning(Sizes(1, 1, 4, 34), {}).of(Term(">", difference, number(0.0)))
    assert positive[0, 0, 3, 33] == (np.float32(3) * np.float32(1.1) > np.float32(33) * np.float32(0.1))
    assert of(Term("==", Term("floor", Term("/", Term("*", integer(41), K), integer(41))), K)).all()


def test_loads_are_clamped_and_conversions_saturate() -> None:
    load = Term("load", "ids", Term("-", Q, integer(2)))
    np.testing.assert_array_equal(of(load, ids=np.array([5, 6, 7], np.int8))[0, 0, :, 0], [5, 5, 5, 6, 7, 7, 7])
    values = {"a": np.array([np.nan, np.inf, -np.inf, 2.9, -2.9, 3e9, -3e9], np.float32)}
    whole = of(Term("to_int", Term("load", "a", Q)), **values)[0, 0, :, 0]
    assert whole.tolist() == [0, 2**31 - 1, -(2**31), 2, -2, 2**31 - 1, -(2**31)]


def test_dropout_bytes_equal_the_documented_ones() -> None:
    sizes = Sizes(2, 3, 37, 70)
    kept = random_bytes(2**40 + 7, 5, sizes) < reference.threshold(0.3)
    np.testing.assert_array_equal(kept, reference.dropout_keep(2**40 + 7, 5, *sizes, 0.3))


SCORE = Term("score")
LOGARITHM = Term("log", Term("+", Term("abs", SCORE), number(1.0)))
GROWTH = Term("exp2", Term("min", SCORE, number(0.5)))
SCORES = {
    "softcap": Term("softcap", SCORE, number(2.0), "accurate"),
    "table": Term("relative_bias", Term("alibi_table", "slopes", SCORE), "table", integer(2)),
    "gain": Term("*", GROWTH, Term("load", "slopes", Term("h"))),
    "where": Term("where", Term("<", Q, K), Term("tanh", SCORE), LOGARITHM),
    "masked": Term("where", Term("<", Q, K), SCORE, number(-np.inf)),
}
DECLARED = {"slopes": Declared("float32", 1, True), "table": Declared("float32", 2, True)}


def call_of(score: Term, **changed: np.ndarray) -> Call:
    random = np.random.default_rng(3)
    arrays = {
        "q": random.normal(size=(1, 4, 5, 8)), "k": random.normal(size=(1, 2, 6, 8)),
        "v": random.normal(size=(1, 2, 6, 8)), "slopes": random.uniform(0.1, 1, 4), "table": random.normal(size=(4, 5)),
    } | changed  # fmt: skip
    allowed = (np.arange(6) <= np.arange(5)[:, None] + 2)[None, None]
    captures = {name: arrays.pop(name) for name in ("slopes", "table")}
    return Call(
        **arrays, scale=0.3, allowed=allowed, score=score, captures=captures, declared=DECLARED, dropout=(0.2, 1, 2)
    )


ZEROS = np.array([0.0, -0.0, 0.0, -0.0, np.nan, 0.0, np.nan], np.float32)
OTHERS = np.array([0.0, 0.0, -0.0, -0.0, -0.0, np.nan, np.nan], np.float32)


@pytest.mark.parametrize(("op", "signs"), [("max", [0, 0, 0, 1, 1, 0]), ("min", [0, 1, 1, 1, 1, 0])])
@pytest.mark.parametrize("real", [np.float32, np.float64, np.complex128])
def test_minimum_and_maximum_of_zeros_and_nan(op: str, signs: list[int], real: type) -> None:
    """-0.0 is less than 0.0, and NaN is ignored beside a number."""
    term = Term(op, Term("load", "a", Q), Term("load", "b", Q))
    found = np.real(Meaning(SIZES, {"a": ZEROS, "b": OTHERS}, real).of(term))[0, 0, :, 0]
    assert np.isnan(found).tolist() == [False] * 6 + [True]
    assert np.signbit(found)[:6].tolist() == signs


@pytest.mark.parametrize(
    ("term", "slope"),
    [
        (Term("max", SCORE, number(0.0)), 0.5),
        (Term("min", number(0.0), SCORE), 0.5),
        (Term("min", Term("*", SCORE, number(3.0)), SCORE), 2.0),
        (Term("max", SCORE, number(-1.0)), 1.0),
        (Term("abs", SCORE), 0.0),
    ],
)
def test_slopes_at_ties(term: Term, slope: float) -> None:
    assert Meaning(Sizes(1, 1, 1, 1), {}, np.float64, np.zeros((1,) * 4)).derivative(term, SCORE).item() == slope


@pytest.mark.parametrize("name", SCORES)
def test_gradients_equal_finite_differences(name: str) -> None:
    """Captures are read in float32, so steps are large powers of two."""
    score = SCORES[name]
    random = np.random.default_rng(4)
    d_out, d_lse = random.normal(size=(1, 4, 5, 8)), random.normal(size=(1, 4, 5))

    def value(call: Call) -> float:
        lse = np.where(call.lse == -np.inf, 0, call.lse)
        return float((call.out * d_out).sum() + (lse * d_lse).sum())

    call = call_of(score)
    gradients = call.gradients(d_out, d_lse)
    for array in ("q", "k", "v", "slopes", "table"):
        whole = call.captures[array] if array in DECLARED else getattr(call, array)
        gradient = gradients[f"d{array}" if len(array) == 1 else f"d_{array}"]
        base = whole.astype(np.float32).astype(np.float64) if array in DECLARED else whole
        for place in list(np.ndindex(whole.shape))[:: max(1, whole.size // 7)]:
            step = 2.0**-12 if array in DECLARED else 1e-5
            up, down = base.copy(), base.copy()
            up[place] += step
            down[place] -= step
            change = value(call_of(score, **{array: up})) - value(call_of(score, **{array: down}))
            np.testing.assert_allclose(
                gradient[place], change / (2 * step), atol=2e-5, rtol=2e-4, err_msg=f"{array} {place}"
            )


def test_scores_without_a_value_are_not_judged() -> None:
    with pytest.raises(Unjudged):
        _ = call_of(Term("+", SCORE, number(np.inf))).scores


@pytest.mark.parametrize("name", SCORES)
def test_gradient_uncertainty_at_kinks(name: str) -> None:
    """None without kinks; roundings away from them; at kinks the difference to the other side's slope."""
    random = np.random.default_rng(4)
    d_out = random.normal(size=(1, 4, 5, 8))
    call = call_of(SCORES[name])
    gradients, unsure = call.gradients(d_out, None), call.unsure(d_out, None)
    kinked = {"gain", "where"}
    assert bool(unsure) == (name in kinked)
    for each, off in unsure.items():
        assert (off >= 0).all() and off.max() <= 1e-4 * np.abs(gradients[each]).max()
    if unsure:
        at_kink = Term("abs", Term("tanh", Term("*", SCORE, number(1e-8))))
        call = call_of(at_kink)
        gradients, unsure = call.gradients(d_out, None), call.unsure(d_out, None)
        assert all((unsure[each] >= np.abs(gradients[each])).all() for each in ("dq", "dk"))
