"""Everything that a case may contain is drawn, and options restrict it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

import random_variants.cases
from flashgen.codegen.candidates import MAX_CANDIDATES
from flashgen.codegen.targets import TARGETS
from flashgen.dtypes import CACHED, CAPTURES, SCALARS
from flashgen.language.operations import OPERATIONS
from random_variants.captures import VIEWS, WAYS, Fill
from random_variants.cases import GPU_CALLS, Case, Options, cases, draw_kernels, draw_serving, targets_of_gpu
from random_variants.grammar import Draw, Source
from random_variants.running import PLAIN
from random_variants.terms import EVERYTHING, LITERALS, MASKS, SCORES, SYMBOLS


def drawn(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    found: list[Any] = []
    search = settings(PLAIN, phases=[Phase.generate])
    for number in range(count // PLAIN.max_examples):
        seed(number)(search(given(strategy)(lambda value: found.append(value))))()
    return found


@st.composite
def kernels(draw: Draw) -> dict[str, Any]:
    """Returns what determines the kernels of a case; half of the cases are serving calls."""
    source = Source(draw)
    options = draw_kernels(source, Options())
    return options | draw_serving(source) if source.chance(50) else options


def parts_of(case: Case) -> Iterator[object]:
    yield from (part.op for term in (case.mask, case.score) if term for part in term.walk())
    yield from ((each.dtype, each.ndim > 0) for each in case.declared.values())
    yield "passes", case.passes
    for problem in case.problems:
        yield from (("inputs", problem.inputs), ("gradient", problem.gradient))
        for fill in (value for value in problem.values.values() if isinstance(value, Fill)):
            yield from (("way", fill.way), ("view", fill.view))


def test_everything_is_drawn() -> None:
    met: set[object] = {part for case in drawn(cases(), 800) for part in parts_of(case)}
    for options in drawn(kernels(), 1000):
        met |= options.items() | {("mixed", options["varlen"] and options.get("page_size") is not None)}
    expected = {
        "inputs": ("normal", "large", "tiny", "huge", "ones", "zeros", "garbage", "padding"),
        "gradient": (1.0, 1e-30, 1e30, 1e-3, 100.0),
        "way": {way for ways in WAYS.values() for way in ways} | {"beyond"},
        "view": VIEWS,
        "target": TARGETS,
        "dtype": ("float16", "bfloat16"),
        "layout": ("bhsd", "bshd"),
        "sanitize": (None, "address", "thread"),
        "plan": range(MAX_CANDIDATES),
        "page_size": (None, 1, 2, 4, 8, 16, 32, 64, 128, 256),
        "kv_dtype": (None, *CACHED),
        "splits": (None, 1, 2, 3, 7),
        "passes": ((), ("forward",), ("forward", "backward")),
        **dict.fromkeys(("varlen", "sharded", "sink", "deterministic", "nvrtc", "mixed"), (False, True)),
    }
    wanted: set[object] = {(name, value) for name, values in expected.items() for value in values}
    wanted |= {(dtype, True) for dtype in CAPTURES} | {(dtype, False) for dtype in SCALARS} | set(EVERYTHING) - {"bool"}
    missing = wanted - met
    assert not missing


def test_the_backward_meets_sizes_of_0_and_1_of_every_kind() -> None:
    met: Counter[object] = Counter()
    for case in drawn(cases(Options(("sm_90", "sm_90a"), ("backward",), emulate=False)), 400):
        if case.passes:
            assert case.passes == ("forward", "backward") and len(case.problems) <= GPU_CALLS and not case.emulate
            met.update((case.target, len(case.problems)))
        for shape in (problem.shape for problem in case.problems if case.passes):
            met.update((name, getattr(shape, name)) for name in ("len_q", "len_k", "batch"))
            if 0 in (shape.len_q, shape.len_k, shape.batch) and case.sink:
                met["varlen" if case.varlen else "sink"] += 1
    assert all(met[name, size] for name in ("len_q", "len_k", "batch") for size in (0, 1))
    assert all(met[what] for what in ("sm_90", "sm_90a", GPU_CALLS, "sink", "varlen"))


def test_options_restrict_cases() -> None:
    assert all(case.sanitize == "thread" and case.passes for case in drawn(cases(Options(sanitize="thread")), 20))
    narrow = drawn(cases(Options(targets=("sm_90",), passes=("forward",))), 100)
    assert {(case.passes, case.target) for case in narrow} == {((), None), (("forward",), "sm_90")}


def test_the_grammar_has_every_operation_of_the_language() -> None:
    """An operation that is added to the language must be added here, except those for gradients only."""
    own = set(EVERYTHING) - set(SYMBOLS) - set(LITERALS) - set(MASKS) - set(SCORES) - {"scalar"}
    assert len(own) == len(OPERATIONS.keys() - {"Detach", "Surrogate"})
    assert len(set(EVERYTHING)) == len(EVERYTHING)


def test_a_case_is_printed_as_the_python_that_makes_it() -> None:
    names = vars(random_variants.cases) | {"Fill": Fill}
    for case in drawn(cases(), 100):
        assert eval(repr(case), names) == case
        assert "mask = lambda b, h, q, k: " in str(case)


def test_targets_of_a_gpu() -> None:
    assert targets_of_gpu(9, 0) == ("sm_90", "sm_90a")
    assert targets_of_gpu(8, 9) == ("sm_80", "sm_86", "sm_87", "sm_89")
