"""Everything that a case may hold is drawn, and options narrow what is."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

from hypothesis import Phase, given, seed, settings

import random_variants.cases
from flashgen.codegen.candidates import MOST
from flashgen.codegen.targets import TARGETS
from flashgen.language.dtypes import CACHED, CAPTURES, SCALARS
from flashgen.language.operations import OPERATIONS
from random_variants.captures import VIEWS, WAYS, Fill
from random_variants.cases import GPU_CALLS, Case, Options, cases, targets_of_gpu
from random_variants.running import PLAIN
from random_variants.terms import EVERYTHING, LITERALS, MASKS, SCORES, SYMBOLS


def drawn(options: Options, count: int) -> list[Case]:
    found: list[Case] = []
    search = settings(PLAIN, phases=[Phase.generate])
    for number in range(count // PLAIN.max_examples):
        seed(number)(search(given(cases(options))(lambda case: found.append(case))))()
    return found


def parts_of(case: Case) -> Iterator[object]:
    """What a case holds, as far as each of it should be met."""
    yield from (part.op for term in (case.mask, case.score) if term for part in term.walk())
    yield from ((each.dtype, each.ndim > 0) for each in case.declared.values())
    if case.passes:
        yield from ((field.name, getattr(case, field.name)) for field in dataclasses.fields(case)[5:])
        yield "mixed", case.varlen and case.page_size is not None
    for problem in case.problems:
        yield from (("inputs", problem.inputs), ("gradient", problem.gradient))
        for fill in (value for value in problem.values.values() if isinstance(value, Fill)):
            yield from (("way", fill.way), ("view", fill.view))


def test_everything_is_drawn() -> None:
    met = Counter(part for case in drawn(Options(), 1200) for part in parts_of(case))
    expected = {
        "inputs": ("normal", "large", "tiny", "huge", "ones", "zeros", "garbage", "padding"),
        "gradient": (1.0, 1e-30, 1e30, 1e-3, 100.0),
        "way": {way for ways in WAYS.values() for way in ways} | {"beyond"},
        "view": VIEWS,
        "target": TARGETS,
        "dtype": ("float16", "bfloat16"),
        "layout": ("bhsd", "bshd"),
        "sanitize": (None, "address", "thread"),
        "plan": range(MOST),
        "page_size": (None, 1, 2, 4, 8, 16, 32, 64, 128, 256),
        "kv_dtype": (None, *CACHED),
        "splits": (None, 1, 2, 3, 7),
        "passes": (("forward",), ("forward", "backward")),
        **dict.fromkeys(("varlen", "sharded", "sink", "deterministic", "nvrtc", "mixed"), (False, True)),
    }
    wanted: set[object] = {(name, value) for name, values in expected.items() for value in values}
    wanted |= {(dtype, True) for dtype in CAPTURES} | {(dtype, False) for dtype in SCALARS}
    assert not (wanted | set(EVERYTHING)) - {"bool"} - set(met)


def test_the_backward_meets_sizes_of_0_and_1_of_every_kind() -> None:
    met: Counter[object] = Counter()
    for case in drawn(Options(("sm_90", "sm_90a"), passes=("backward",), emulate=False), 300):
        if case.passes:
            assert case.passes == ("forward", "backward") and len(case.problems) == GPU_CALLS and not case.emulate
            met[case.target] += 1
        for shape in (problem.shape for problem in case.problems if case.passes):
            met.update((name, getattr(shape, name)) for name in ("len_q", "len_k", "batch"))
            if 0 in (shape.len_q, shape.len_k, shape.batch) and case.sink:
                met["varlen" if case.varlen else "sink"] += 1
    assert all(met[name, size] for name in ("len_q", "len_k", "batch") for size in (0, 1))
    assert all(met[what] for what in ("sm_90", "sm_90a", "sink", "varlen"))


def test_options_narrow_cases() -> None:
    assert all(case.sanitize == "thread" and case.passes for case in drawn(Options(sanitize="thread"), 20))
    narrow = drawn(Options(targets=("sm_90",), passes=("forward",)), 100)
    assert {(case.passes, case.target) for case in narrow} == {((), None), (("forward",), "sm_90")}


def test_the_grammar_has_every_operation_of_the_language() -> None:
    """An operation that is new in the language is new here, too, but for those that concern gradients alone."""
    own = set(EVERYTHING) - set(SYMBOLS) - set(LITERALS) - set(MASKS) - set(SCORES) - {"scalar"}
    assert len(own) == len(OPERATIONS.keys() - {"Detach", "Surrogate"})
    assert len(set(EVERYTHING)) == len(EVERYTHING)


def test_a_case_is_printed_as_the_python_that_makes_it() -> None:
    names = vars(random_variants.cases) | {"Fill": Fill}
    for case in drawn(Options(), 100):
        assert eval(repr(case), names) == case
        assert "mask = lambda b, h, q, k: " in str(case)


def test_targets_of_a_gpu() -> None:
    assert targets_of_gpu(9, 0) == ("sm_90", "sm_90a")
    assert targets_of_gpu(8, 9) == ("sm_80", "sm_86", "sm_87", "sm_89")
