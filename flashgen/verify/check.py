"""Runs cases and judges what comes out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from flashgen import attention, reference
from flashgen.codegen.kernels import Pass
from flashgen.errors import FlashgenError
from flashgen.reference import Verdict, judge
from flashgen.runtime.schedule import Schedule, schedules
from flashgen.verify.gradients import (
    gradients_by_name,
    judged_gradients,
    poisoned_gradients,
    random_gradients,
    same_bits,
)
from flashgen.verify.problems import Inputs, poisoned_outputs, random_inputs
from flashgen.verify.variants import Case

if TYPE_CHECKING:
    from flashgen.language import AttentionSpec

Sanitizer = Literal["address", "thread"]


@dataclass(frozen=True)
class Result:
    """One run of one pass of a case.

    `verdicts` by output: "out", or "dq", "dk", "dv" and "d_<name>" for each capture with a gradient. They are empty,
    and `problem` is set, where it could not be compiled or launched; `problem` is also set where gradients that were to
    be deterministic are not.
    """

    case: Case
    engine: str
    seconds: float
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    problem: str | None = None
    pass_: Pass = "forward"

    @property
    def ok(self) -> bool:
        """Whether the kernels ran and the rule of `flashgen.reference.numerics` holds for every output."""
        return self.problem is None and bool(self.verdicts) and all(each.ok for each in self.verdicts.values())

    @property
    def worst(self) -> str | None:
        """The output that fails, or else comes nearest to its bound."""
        return max(self.verdicts, key=self._rank, default=None)

    @property
    def verdict(self) -> Verdict | None:
        """That of the worst output."""
        return self.verdicts[self.worst] if self.worst else None

    def _rank(self, name: str) -> tuple[bool, float]:
        verdict = self.verdicts[name]
        return not verdict.ok, verdict.error / verdict.bound if verdict.error < verdict.bound else 1.0


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
    passes: Sequence[Pass] = ("forward",),
    deterministic: bool = False,
    target: str | None = None,
    emulate: bool = False,
    sanitize: Sanitizer | None = None,
    schedule_count: int = 1,
    seed: int = 0,
) -> Iterator[Result]:
    """A result for each case and pass, and on the emulator for each of `schedule_count` orders of threads and copies.

    A case that does not compile or launch gives a failed result, and the rest goes on. Without emulate=True the GPU
    runs them, `schedule_count` times each, and sanitize may not be given. Inputs follow from `seed`.
    deterministic: take the backward that is, and hold the gradients of each run to the bits of the first.
    """
    orders: list[Schedule | None] = list(schedules(schedule_count)) if emulate else [None] * schedule_count
    for case in cases:
        runs = _Runs(case, seed, passes, deterministic)
        for schedule in orders:
            yield from runs.under(target=target, emulate=emulate, sanitize=sanitize, schedule=schedule)


class _Runs:
    """The runs of one case, on the same inputs each time."""

    def __init__(self, case: Case, seed: int, passes: Sequence[Pass], deterministic: bool) -> None:
        self.case, self.passes, self.deterministic = case, passes, deterministic
        self.inputs: Inputs = random_inputs(case.spec, case.shape, seed, case.captures)
        self.dropout: dict[str, Any] = {"seed": seed} if case.spec.dropout else {}
        self.upstream = random_gradients(case.spec, case.shape, seed, case.lse_gradient)
        self.first: dict[Pass, tuple[Mapping[str, Any], Mapping[str, Verdict]]] = {}

    @property
    def qkv(self) -> tuple[Any, Any, Any]:
        return self.inputs.q, self.inputs.k, self.inputs.v

    def under(self, **engine: Any) -> Iterator[Result]:
        """A result for each pass. The backward is given what the forward made, or, run alone, what the oracle says."""
        outputs = None
        if "forward" in self.passes:
            result, outputs = self._forward(**engine)
            yield result
        if "backward" in self.passes:
            yield self._backward(outputs or self._expected_outputs(), **engine)

    def _forward(self, **engine: Any) -> tuple[Result, tuple[Any, Any] | None]:
        begin, where, spec = time.perf_counter(), _described(**engine), self.case.spec
        given = {**self.dropout, **self.inputs.captures}
        try:
            compiled = attention.compile(spec, **engine)
            outputs = poisoned_outputs(spec, self.inputs.q, self.inputs.v)
            out, lse = compiled(*self.qkv, return_lse=True, out=outputs, **given)
        except FlashgenError as error:
            return Result(self.case, where, time.perf_counter() - begin, problem=_message(error)), None
        seconds = time.perf_counter() - begin

        def judged_anew() -> dict[str, Verdict]:
            return {"out": judged(spec, *self.qkv, out, lse, self.inputs.captures, **self.dropout)}

        verdicts, _ = self._compared("forward", {"out": out, "lse": lse}, judged_anew)
        return Result(self.case, where, seconds, verdicts), (out, lse)

    def _backward(self, outputs: tuple[Any, Any], **engine: Any) -> Result:
        begin, where, spec = time.perf_counter(), _described(**engine), self.case.spec
        d_out, d_lse = self.upstream
        given = {"d_lse": d_lse, **self.dropout, **self.inputs.captures}
        try:
            compiled = attention.compile(spec, deterministic=self.deterministic, **engine)
            into = poisoned_gradients(spec, self.inputs)
            found = gradients_by_name(compiled.backward(d_out, *self.qkv, *outputs, into=into, **given))
        except FlashgenError as error:
            return Result(self.case, where, time.perf_counter() - begin, problem=_message(error), pass_="backward")
        seconds = time.perf_counter() - begin
        verdicts, differing = self._compared(
            "backward", found, lambda: judged_gradients(spec, *self.qkv, d_out, found, out=outputs[0], **given)
        )
        problem = f"not deterministic: {', '.join(differing)} differ from the first run's" if differing else None
        return Result(self.case, where, seconds, verdicts, problem if self.deterministic else None, "backward")

    def _compared(
        self, pass_: Pass, found: Mapping[str, Any], judge_anew: Callable[[], Mapping[str, Verdict]]
    ) -> tuple[Mapping[str, Verdict], list[str]]:
        """Verdicts, and what differs from the first run; nothing is judged twice, as the oracle takes its time."""
        if pass_ not in self.first:
            self.first[pass_] = (found, judge_anew())
        first, verdicts = self.first[pass_]
        differing = [name for name in found if not same_bits(found[name], first[name])]
        return (judge_anew() if differing else verdicts), differing

    def _expected_outputs(self) -> tuple[Any, Any]:
        """The oracle's output and LSE, in the dtypes of a kernel's."""
        given = {**self.dropout, **self.inputs.captures}
        out, lse = reference.attention(self.case.spec, *self.qkv, return_lse=True, **given)
        return out.astype(self.inputs.q.dtype), lse.astype("float32")


def _message(error: FlashgenError) -> str:
    return f"{type(error).__name__}: {error}"


def _described(target: str | None, emulate: bool, sanitize: Sanitizer | None, schedule: Schedule | None) -> str:
    parts = ["emulator" if emulate else "gpu", target, sanitize, str(schedule) if schedule else None]
    return ", ".join(part for part in parts if part)
