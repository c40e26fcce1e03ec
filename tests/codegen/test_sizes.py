"""Formulas over sizes: evaluated with numbers and printed as C++ with names, they agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen.codegen.costs import NAMED_WORK
from flashgen.codegen.formula_text import MEANINGS, cpp, english
from flashgen.codegen.sizes import NAMED_SIZES, SIZE_NAMES, Sizes, ceil_div, maximum, minimum, reciprocal, size_values

POSITIVE = st.integers(1, 10**4)
FOLLOWING: dict[str, Callable[[Sizes], Any]] = {
    "a quotient of a product": lambda s: s.batch * s.heads_q // 3,
    "a product of a quotient": lambda s: s.batch * (s.heads_q // 3),
    "a quotient by a product": lambda s: 10**9 // (2 * s.len_k * s.batch),
    "a quotient by a quotient": lambda s: s.len_q // (s.len_k // s.len_k),
    "a product of products": lambda s: 2 * (s.batch * s.heads_q) * (s.len_q * s.len_k),
    "a product by a product of a quotient": lambda s: s.batch * (s.len_q // s.len_k * s.heads_q),
    "a difference of a sum": lambda s: s.batch * s.heads_q * s.len_k + s.len_q - (s.batch + s.heads_kv) + s.len_k,
    "a product of sums": lambda s: (s.len_q + s.len_k) * (s.batch + s.heads_q),
    "rounded rows": lambda s: ceil_div(s.len_q, 64) * 64 // 16,
    "bounds": lambda s: maximum(minimum(s.batch * s.heads_q, s.multiprocessors), 1),
    "a reciprocal": lambda s: reciprocal(maximum(s.heads_per_kv // 2, 1)),
}


@pytest.mark.parametrize("following", FOLLOWING.values(), ids=FOLLOWING)
@given(numbers=st.tuples(POSITIVE, POSITIVE, POSITIVE, POSITIVE, POSITIVE), multiprocessors=POSITIVE)
def test_a_printed_formula_evaluates_to_the_numbers(
    following: Callable[[Sizes], Any], numbers: tuple[int, ...], multiprocessors: int
) -> None:
    batch, heads_kv, heads_per_kv, len_q, len_k = numbers
    sizes = Sizes(batch, heads_kv * heads_per_kv, heads_kv, len_q, len_k, multiprocessors=multiprocessors)
    names = {name: getattr(sizes, name) for name in (*SIZE_NAMES, "multiprocessors")}
    functions = {"ceil_div": lambda a, b: -(-a // b), "min": min, "max": max}
    text = cpp(following(NAMED_SIZES)).replace("/", "//")
    assert eval(text, {"__builtins__": {}}, names | functions) == following(sizes)


def test_sizes_without_heads_do_not_divide_by_zero() -> None:
    values = size_values(Sizes(0, 0, 0, 5, 5))
    assert values["heads_per_kv"] == 1 and values["kv_reciprocal"] == 2**31


def test_a_formula_in_english() -> None:
    work = NAMED_WORK
    flops = 512 * (work.batch * work.heads_q) * work.pairs * work.visited
    assert english(flops) == (
        "512 * batch * heads_q * (sum of len_q * len_k over the sequences) * (share of tiles visited)"
    )
    assert english(2 * ceil_div(work.len_q, 64)) == "2 * ceil(len_q / 64)"
    assert english(6 * work.count, {"count": "elements of slopes"}) == "6 * elements of slopes"
    assert english(7) == "7"


def test_every_size_has_a_meaning() -> None:
    assert {each.name for each in fields(NAMED_WORK)} | {"heads_per_kv"} == set(MEANINGS)
