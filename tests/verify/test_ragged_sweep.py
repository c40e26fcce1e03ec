"""The sweep of varlen batches: every named mask and score, in both families, against the reference."""

from __future__ import annotations

import pytest

from flashgen.verify import Case, ragged_cases, verify

CASES = ragged_cases()
TARGETS = ("sm_80", "sm_90a")


def name_of(case: Case) -> str:
    return case.spec.name


def assert_agrees(case: Case, **engine: object) -> None:
    for result in verify((case,), passes=("forward", "backward"), **engine):  # type: ignore[arg-type]
        assert result.ok, f"{result.case} on {result.engine}: {result.problem or result.verdict}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.rotated(36)
def test_on_the_emulator(case: Case, target: str) -> None:
    number = CASES.index(case)
    assert_agrees(case, emulate=True, target=target, deterministic=number % 4 in (1, 2), schedule_count=2)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[::3], ids=name_of)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.rotated(36)
def test_address_and_undefined_behaviour_sanitizers_find_nothing(case: Case, target: str) -> None:
    assert_agrees(case, emulate=True, target=target, sanitize="address")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[1::3], ids=name_of)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.rotated(36)
def test_thread_sanitizer_finds_nothing(case: Case, target: str) -> None:
    assert_agrees(case, emulate=True, target=target, sanitize="thread")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=name_of)
@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
def test_on_a_gpu(case: Case, deterministic: bool) -> None:
    assert_agrees(case, deterministic=deterministic, schedule_count=3)
