"""Random cases print as Python and as JSON, and both say the same as the case."""

from __future__ import annotations

import pytest
from flashgen.verify.random import Case, Options, recipe_of

import flashgen as fg
from flashgen.errors import SpecError
from flashgen.language.serialize import node_to_data
from random_variants.terms import EVERYTHING, Declared, Term, captures_of, from_data, kind_of, text_of, to_data
from random_variants.tracing import Captures, mask_of, score_of

SEEDS = range(150)


def test_json_and_back() -> None:
    for seed in SEEDS:
        case = recipe_of(seed, Options())
        assert Case.from_json(case.to_json()) == case


def test_the_text_is_the_python_that_traces_to_the_same_mask() -> None:
    for seed in SEEDS:
        case = recipe_of(seed, Options())
        made = Captures(case.declared)
        names = {"fg": fg, **{name: made[name] for name in case.declared}}
        mask = eval(f"lambda b, h, q, k: {text_of(case.mask)}", names)
        traced = node_to_data(fg.trace_mask(mask).expression)
        assert traced == node_to_data(mask_of(case.mask, case.declared).expression)
        if case.score is not None:
            score = eval(f"lambda score, b, h, q, k: {text_of(case.score)}", names)
            traced = node_to_data(fg.trace_score(score).expression)
            assert traced == node_to_data(score_of(case.score, case.declared).expression)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"mask": ["eval", "1"]}', '{"mask": [["q"]]}', "null"])
def test_what_is_no_case_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="random case"):
        Case.from_json(text)


def test_a_number_of_pythons_own_is_refused() -> None:
    """flashgen would never see `3 // 0`."""
    with pytest.raises(SpecError, match="number of Python's"):
        mask_of(Term("==", Term("//", Term("int", 3), Term("int", 2)), Term("q")), {})


def test_kinds_and_captures() -> None:
    declared = {"ids": Declared("int8", 1), "width": Declared("float32", 0)}
    load = Term("load", "ids", Term("q"))
    term = Term("<", load, Term("scalar", "width"))
    assert kind_of(load, declared) == "int" and kind_of(Term("+", term.args), declared) == "float"
    assert captures_of(term, None) == {"ids", "width"}
    assert str(term) == "(ids[q] < width)"
    assert from_data(to_data(term)) == term


def test_every_operation_is_named_once() -> None:
    assert len(set(EVERYTHING)) == len(EVERYTHING)
