"""Cases follow from one number, and everything that the grammar can say is said."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from flashgen.verify.random import Options, grammar, recipe_of, score_grammar, targets_of_gpu

from flashgen.codegen.candidates import MOST
from flashgen.codegen.targets import TARGETS
from flashgen.language.dtypes import CACHED, CAPTURES, SCALARS
from flashgen.language.operations import OPERATIONS
from random_variants.captures import VIEWS, WAYS, Fill
from random_variants.draw import CALLS_ON_A_GPU
from random_variants.terms import EVERYTHING, LITERALS, MASKS, SCORES, SYMBOLS

CASES = 3000


def test_every_production_is_drawn() -> None:
    drawn: Counter[str] = Counter()
    operations: Counter[str] = Counter()
    others: Counter[object] = Counter()
    for seed in range(CASES):
        case = recipe_of(seed, Options(), drawn)
        operations.update(part.op for term in (case.mask, case.score) if term for part in term.walk())
        others.update((case.target, case.dtype, case.layout, case.sanitize, case.passes, case.nvrtc))
        others.update(("declared", each.dtype, each.ndim > 0) for each in case.declared.values())
        fills = [v for problem in case.problems for v in problem.values.values() if isinstance(v, Fill)]
        others.update(fill.way for fill in fills)
        others.update(fill.view for fill in fills)
        others.update(problem.inputs for problem in case.problems)
        others.update(("gradient", problem.gradient) for problem in case.problems)
        others.update([("plan", case.plan)])
        options = ("page_size", "kv_dtype", "splits", "sink", "ragged", "sharded")
        others.update((name, getattr(case, name), bool(case.passes)) for name in options)
        others.update([("mixed", case.varlen and case.page_size is not None and case.passes == ("forward",))])
    assert not (grammar.production_names() | score_grammar.production_names()) - set(drawn)
    # `score` stands in score functions only, everything else of the language somewhere.
    assert not set(EVERYTHING) - set(operations) - {"bool"}
    assert not set(TARGETS) - set(others)
    assert not {("declared", dtype, True) for dtype in CAPTURES} - set(others)
    assert not {("declared", dtype, False) for dtype in SCALARS} - set(others)
    assert not {
        "float16",
        "bfloat16",
        "bhsd",
        "bshd",
        "address",
        "thread",
        "beyond",
        "huge",
        "garbage",
        "padding",
        *VIEWS,
    } - set(others)
    assert not {way for ways in WAYS.values() for way in ways} - set(others)
    assert {("gradient", scale) for scale in (1.0, 1e-30, 1e30, 1e-3, 100.0)} <= set(others)
    assert {("plan", place) for place in range(MOST)} <= set(others)
    assert {("page_size", size, True) for size in (None, 1, 2, 4, 8, 16, 32, 64, 128, 256)} <= set(others)
    assert {("kv_dtype", dtype, True) for dtype in (None, *CACHED)} <= set(others)
    assert {("splits", splits, True) for splits in (None, 1, 2, 3, 7)} <= set(others)
    assert {("sink", True, True), ("ragged", True, True), ("sharded", True, True), ("mixed", True)} <= set(others)
    assert {(), ("forward",), ("forward", "backward")} <= set(others)


def test_the_backward_meets_sizes_of_0_and_1_of_every_kind() -> None:
    sizes: Counter[tuple[str, int]] = Counter()
    together: Counter[str] = Counter()
    for seed in range(CASES):
        case = recipe_of(seed, Options(("sm_90", "sm_90a"), passes=("backward",), emulate=False))
        if not case.passes:
            continue
        together.update([str(case.target)])
        for shape in (problem.shape for problem in case.problems):
            of_call = {"len_q": shape.len_q, "len_k": shape.len_k, "batch": shape.batch}
            sizes.update(of_call.items())
            if 0 in of_call.values() and case.sink:
                together.update(["sink", "ragged"] if case.varlen else ["sink"])
    assert all(sizes[name, size] for name in ("len_q", "len_k", "batch") for size in (0, 1))
    assert all(together[what] for what in ("sm_90", "sm_90a", "sink", "ragged"))


def test_a_gpu_has_more_calls_of_a_case() -> None:
    seed = next(seed for seed in range(100) if recipe_of(seed, Options()).passes)
    few, many = (recipe_of(seed, Options(("sm_80",), emulate=emulate, nvrtc=False)) for emulate in (True, False))
    assert many.problems[: len(few.problems)] == few.problems and len(many.problems) == CALLS_ON_A_GPU


def test_the_grammar_has_every_operation_of_the_language() -> None:
    """An operation that is new in the language is new here, too, but for those that concern gradients alone."""
    own = set(EVERYTHING) - set(SYMBOLS) - set(LITERALS) - set(MASKS) - set(SCORES) - {"scalar"}
    assert len(own) == len(OPERATIONS.keys() - {"Detach", "Surrogate"})


def test_the_same_number_is_the_same_case() -> None:
    for seed in range(50):
        assert recipe_of(seed, Options()) == recipe_of(seed, Options())


def test_options_narrow_a_case_and_change_nothing_else() -> None:
    for seed in range(100):
        free = recipe_of(seed, Options())
        narrow = recipe_of(seed, Options(targets=("sm_90",), passes=("forward",)))
        if free.passes:
            assert narrow.target == "sm_90" and narrow.passes == ("forward",)
            assert replace(narrow, target=free.target, passes=free.passes, dtype=free.dtype).mask == free.mask
        assert narrow.passes == () or free.passes != ()
    sanitized = recipe_of(3, Options(sanitize="address"))
    assert sanitized.sanitize == "address" and sanitized.passes


def test_targets_of_a_gpu() -> None:
    assert targets_of_gpu(9, 0) == ("sm_90", "sm_90a")
    assert targets_of_gpu(8, 9) == ("sm_80", "sm_86", "sm_87", "sm_89")
