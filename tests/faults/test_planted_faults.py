"""Each fault of the table is caught, by each of the checks that its row names."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest

from fault_table import FAULTS
from flashgen.errors import LaunchError
from flashgen.runtime.schedule import Schedule
from planting import Check, Fault, Result
from subjects import SUBJECTS

EVERY_ORDER = [Schedule("in_order", "late"), Schedule("greedy_warp", "early"), Schedule("random", "random", 5)]


def every_check() -> list[Any]:
    """Returns a test's parameters:

    each fault with each of its checks, of which the first always runs and others rotate.
    """
    return [
        pytest.param(fault, check, id=f"{fault}, {check.name}", marks=[pytest.mark.rotated(parts)] if parts > 1 else [])
        for fault in FAULTS
        for number, check in enumerate(fault.checks)
        for parts in [max(fault.rotated, 3 if number else 1)]
    ]


@cache
def as_emitted(kind: str, name: str, sanitize: Any, schedule: Schedule) -> Result:
    """Returns the result of a call without a fault."""
    return SUBJECTS[kind][name].run(None, sanitize=sanitize, schedule=schedule)


def is_caught(fault: Fault, check: Check, schedule: Schedule) -> bool:
    subject = SUBJECTS[fault.kind][fault.subject]
    texts, line = fault.plant(subject.texts())
    report = fault.expected_report(check, line)
    try:
        result = subject.run(texts, sanitize=check.sanitize, schedule=schedule, shared_bytes=fault.shared_bytes)
    except LaunchError as error:
        assert report is not None, f"the launch reports what a wrong result should show: {error}"
        assert re.search(report, str(error)), f"{report!r} is not in the report: {error}"
        return True
    assert result.is_right or not check.report_first, "the result is wrong, and nothing is reported"
    return check.catches(result)


@pytest.mark.parametrize(("fault", "check"), every_check())
def test_a_planted_fault_is_caught(fault: Fault, check: Check) -> None:
    """A check that finds a fault proves something only if it finds nothing in the kernel as it is emitted."""
    for schedule in check.schedules:
        assert as_emitted(fault.kind, fault.subject, check.sanitize, schedule).is_right
        if is_caught(fault, check, schedule):
            return
    pytest.fail(f"the fault is not caught under any of {len(check.schedules)} schedules")


@pytest.mark.parametrize("schedule", EVERY_ORDER, ids=str)
@pytest.mark.parametrize("name", SUBJECTS["Hopper's backward"])
@pytest.mark.covering(4)
def test_hoppers_backward_is_right_as_emitted(name: str, schedule: Schedule) -> None:
    assert as_emitted("Hopper's backward", name, None, schedule).is_right
