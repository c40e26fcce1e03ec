"""Runs cases and judges what comes out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from flashgen import attention, reference
from flashgen.errors import FlashgenError
from flashgen.reference import Verdict, judge
from flashgen.runtime.schedule import Schedule, schedules
from flashgen.verify.problems import poisoned_outputs, random_inputs
from flashgen.verify.variants import Case

if TYPE_CHECKING:
    from flashgen.language import AttentionSpec

Sanitizer = Literal["address", "thread"]


@dataclass(frozen=True)
class Result:
    """One run of a case. `problem` is set, and `verdict` None, where it could not be compiled or launched."""

    case: Case
    engine: str
    seconds: float
    verdict: Verdict | None = None
    problem: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the kernel ran and the rule of `flashgen.reference.numerics` holds."""
        return self.verdict is not None and self.verdict.ok


def judged(
    spec: AttentionSpec,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    captures: Mapping[str, Any],
    *,
    seed: int = 0,
    offset: int = 0,
) -> Verdict:
    """An output and its LSE, NumPy arrays, against standard attention in float64 and in the spec's dtype."""
    expected, expected_lse = reference.attention(spec, q, k, v, seed=seed, offset=offset, return_lse=True, **captures)
    low = reference.low_precision(spec, q, k, v, seed=seed, offset=offset, **captures)
    return judge(out, expected, low, lse, expected_lse)


def verify(
    cases: Iterable[Case],
    *,
    target: str | None = None,
    emulate: bool = False,
    sanitize: Sanitizer | None = None,
    schedule_count: int = 1,
    seed: int = 0,
) -> Iterator[Result]:
    """A result for each case, and on the emulator for each of `schedule_count` orders of threads and copies.

    A case that does not compile or launch gives a failed result, and the rest goes on. Without emulate=True the GPU
    runs them, and neither sanitize nor schedule_count may be given. Inputs follow from `seed`.
    """
    orders: list[Schedule | None] = list(schedules(schedule_count)) if emulate else [None] * schedule_count
    for case in cases:
        for schedule in orders:
            yield _run(case, seed, target=target, emulate=emulate, sanitize=sanitize, schedule=schedule)


def _run(case: Case, seed: int, **engine: Any) -> Result:
    begin = time.perf_counter()
    where = _described(**engine)
    inputs = random_inputs(case.spec, case.shape, seed, case.captures)
    dropout: dict[str, Any] = {"seed": seed} if case.spec.dropout else {}
    try:
        compiled = attention.compile(case.spec, **engine)
        outputs = poisoned_outputs(case.spec, inputs.q, inputs.v)
        out, lse = compiled(inputs.q, inputs.k, inputs.v, return_lse=True, out=outputs, **dropout, **inputs.captures)
    except FlashgenError as error:
        return Result(case, where, time.perf_counter() - begin, problem=f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - begin
    verdict = judged(case.spec, inputs.q, inputs.k, inputs.v, out, lse, inputs.captures, **dropout)
    return Result(case, where, seconds, verdict)


def _described(target: str | None, emulate: bool, sanitize: Sanitizer | None, schedule: Schedule | None) -> str:
    parts = ["emulator" if emulate else "gpu", target, sanitize, str(schedule) if schedule else None]
    return ", ".join(part for part in parts if part)
