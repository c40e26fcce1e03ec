"""The sweep: every named mask and score against the reference, on the emulator and its sanitizers, and on a GPU."""

from __future__ import annotations

import itertools

import pytest

import flashgen.language as fg
from flashgen.language import masks, parse, scores
from flashgen.verify import Case, all_cases, named_cases, stepping_cases, verify
from flashgen.verify.variants import DTYPES, HEAD_DIMS, variants

BACKWARD = ("backward",)


def grouped(cases: tuple[Case, ...]) -> list[tuple[Case, ...]]:
    """Groups cases by spec, so that one test runs one kernel at its shapes."""
    return [tuple(group) for _, group in itertools.groupby(cases, key=lambda case: case.spec)]


def name_of(cases: tuple[Case, ...]) -> str:
    return cases[0].spec.name


def in_turn(cases: tuple[Case, ...]) -> list[tuple[tuple[Case, ...], bool]]:
    """Groups by spec, alternating between the default and the deterministic backward, which halves the time.

    The period differs from that of dtypes and layouts, so that each mode has both.
    """
    return [(group, number % 4 in (1, 2)) for number, group in enumerate(grouped(cases))]


def name_in_turn(value: tuple[Case, ...] | bool) -> str:
    if isinstance(value, bool):
        return "deterministic" if value else "default"
    return name_of(value)


def assert_agrees(cases: tuple[Case, ...], **engine: object) -> None:
    for result in verify(cases, **engine):  # type: ignore[arg-type]
        assert result.ok, f"{result.case} on {result.engine}: {result.problem or result.verdict}"


@pytest.mark.parametrize("cases", grouped(named_cases()), ids=name_of)
@pytest.mark.rotated(4)
def test_on_the_emulator(cases: tuple[Case, ...]) -> None:
    assert_agrees(cases, emulate=True, schedule_count=2)


@pytest.mark.parametrize("cases", grouped(stepping_cases()), ids=name_of)
@pytest.mark.rotated(36)
def test_with_every_thread_order(cases: tuple[Case, ...]) -> None:
    assert_agrees(cases, emulate=True, schedule_count=8)


@pytest.mark.slow
@pytest.mark.parametrize("cases", grouped(named_cases(2)), ids=name_of)
@pytest.mark.rotated(36)
def test_address_and_undefined_behaviour_sanitizers_find_nothing(cases: tuple[Case, ...]) -> None:
    assert_agrees(cases, emulate=True, sanitize="address")


@pytest.mark.slow
@pytest.mark.parametrize("cases", grouped(stepping_cases()), ids=name_of)
@pytest.mark.rotated(36)
def test_thread_sanitizer_finds_nothing(cases: tuple[Case, ...]) -> None:
    assert_agrees(cases, emulate=True, sanitize="thread")


@pytest.mark.parametrize("cases", grouped(named_cases()), ids=name_of)
@pytest.mark.rotated(8)
def test_gradients_on_the_emulator(cases: tuple[Case, ...]) -> None:
    assert_agrees(cases, passes=BACKWARD, emulate=True)


@pytest.mark.parametrize("cases", grouped(stepping_cases()), ids=name_of)
@pytest.mark.rotated(36)
def test_gradients_with_every_thread_order(cases: tuple[Case, ...]) -> None:
    assert_agrees(cases, passes=BACKWARD, emulate=True, schedule_count=4)


@pytest.mark.parametrize("cases", grouped(stepping_cases()), ids=name_of)
@pytest.mark.rotated(36)
def test_deterministic_gradients_have_the_same_bits_in_every_thread_order(cases: tuple[Case, ...]) -> None:
    assert_agrees(cases, passes=BACKWARD, deterministic=True, emulate=True, schedule_count=4)


@pytest.mark.slow
@pytest.mark.parametrize(("cases", "deterministic"), in_turn(named_cases(1)), ids=name_in_turn)
@pytest.mark.rotated(36)
def test_address_and_undefined_behaviour_sanitizers_find_nothing_in_the_backward(
    cases: tuple[Case, ...], deterministic: bool
) -> None:
    assert_agrees(cases, passes=BACKWARD, deterministic=deterministic, emulate=True, sanitize="address")


@pytest.mark.slow
@pytest.mark.parametrize(("cases", "deterministic"), in_turn(stepping_cases()), ids=name_in_turn)
@pytest.mark.rotated(36)
def test_thread_sanitizer_finds_nothing_in_the_backward(cases: tuple[Case, ...], deterministic: bool) -> None:
    assert_agrees(cases, passes=BACKWARD, deterministic=deterministic, emulate=True, sanitize="thread")


@pytest.mark.gpu
@pytest.mark.parametrize("cases", grouped(all_cases()), ids=name_of)
@pytest.mark.quick_every(33)
def test_on_a_gpu(cases: tuple[Case, ...]) -> None:
    assert_agrees(cases, passes=("forward", "backward"))


@pytest.mark.gpu
@pytest.mark.parametrize("cases", grouped(named_cases()) + grouped(all_cases())[::19], ids=name_of)
@pytest.mark.quick_every(6)
def test_the_other_family_on_a_gpu(cases: tuple[Case, ...], other_target: str) -> None:
    """Its forward; both have the same backward kernels."""
    assert_agrees(cases, target=other_target)


@pytest.mark.gpu
@pytest.mark.parametrize("cases", grouped(named_cases()), ids=name_of)
@pytest.mark.quick_every(8)
def test_deterministic_gradients_have_the_same_bits_in_100_runs_on_a_gpu(cases: tuple[Case, ...]) -> None:
    assert_agrees(cases[:1], passes=BACKWARD, deterministic=True, schedule_count=100)


def test_the_small_sweep_covers_head_dims_dtypes_and_layouts() -> None:
    specs = [case.spec for case in named_cases()]
    assert {spec.head_dim for spec in specs} == set(HEAD_DIMS)
    assert {spec.dtype for spec in specs} == set(DTYPES)
    assert {spec.layout for spec in specs} == {"bhsd", "bshd"}
    assert any(spec.head_dim != spec.value_dim for spec in specs)


def test_the_full_sweep_covers_every_pair() -> None:
    specs = {case.spec for case in all_cases()}
    assert len(specs) == len(variants()) * len(HEAD_DIMS) * len(DTYPES)


def test_variants_that_are_not_in_the_sweep_are_appended(monkeypatch: pytest.MonkeyPatch) -> None:
    every = lambda n: fg.trace_mask(lambda b, h, q, k: (q - k) % n == 0, f"every({n})")
    cooled = lambda t: fg.trace_score(lambda score, b, h, q, k: score / t, f"cooled({t})")
    monkeypatch.setitem(parse.MASKS, "every", every)
    monkeypatch.setitem(parse.SCORES, "cooled", cooled)
    monkeypatch.setattr(masks, "EXAMPLES", ("causal()", "every(4)"))
    monkeypatch.setattr(scores, "EXAMPLES", ("softcap(30)", "cooled(2)"))
    *chosen, new_mask, new_score = variants()
    assert (str(new_mask.mask), new_mask.score) == ("every(4)", None)
    assert (str(new_score.mask), str(new_score.score)) == ("causal()", "cooled(2)")
    assert not any("every" in str(variant.mask) or "cooled" in str(variant.score) for variant in chosen)
