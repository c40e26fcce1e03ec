"""Runs cases and judges what comes out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from flashgen import attention, reference
from flashgen.attention.given_sources import Source
from flashgen.codegen.stages import Pass
from flashgen.errors import FlashgenError
from flashgen.reference import Verdict, judge
from flashgen.runtime.schedule import Schedule, schedules
from flashgen.verify.gradients import (
    expected_gradients,
    gradients_by_name,
    gradients_of_rounded_output,
    judged_by_name,
    poisoned_gradients,
    same_bits,
)
from flashgen.verify.problems import poisoned_outputs
from flashgen.verify.samples import Sample, samples, together
from flashgen.verify.variants import Case

if TYPE_CHECKING:
    from flashgen.language import AttentionSpec

Sanitizer = Literal["address", "thread"]
_Outputs = tuple[Any, Any]  # an output and its LSE


@dataclass(frozen=True)
class Result:
    """One run of one pass of a case.

    `verdicts` by output: "out", or "dq", "dk", "dv" and "d_<name>" for each capture with a gradient. They are empty,
    and `problem` is set, where the case could not be compiled or launched; `problem` is also set where gradients are
    not deterministic that were to be.
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
        """The worst output's verdict."""
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
    """Judges an output and its LSE, NumPy arrays, by standard attention in float64 and in the spec's dtype."""
    expected = _expected_outputs(spec, q, k, v, seed=seed, offset=offset, **captures)
    return judge(out, expected["out"], expected["low"], lse, expected["lse"])


def _expected_outputs(spec: AttentionSpec, q: Any, k: Any, v: Any, **given: Any) -> dict[str, Any]:
    """The output and its LSE in float64, and the output of standard attention in the spec's dtype."""
    out, lse = reference.attention(spec, q, k, v, return_lse=True, **given)
    return {"out": out, "lse": lse, "low": reference.low_precision(spec, q, k, v, **given)}


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
    source: Source | None = None,
) -> Iterator[Result]:
    """A result for each case and pass, and on the emulator for each of `schedule_count` orders of threads and copies.

    Over pages, and of 8-bit keys, there is no backward: the forward alone is verified.

    A case that does not compile or launch gives a failed result, and the rest goes on. Without emulate=True the GPU
    runs them, `schedule_count` times each, and sanitize may not be given. Inputs follow from `seed`.
    deterministic: take the deterministic backward, and compare each run's gradients bit by bit with the first run's.
    source: edited kernels of the one spec that all cases have, as `flashgen.compile` takes them.
    """
    orders: list[Schedule | None] = list(schedules(schedule_count)) if emulate else [None] * schedule_count
    for case in cases:
        runs = _Runs(case, seed, passes, deterministic, source)
        for schedule in orders:
            yield from runs.under(target=target, emulate=emulate, sanitize=sanitize, schedule=schedule)


class _Runs:
    """The runs of one case, on the same problems each time. Results of several problems are judged as one array."""

    def __init__(
        self, case: Case, seed: int, passes: Sequence[Pass], deterministic: bool, source: Source | None
    ) -> None:
        self.case, self.passes, self.deterministic, self.source = case, passes, deterministic, source
        self.samples = samples(case, seed, "backward" in passes)
        self.first: dict[Pass, tuple[Mapping[str, Any], Mapping[str, Verdict]]] = {}

    def under(self, **engine: Any) -> Iterator[Result]:
        """A result for each pass. The backward gets the forward's output, or, if it runs alone, the oracle's."""
        outputs = None
        if "forward" in self.passes:
            result, outputs = self._forward(**engine)
            yield result
        if "backward" in self.passes and not self.case.spec.of_cache:
            yield self._backward(outputs or [self._oracles(sample) for sample in self.samples], **engine)

    def _forward(self, **engine: Any) -> tuple[Result, list[_Outputs] | None]:
        begin, where, spec = time.perf_counter(), _described(**engine), self.case.spec
        try:
            compiled = attention.compile(spec, source=self.source, **engine)
            where = _described(**engine, edited=compiled.edited)
            outputs = [_called(compiled, spec, sample) for sample in self.samples]
        except FlashgenError as error:
            return Result(self.case, where, time.perf_counter() - begin, problem=_message(error)), None
        seconds = time.perf_counter() - begin
        found = together([{"out": out, "lse": lse} for out, lse in outputs])
        verdicts, _ = self._compared("forward", found, lambda: self._judged_outputs(found))
        return Result(self.case, where, seconds, verdicts), outputs

    def _backward(self, outputs: list[_Outputs], **engine: Any) -> Result:
        begin, where, spec = time.perf_counter(), _described(**engine), self.case.spec
        try:
            compiled = attention.compile(spec, deterministic=self.deterministic, source=self.source, **engine)
            where = _described(**engine, edited=compiled.edited)
            each = [_called_back(compiled, spec, *pair) for pair in zip(self.samples, outputs, strict=True)]
        except FlashgenError as error:
            return Result(self.case, where, time.perf_counter() - begin, problem=_message(error), pass_="backward")
        seconds, found = time.perf_counter() - begin, together(each)
        verdicts, differing = self._compared("backward", found, lambda: self._judged_gradients(found))
        problem = f"not deterministic: {', '.join(differing)} differ from the first run's" if differing else None
        return Result(self.case, where, seconds, verdicts, problem if self.deterministic else None, "backward")

    def _judged_outputs(self, found: Mapping[str, Any]) -> dict[str, Verdict]:
        each = [_expected_outputs(self.case.spec, *sample.qkv, **sample.options) for sample in self.samples]
        expected = together(each)
        return {"out": judge(found["out"], expected["out"], expected["low"], found["lse"], expected["lse"])}

    def _judged_gradients(self, found: Mapping[str, Any]) -> dict[str, Verdict]:
        def of_each(reference: Callable[..., Any]) -> list[Any]:
            return [
                reference(self.case.spec, *sample.qkv, sample.d_out, d_lse=sample.d_lse, **sample.options)
                for sample in self.samples
            ]

        expected, low = zip(*of_each(expected_gradients), strict=True)
        return judged_by_name(
            found, together(expected), together(low), lambda: together(of_each(gradients_of_rounded_output))
        )

    def _compared(
        self, pass_: Pass, found: Mapping[str, Any], judge_anew: Callable[[], Mapping[str, Verdict]]
    ) -> tuple[Mapping[str, Verdict], list[str]]:
        """Verdicts, and what differs from the first run. Equal results are not judged again, as the oracle is slow."""
        if pass_ not in self.first:
            self.first[pass_] = (found, judge_anew())
        first, verdicts = self.first[pass_]
        differing = [name for name in found if not same_bits(found[name], first[name])]
        return (judge_anew() if differing else verdicts), differing

    def _oracles(self, sample: Sample) -> _Outputs:
        """The oracle's output and LSE, in the dtypes that a kernel gives."""
        out, lse = reference.attention(self.case.spec, *sample.qkv, return_lse=True, **sample.options)
        return out.astype(sample.inputs.q.dtype), lse.astype("float32")


def _called(compiled: Any, spec: AttentionSpec, sample: Sample) -> _Outputs:
    """The output and LSE of a call that writes over NaN."""
    into = poisoned_outputs(spec, sample.inputs.q, sample.inputs.v)
    out, lse = compiled(*sample.qkv, return_lse=True, out=into, **sample.options)
    return out, lse


def _called_back(compiled: Any, spec: AttentionSpec, sample: Sample, outputs: _Outputs) -> dict[str, Any]:
    """The gradients by name of a call that writes over NaN."""
    into = poisoned_gradients(spec, sample.inputs)
    given = {"d_lse": sample.d_lse, **sample.options}
    return gradients_by_name(compiled.backward(sample.d_out, *sample.qkv, *outputs, into=into, **given))


def _message(error: FlashgenError) -> str:
    return f"{type(error).__name__}: {error}"


def _described(
    target: str | None,
    emulate: bool,
    sanitize: Sanitizer | None,
    schedule: Schedule | None,
    edited: Sequence[str] = (),
) -> str:
    parts = ["emulator" if emulate else "gpu", target, sanitize, str(schedule) if schedule else None]
    parts += [f"edited {part}" for part in edited]
    return ", ".join(part for part in parts if part)
