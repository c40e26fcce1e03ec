"""Defects planted in each part are found by the first cases that can meet them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import sympy
from flashgen.verify.random import Case, Options, Outcome, check, packed, recipe_of, tracing

from flashgen.analysis import derivatives
from flashgen.analysis.closed_forms import tile_ranges
from flashgen.analysis.intervals import evaluation
from flashgen.attention import compiling
from flashgen.build import host
from flashgen.codegen.expressions import operation_text
from flashgen.errors import LaunchError, UnsupportedError
from flashgen.language import evaluate as oracle
from flashgen.language import operations as ops
from flashgen.reference import pages
from flashgen.verify.problems import Shape
from random_variants.captures import Fill
from random_variants.cases import Problem
from random_variants.predicates import check_predicates
from random_variants.samples import Sample
from random_variants.serving import Cached
from random_variants.standard import Call
from random_variants.terms import Declared, Term

PREDICATES = 150  # cases that a defect of oracle or analysis may take to be met


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    """What was compiled without the defect is forgotten, and what was with it."""
    compiling.clear()
    yield
    compiling.clear()


def first_finding(wanted: Callable[[Case], bool] = lambda case: True) -> Outcome:
    """Of cases that compile no kernel."""
    recipes = (replace(recipe_of(seed, Options()), passes=()) for seed in range(10_000))
    chosen = (case for case, _ in zip(filter(wanted, recipes), range(PREDICATES), strict=False))
    return next((outcome for outcome in map(check, chosen) if outcome.status == "found"), Outcome("passed"))


def holds(*ops_: str) -> Callable[[Case], bool]:
    return lambda case: any(part.op in ops_ for part in case.mask.walk())


# The oracle and the analysis -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "meaning", "named"),
    [
        (ops.FloorMod, np.fmod, "%"),
        (ops.FloorDiv, lambda a, b: np.trunc(a / np.where(b == 0, 1, b)).astype(np.asarray(a).dtype), "//"),
        (ops.LessEqual, np.less, "<="),
        (ops.Minimum, np.fmax, "min"),
    ],
    ids=["modulo", "division", "comparison", "minimum"],
)
def test_an_operation_of_the_oracle(
    operation: type[ops.Operation], meaning: Any, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(oracle.MEANINGS, operation, meaning)
    assert first_finding(holds(named)).kind in ("oracle", "tiles")


def test_an_interval_that_is_too_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = evaluation.classify

    def hopeful(*given: Any) -> Any:
        found = plain(*given)
        return np.where(found == evaluation.PARTIAL, evaluation.FULL, found)

    monkeypatch.setattr("flashgen.analysis.tile_classes.classify", hopeful)
    assert first_finding().kind == "tiles"


def test_a_range_that_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tile_ranges.evaluate_range

    def early(*given: Any) -> Any:
        begin, end, *full = plain(*given)
        return begin, np.maximum(end - 1, 0), *full

    monkeypatch.setattr("random_variants.covers.evaluate_range", early)
    assert first_finding().kind == "tiles"


# Kernels -------------------------------------------------------------------------------------------------------------


def one_call(mask: Term, score: Term | None = None, *, declared: Any = None, **given: Any) -> Case:
    """A small case of one call, on the emulator."""
    values = given.pop("values", {})
    problem = Problem(Shape(60, 90, 1, 2, 1), values, d_lse=True)
    return Case(mask, score, declared or {}, (problem,), head_dim=16, value_dim=16, target="sm_80", **given)


CAUSAL = Term("causal", "bottom_right")
DIVIDED = Term(">=", Term("floor", Term("/", Term("k"), integer(41))), integer(1))
LOADED = Term("==", Term("load", "ids", Term("-", Term("k"), integer(20))), integer(1))
IDS = {"ids": Declared("int8", 1)}


def test_the_cases_themselves_pass() -> None:
    loaded = one_call(LOADED, declared=IDS, values={"ids": Fill("few", (60,), 1)})
    for case in (one_call(CAUSAL, passes=("forward", "backward")), one_call(DIVIDED), loaded):
        outcome = check(case)
        assert outcome.status == "passed", outcome.message
    assert outcome.counts["forward calls"] == 1 and outcome.counts["maps and lists"] == 2


def test_division_by_a_reciprocal(monkeypatch: pytest.MonkeyPatch) -> None:
    """41 · (1 / 41) is less than 1 in float32."""

    def reciprocal(self: Any, node: sympy.Basic) -> tuple[str, int]:
        left, right = (self.as_float(operand, 12) for operand in node.args)
        return f"({left}) * (1.0f / ({right}))", 12

    monkeypatch.setitem(operation_text.SPECIAL, ops.Divide, reciprocal)
    outcome = check(one_call(DIVIDED))
    assert outcome.status == "found" and outcome.kind in ("wrong", "tiles"), outcome


def test_an_index_that_is_not_clamped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation_text, "index_of", lambda index: index)
    outcome = check(one_call(LOADED, declared=IDS, values={"ids": Fill("few", (60,), 1)}))
    assert outcome.kind == "wrong", outcome


def test_a_read_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a wrong value would be luck, the sanitizer of the case says so."""
    far = Term("load", "ids", Term("+", Term("k"), integer(100_000)))
    clamp = "min(static_cast<unsigned>(i0), arguments.ids_size[0] - 1u)"
    plain = host.compile_host

    def unclamped(source: str, *given: Any) -> Any:
        assert clamp in source
        return plain(source.replace(clamp, "i0"), *given)

    monkeypatch.setattr(host, "compile_host", unclamped)
    mask = Term("!=", far, integer(77))
    outcome = check(one_call(mask, declared=IDS, values={"ids": Fill("few", (60,), 1)}, sanitize="address"))
    assert outcome.kind == "sanitizer" and "kernel.cu" in outcome.message, outcome


def test_a_derivative_of_another_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle's derivatives are not asked."""
    monkeypatch.setitem(derivatives.RULES, ops.Tanh, derivatives.RULES[ops.Sin])
    outcome = check(one_call(CAUSAL, Term("tanh", Term("score")), passes=("forward", "backward")))
    assert outcome.kind == "wrong" and outcome.message.startswith("backward"), outcome


SOFTCAP = Term("softcap", Term("score"), Term("float", 2.0), "accurate")
STEEP = Term("*", Term("abs", SOFTCAP), Term("float", 32.0))
PEAKED = one_call(CAUSAL, STEEP, passes=("forward", "backward"))


def near_a_kink() -> Case:
    """Scores of 1e-6, whose signs the accurate tanh's error of 1e-6 decides; gradients so large that all is seen."""
    problem = replace(PEAKED.problems[0], inputs="tiny", gradient=1e30, d_lse=False)
    return replace(PEAKED, problems=(problem,), dtype="bfloat16")


def test_kinks_that_the_tanh_s_error_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's slope may be the other side's there, which the judge is told, and without that takes for wrong."""
    assert check(near_a_kink()).status == "passed"
    monkeypatch.setattr(Call, "unsure", lambda *_given: {})
    outcome = check(near_a_kink())
    assert outcome.kind == "wrong" and outcome.message.startswith("backward"), outcome


@pytest.mark.parametrize("op", [ops.Abs, ops.Tanh])
def test_a_wrong_slope_beside_a_kink(op: type[ops.Operation], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where scores are away from it, nothing is forgiven: |x| whose slope is 1 everywhere, a tanh without its own."""
    assert check(PEAKED).status == "passed"
    monkeypatch.setitem(derivatives.RULES, op, lambda algebra, node, da: da)
    compiling.clear()
    outcome = check(PEAKED)
    assert outcome.kind == "wrong" and outcome.message.startswith("backward"), outcome


def test_text_that_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(operation_text.SPECIAL, ops.Divide, lambda self, node: ("divided(", 12))
    assert check(one_call(DIVIDED)).kind == "compile"


def test_a_launch_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_given: object) -> None:
        raise LaunchError("deadlock at kernel.cu:7")

    monkeypatch.setattr("flashgen.runtime.emulator.launch", fails)
    assert check(one_call(CAUSAL)).kind == "emulator"


def test_an_exception_that_nobody_foresaw(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_given: object) -> None:
        raise KeyError("tile")

    monkeypatch.setattr("random_variants.kernels._check_lists", fails)
    outcome = check(one_call(CAUSAL))
    assert outcome.kind == "raised" and "KeyError" in outcome.message


def test_a_refusal_by_name_is_no_finding() -> None:
    outcome = check(replace(one_call(CAUSAL), target="sm_75", dtype="bfloat16"))
    assert outcome.status == "refused" and UnsupportedError.__name__ in outcome.message


def test_arguments_that_are_refused_are_a_finding() -> None:
    """The generator gives what the documentation allows."""
    outcome = check(one_call(LOADED, declared=IDS, values={"ids": 3}))
    assert outcome.status == "found"


@pytest.mark.parametrize("inputs", ["garbage", "padding"])
def test_garbage_that_must_not_be_seen(inputs: Any) -> None:
    """Rows from 50 on attend to nothing, nobody to keys from 30 on; and there are calls without any."""
    mask = Term("and", Term("<", Term("k"), integer(30)), Term("<", Term("q"), integer(50)))
    shapes = (Shape(60, 90, 1, 4, 2), Shape(0, 90, 1, 2, 1), Shape(60, 0, 1, 2, 1))
    case = replace(one_call(mask), problems=tuple(Problem(shape, {}, inputs) for shape in shapes))
    assert check(case).status == "passed"
    sample = Sample(case, case.spec(), check_predicates(case, case.spec(), Counter())[0], 0)
    forbidden = np.isnan(sample.given.k.astype(np.float32)).all(axis=(0, 1, 3))
    assert forbidden.sum() == (90 if inputs == "garbage" else 60) and forbidden[30:].all()


PAGED = one_call(CAUSAL, page_size=16, splits=2, sink=True)
NARROW = replace(PAGED, kv_dtype="int8", head_dim=32, value_dim=32)
MIXED = replace(PAGED, splits=None, ragged=True)


def few_queries(case: Case, batch: int = 3) -> Case:
    return replace(case, problems=tuple(Problem(Shape(2, 90, batch, 4, 2), {}, seed=seed) for seed in range(2)))


@pytest.mark.parametrize("case", [PAGED, NARROW, MIXED, replace(PAGED, page_size=None), replace(PAGED, layout="bshd")])
def test_calls_over_a_cache_pass(case: Case) -> None:
    outcome = check(few_queries(case))
    what = "forward calls over a cache" if case.page_size or case.kv_dtype else "forward calls"
    assert outcome.status == "passed" and outcome.counts[what] == 2, outcome.message


@pytest.mark.parametrize(
    ("case", "text", "wrong"),
    [
        (PAGED, "__ldg(arguments.seqused_k + blockIdx.z)", "(__ldg(arguments.seqused_k + blockIdx.z) + 1)"),
        (PAGED, "__ldg(page_table + key / kPageSize)", "__ldg(page_table + key / kPageSize / 2)"),
        (PAGED, "load_sinks(arguments, place.head)", "load_sinks(arguments, place.head + 1)"),
        (NARROW, "head_kv * arguments.k_scales", "0 * arguments.k_scales"),
        (MIXED, "__ldg(arguments.seqused_k + number)", "(__ldg(arguments.seqused_k + number) + 1)"),
        (MIXED, "arguments.q += sequence.first_q *", "arguments.q += (sequence.first_q + 1) *"),
    ],
    ids=[
        "a key too many",
        "another page",
        "another head's sink",
        "another head's scale",
        "a packed key",
        "a packed row",
    ],
)
def test_defects_of_calls_over_a_cache(case: Case, text: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, met = host.compile_host, []

    def planted(source: str, *given: Any) -> Any:
        met.append(text in source)
        return plain(source.replace(text, wrong), *given)

    monkeypatch.setattr(host, "compile_host", planted)
    outcome = check(few_queries(case))
    assert any(met), "the text is none of these kernels'"
    assert outcome.status == "found" and outcome.kind == "wrong", outcome


def test_an_oracle_that_forgets_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = pages.gathered
    monkeypatch.setattr(pages, "gathered", lambda k, table, length: plain(k, table, max(int(length) - 16, 0)))
    assert check(few_queries(PAGED)).kind == "oracle"


def test_sinks_have_a_gradient_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    case = one_call(CAUSAL, passes=("forward", "backward"), sink=True)
    outcome = check(case)
    assert outcome.status == "passed" and outcome.counts["backward calls"] == 1, outcome.message
    true = Call.gradients

    def halved(self: Call, *given: Any) -> Any:
        return {name: array / (2 if name == "d_sinks" else 1) for name, array in true(self, *given).items()}

    monkeypatch.setattr(Call, "gradients", halved)
    assert check(case).kind == "oracle"


EMPTY = (Shape(5, 0, 2, 4, 2), Shape(0, 5, 2, 4, 2), Shape(0, 0, 1, 1, 1), Shape(5, 5, 0, 2, 1))


@pytest.mark.parametrize("how", ["equal", "ragged", "sharded"])
def test_calls_of_a_size_of_0_pass(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens: list[int] = []
    plain = packed._packed
    monkeypatch.setattr(packed, "_packed", lambda array: tokens.append(len(plain(array))) or plain(array))
    options: dict[str, Any] = {} if how == "equal" else {how: True}
    case = one_call(CAUSAL, passes=("forward", "backward"), sink=True, **options)
    outcome = check(replace(case, target="sm_90a", problems=tuple(Problem(shape, {}) for shape in EMPTY)))
    assert outcome.status == "passed", outcome.message
    assert outcome.counts["backward calls of a size of 0 with sinks"] == len(EMPTY)
    assert (0 in tokens) == (how == "ragged"), "packed arrays without a token"


BIASED = Term("+", Term("score"), Term("-", Term("to_float", Term("k")), Term("to_float", Term("q"))))
PARTED = one_call(CAUSAL, BIASED, passes=("forward", "backward"), sharded=True, dropout=0.17)


def of_several_parts(case: Case) -> Case:
    return replace(case, problems=(Problem(Shape(70, 90, 2, 2, 1), {}, seed=1),))


def test_calls_in_parts_pass() -> None:
    for case in (PARTED, replace(PARTED, layout="bshd", sink=True)):
        outcome = check(of_several_parts(case))
        assert outcome.status == "passed", outcome.message
        assert outcome.counts["forward calls in parts"] == 1 == outcome.counts["backward calls"]


@pytest.mark.parametrize("place", ["shard_b", "shard_q", "shard_k"])
def test_a_part_that_does_not_know_where_it_stands(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, met = host.compile_host, []

    def planted(source: str, *given: Any) -> Any:
        met.append(f"arguments.{place}" in source)
        return plain(source.replace(f"arguments.{place}", "0"), *given)

    monkeypatch.setattr(host, "compile_host", planted)
    outcome = check(of_several_parts(PARTED))
    assert any(met), "the text is none of these kernels'"
    assert outcome.status == "found" and outcome.kind == "wrong", outcome


def test_lengths_are_at_the_borders_of_pages() -> None:
    """0, 1 and around borders, of several sequences."""
    case = few_queries(PAGED, batch=12)
    checked = check_predicates(case, case.spec(), Counter())
    lengths = {length for each in checked for length in Cached(case, case.spec(), each, 0).lengths}
    assert {0, 1, 80, 90} <= lengths and len(lengths & {15, 16, 17, 79, 81}) > 2, lengths


def test_garbage_that_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that lets one key of the padding pass gives NaN."""
    mask = Term("<", Term("k"), integer(30))
    case = replace(one_call(mask), problems=(Problem(Shape(60, 90, 1, 1, 1), {}, "padding"),))
    monkeypatch.setitem(tracing._OPERATORS, "<", lambda a, b: a <= b)
    monkeypatch.setattr("random_variants.predicates._check_oracle", lambda *_given: None)
    monkeypatch.setattr("random_variants.predicates.lie_of_analysis", lambda *_given, **_turn: None)
    monkeypatch.setattr("random_variants.kernels._check_lists", lambda *_given: None)
    outcome = check(case)
    assert outcome.kind == "wrong" and "NaN" in outcome.message
