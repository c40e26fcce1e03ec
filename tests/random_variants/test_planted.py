"""Planted faults in each component are found: by the first random cases that can, or by a case made for them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import sympy
from hypothesis import Phase, find, settings

import flashgen as fg
from flashgen.analysis import derivatives
from flashgen.analysis.closed_forms import tile_ranges
from flashgen.analysis.intervals import evaluation
from flashgen.attention import compiling
from flashgen.build import host
from flashgen.codegen.expressions import operation_text
from flashgen.errors import LaunchError
from flashgen.language import evaluate as oracle
from flashgen.language import operations as ops
from flashgen.reference import pages
from flashgen.runtime import emulator
from flashgen.verify.problems import Shape
from random_variants import predicates, varlen
from random_variants.captures import Fill
from random_variants.cases import Case, Options, Problem, cases
from random_variants.check import check
from random_variants.predicates import check_predicates
from random_variants.running import PLAIN
from random_variants.samples import Sample
from random_variants.serving import Cached
from random_variants.standard import Call
from random_variants.terms import Declared, Term, integer, number

Planter = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def recompiled() -> None:
    """Clears what other tests compiled without the fault."""
    compiling.clear()


def failure(case: Case) -> str:
    """Returns what is found in a case, or nothing."""
    try:
        check(case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# The oracle and the analysis, by random cases ------------------------------------------------------------------------


def first_failure(*operations: str) -> str:
    """Returns what is found in the first random case without kernels whose mask has one of these operations, or any."""
    search = settings(PLAIN, max_examples=150, phases=[Phase.generate], derandomize=True)
    drawn = cases(Options()).map(lambda case: replace(case, passes=()))
    if operations:
        drawn = drawn.filter(lambda case: any(part.op in operations for part in case.mask.walk()))
    return failure(find(drawn, failure, settings=search))


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
def test_a_wrong_operation_of_the_reference(
    operation: Any, meaning: Any, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(oracle.MEANINGS, operation, meaning)
    assert first_failure(named).startswith(("Found: oracle", "Found: tiles"))


def test_a_narrow_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = evaluation.classify

    def hopeful(*given: Any) -> Any:
        classes = plain(*given)
        return np.where(classes == evaluation.PARTIAL, evaluation.FULL, classes)

    monkeypatch.setattr("flashgen.analysis.tile_classes.classify", hopeful)
    assert first_failure().startswith("Found: tiles")


def test_a_range_that_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def early(*given: Any) -> Any:
        begin, end, *full = tile_ranges.evaluate_range(*given)
        return begin, np.maximum(end - 1, 0), *full

    monkeypatch.setattr("random_variants.covers.evaluate_range", early)
    assert first_failure().startswith("Found: tiles")


# Kernels, by cases made for the fault --------------------------------------------------------------------------------

BOTH = ("forward", "backward")
CAUSAL, SCORE = Term("causal", "bottom_right"), Term("score")
SIZES = {"head_dim": 16, "value_dim": 16, "target": "sm_80"}


def one_call(mask: Term, score: Term | None = None, **given: Any) -> Case:
    """Returns a small case of one call, on the emulator."""
    return Case(mask, score, {}, (Problem(Shape(60, 90, 1, 2, 1), {}, d_lse=True),), **(SIZES | given))


def loading(operation: str, index: Term, wanted: int) -> Case:
    """Returns a case whose mask compares an element of a capture of 60 numbers."""
    case = one_call(Term(operation, Term("load", "ids", index), integer(wanted)))
    problem = replace(case.problems[0], values={"ids": Fill("few", (60,), 1)})
    return replace(case, declared={"ids": Declared("int8", 1)}, problems=(problem,))


def serving(batch: int = 3, **given: Any) -> Case:
    """Returns a case with two calls of few queries."""
    problems = tuple(Problem(Shape(2, 90, batch, 4, 2), {}, seed=seed) for seed in range(2))
    return replace(one_call(CAUSAL, sink=True, **given), problems=problems)


def sharded(**given: Any) -> Case:
    """Returns a case of several shards, whose score depends on their positions."""
    distance = Term("-", Term("to_float", Term("k")), Term("to_float", Term("q")))
    case = one_call(CAUSAL, Term("+", SCORE, distance), passes=BOTH, sharded=True, dropout=0.17, **given)
    return replace(case, problems=(Problem(Shape(70, 90, 2, 2, 1), {}, seed=1),))


DIVIDED = one_call(Term(">=", Term("floor", Term("/", Term("k"), integer(41))), integer(1)))
LOADED = loading("==", Term("-", Term("k"), integer(20)), 1)
FAR = loading("!=", Term("+", Term("k"), integer(100_000)), 77)
TANH = one_call(CAUSAL, Term("tanh", SCORE), passes=BOTH)
SOFTCAP = Term("softcap", SCORE, number(2.0), "accurate")
PEAKED = one_call(CAUSAL, Term("*", Term("abs", SOFTCAP), number(32.0)), passes=BOTH)
SINKS = one_call(CAUSAL, passes=BOTH, sink=True)
PAGED = serving(page_size=16, splits=2)
NARROW = serving(page_size=16, splits=2, kv_dtype="int8", head_dim=32, value_dim=32)
MIXED = serving(page_size=16, varlen=True)


PASSING: dict[str, tuple[Case, dict[str, int]]] = {
    "division": (DIVIDED, {"forward calls": 1}),
    "load": (LOADED, {"forward calls": 1, "maps and lists": 2}),
    "score": (PEAKED, {"forward calls": 1, "backward calls": 1}),
    "sinks": (SINKS, {"backward calls": 1}),
    "pages": (PAGED, {"forward calls over a cache": 2}),
    "8 bits": (NARROW, {"forward calls over a cache": 2}),
    "mixed batch": (MIXED, {"forward calls over a cache": 2}),
    "splits": (serving(splits=2), {"forward calls": 2}),
    "pages, bshd": (serving(page_size=16, splits=2, layout="bshd"), {"forward calls over a cache": 2}),
    "shards": (sharded(), {"forward calls in shards": 1, "backward calls": 1}),
    "shards, bshd": (sharded(layout="bshd", sink=True), {"forward calls in shards": 1, "backward calls": 1}),
    "refused": (replace(DIVIDED, target="sm_75", dtype="bfloat16"), {"refused by UnsupportedError": 1}),
}


@pytest.mark.rotated(3)
@pytest.mark.parametrize("name", PASSING)
def test_cases_without_a_fault_pass(name: str) -> None:
    case, counted = PASSING[name]
    assert counted.items() <= check(case).items()


def item(table: dict[Any, Any], name: Any, value: Any) -> Planter:
    return lambda monkeypatch: monkeypatch.setitem(table, name, value)


def attribute(owner: Any, name: str, value: Any) -> Planter:
    return lambda monkeypatch: monkeypatch.setattr(owner, name, value)


def text(found: str, planted: str) -> Planter:
    """Changes the text of kernels."""
    plain = host.compile_host
    return attribute(host, "compile_host", lambda source, *given: plain(source.replace(found, planted), *given))


def reciprocal(self: Any, node: sympy.Basic) -> tuple[str, int]:
    """41 * (1 / 41) is less than 1 in float32."""
    left, right = (self.as_float(operand, 12) for operand in node.args)
    return f"({left}) * (1.0f / ({right}))", 12


def fails(error: Exception) -> Callable[..., None]:
    def fail(*_given: object) -> None:
        raise error

    return fail


def with_halved_sinks(self: Call, *given: Any, plain: Any = Call.gradients) -> Any:
    gradients = plain(self, *given)
    return gradients | {"d_sinks": gradients["d_sinks"] / 2}


def without_a_page(k: Any, table: Any, length: Any, plain: Any = pages.gather_pages) -> Any:
    return plain(k, table, max(int(length) - 16, 0))


LINEAR = lambda _algebra, _node, da: da
WRONG, BACKWARD = "Found: wrong", "Found: wrong: backward"
CLAMP = "min(static_cast<unsigned>(i0), arguments.ids_size[0] - 1u)"
USED = "__ldg(arguments.seqused_k + {})"
FAULTS: dict[str, tuple[Case, Planter, str]] = {
    "division by a reciprocal": (DIVIDED, item(operation_text.SPECIAL, ops.Divide, reciprocal), "Found: "),
    "an index that is not clamped": (LOADED, attribute(operation_text, "clamped_index", lambda index: index), WRONG),
    "a read outside": (replace(FAR, sanitize="address"), text(CLAMP, "i0"), "LaunchError: .*kernel.cu"),
    "another derivative": (TANH, item(derivatives.RULES, ops.Tanh, derivatives.RULES[ops.Sin]), BACKWARD),
    "a slope beside a kink": (PEAKED, item(derivatives.RULES, ops.Abs, LINEAR), BACKWARD),
    "no slope of a tanh": (PEAKED, item(derivatives.RULES, ops.Tanh, LINEAR), BACKWARD),
    "no C++": (DIVIDED, item(operation_text.SPECIAL, ops.Divide, lambda _s, _n: ("divided(", 12)), "BuildError"),
    "a launch that fails": (DIVIDED, attribute(emulator, "launch", fails(LaunchError("deadlock"))), "LaunchError"),
    "a key too many": (PAGED, text(USED.format("blockIdx.z"), f"({USED.format('blockIdx.z')} + 1)"), WRONG),
    "another page": (PAGED, text("(page_table + key / kPageSize)", "(page_table + key / kPageSize / 2)"), WRONG),
    "another head's sink": (PAGED, text("load_sinks(arguments, indices.head)", "load_sinks(arguments, 0)"), WRONG),
    "another head's scale": (NARROW, text("head_kv * arguments.k_scales", "0 * arguments.k_scales"), WRONG),
    "a packed key": (MIXED, text(USED.format("number"), f"({USED.format('number')} + 1)"), WRONG),
    "a packed row": (MIXED, text("q += sequence.first_q *", "q += (sequence.first_q + 1) *"), WRONG),
    "an oracle that forgets a page": (PAGED, attribute(pages, "gather_pages", without_a_page), "Found: oracle"),
    "a gradient of sinks": (SINKS, attribute(Call, "gradients", with_halved_sinks), "Found: oracle"),
    "a shard that does not know shard_b": (sharded(), text("arguments.shard_b", "0"), WRONG),
    "a shard that does not know shard_q": (sharded(), text("arguments.shard_q", "0"), WRONG),
    "a shard that does not know shard_k": (sharded(), text("arguments.shard_k", "0"), WRONG),
}


@pytest.mark.rotated(4)
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, plant, message = FAULTS[name]
    plant(monkeypatch)
    assert re.match(message, failure(case), re.DOTALL)


# What the judge forgives, and what it does not ------------------------------------------------------------------------


def test_kinks_within_the_error_of_tanh(monkeypatch: pytest.MonkeyPatch) -> None:
    """The accurate tanh's error decides the signs of scores of 1e-6; the other side's slope is allowed."""
    problem = replace(PEAKED.problems[0], inputs="tiny", gradient=1e30, d_lse=False)
    case = replace(PEAKED, problems=(problem,), dtype="bfloat16")
    assert not failure(case)
    monkeypatch.setattr(Call, "unsure", lambda *_given: {})
    assert failure(case).startswith("Found: wrong: backward")


@pytest.mark.parametrize("inputs", ["garbage", "padding"])
def test_invalid_values_that_must_have_no_effect(inputs: Any) -> None:
    """Rows from 50 on attend to nothing, no row to keys from 30 on; some calls have no rows or keys."""
    mask = Term("and", Term("<", Term("k"), integer(30)), Term("<", Term("q"), integer(50)))
    shapes = (Shape(60, 90, 1, 4, 2), Shape(0, 90, 1, 2, 1), Shape(60, 0, 1, 2, 1))
    case = replace(one_call(mask), problems=tuple(Problem(shape, {}, inputs) for shape in shapes))
    assert not failure(case)
    sample = Sample(case, case.spec(), check_predicates(case, case.spec(), Counter())[0], 0)
    forbidden = np.isnan(sample.given.k.astype(np.float32)).all(axis=(0, 1, 3))
    assert forbidden.sum() == (90 if inputs == "garbage" else 60) and forbidden[30:].all()


def test_invalid_values_with_an_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that lets one padded key pass gives NaN."""
    case = one_call(Term("<", Term("k"), integer(30)))
    case = replace(case, problems=(Problem(Shape(60, 90, 1, 1, 1), {}, "padding"),))
    monkeypatch.setattr("random_variants.cases.mask_of", lambda *_given: fg.trace_mask(lambda b, h, q, k: k <= 30))
    monkeypatch.setattr(predicates, "_check_oracle", lambda *_given: None)
    monkeypatch.setattr(predicates, "mistake_in_analysis", lambda *_given, **_turn: None)
    monkeypatch.setattr("random_variants.check._check_lists", lambda *_given: None)
    assert "NaN" in failure(case)


def test_refused_arguments_are_a_failure() -> None:
    """Cases only use documented arguments."""
    assert failure(replace(LOADED, problems=(replace(LOADED.problems[0], values={"ids": 3}),)))


@pytest.mark.parametrize("layout", ["equal", "varlen", "sharded"])
def test_calls_of_a_size_of_0_pass(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens: list[int] = []
    plain = varlen._packed
    monkeypatch.setattr(varlen, "_packed", lambda array: tokens.append(len(plain(array))) or plain(array))
    shapes = (Shape(5, 0, 2, 4, 2), Shape(0, 5, 2, 4, 2), Shape(0, 0, 1, 1, 1), Shape(5, 5, 0, 2, 1))
    how: Any = {} if layout == "equal" else {layout: True}
    case = replace(SINKS, target="sm_90a", problems=tuple(Problem(shape, {}) for shape in shapes), **how)
    assert check(case)["backward calls of a size of 0"] == len(shapes)
    assert (0 in tokens) == (layout == "varlen"), "packed arrays without tokens"


def test_lengths_are_around_page_borders() -> None:
    """0, 1 and around borders, for several sequences."""
    case = serving(batch=12, page_size=16, splits=2)
    checked = check_predicates(case, case.spec(), Counter())
    lengths = {length for each in checked for length in Cached(case, case.spec(), each, 0).lengths}
    assert {0, 1, 80, 90} <= lengths and len(lengths & {15, 16, 17, 79, 81}) > 2, lengths
