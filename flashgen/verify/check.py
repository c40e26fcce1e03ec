"""Runs cases and compares their results with the oracle."""

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
    """The result of one run of one pass of a case.

    `verdicts` are by output: "out", or "dq", "dk", "dv" and "d_<name>" for each capture with a gradient. If the case
    could not be compiled or launched, they are empty and `problem` is set. `problem` is also set if the gradients of a
    deterministic backward differ between runs.

    Attributes:
        case: what ran.
        engine: where it ran: the GPU or the emulator, with its options.
        seconds: how long it took.
        verdicts: the comparisons, by output.
        problem: why there are none, or None.
        pass_: the pass.
    """

    case: Case
    engine: str
    seconds: float
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    problem: str | None = None
    pass_: Pass = "forward"

    @property
    def ok(self) -> bool:
        """Whether the kernels ran and every output satisfies the rule of `flashgen.reference.numerics`."""
        return self.problem is None and bool(self.verdicts) and all(each.ok for each in self.verdicts.values())

    @property
    def worst(self) -> str | None:
        """The name of the output with the largest error relative to its bound; an output that fails comes first."""
        return max(self.verdicts, key=self._rank, default=None)

    @property
    def verdict(self) -> Verdict | None:
        """The verdict on the worst output."""
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
    """Compares an output and its LSE with standard attention in float64 and in the spec's dtype.

    Args:
        spec: the spec that was run.
        q, k, v: the inputs, NumPy arrays.
        out: the output, a NumPy array.
        lse: the log-sum-exp of each row, a NumPy array.
        captures: the captured arrays by name.
        seed, offset: the random state of dropout.
    """
    expected = _expected_outputs(spec, q, k, v, seed=seed, offset=offset, **captures)
    return judge(out, expected["out"], expected["low"], lse, expected["lse"])


def _expected_outputs(spec: AttentionSpec, q: Any, k: Any, v: Any, **given: Any) -> dict[str, Any]:
    """Returns the output and its LSE in float64, and the output of standard attention in the spec's dtype."""
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
    """Yields a result for each case, pass and run.

    A case that does not compile or launch yields a failed result, and the remaining cases still run. Specs with pages
    or 8-bit keys have no backward, so only their forward is verified.

    Args:
        cases: the cases to run.
        passes: the passes to run.
        deterministic: use the deterministic backward, and compare the gradients of each run bitwise with the first.
        target: the target architecture. Default: that of this machine's GPU.
        emulate: run on the emulator instead of the GPU.
        sanitize: the sanitizer to run under, for the emulator only.
        schedule_count: the number of runs; on the emulator each has a different order of threads and copies.
        seed: the seed of the inputs.
        source: edited kernels of the single spec that all cases share, as `flashgen.compile` takes them.
    """
    orders: list[Schedule | None] = list(schedules(schedule_count)) if emulate else [None] * schedule_count
    for case in cases:
        runs = _Runs(case, seed, passes, deterministic, source)
        for schedule in orders:
            yield from runs.run(target=target, emulate=emulate, sanitize=sanitize, schedule=schedule)


class _Runs:
    """The runs of one case, all on the same problems. The results of all problems are judged as one array."""

    def __init__(
        self, case: Case, seed: int, passes: Sequence[Pass], deterministic: bool, source: Source | None
    ) -> None:
        self.case, self.passes, self.deterministic, self.source = case, passes, deterministic, source
        self.samples = samples(case, seed, "backward" in passes)
        self.first: dict[Pass, tuple[Mapping[str, Any], Mapping[str, Verdict]]] = {}

    def run(self, **engine: Any) -> Iterator[Result]:
        """Yields a result for each pass.

        The backward takes the output of the forward kernels, or that of the oracle if only the backward is run.
        """
        outputs = None
        if "forward" in self.passes:
            result, outputs = self._forward(**engine)
            yield result
        if "backward" in self.passes and not self.case.spec.of_cache:
            yield self._backward(outputs or [self._oracle_outputs(sample) for sample in self.samples], **engine)

    def _forward(self, **engine: Any) -> tuple[Result, list[_Outputs] | None]:
        begin, where, spec = time.perf_counter(), _described(**engine), self.case.spec
        try:
            compiled = attention.compile(spec, source=self.source, **engine)
            where = _described(**engine, edited=compiled.edited)
            outputs = [_call_forward(compiled, spec, sample) for sample in self.samples]
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
            each = [_call_backward(compiled, spec, *pair) for pair in zip(self.samples, outputs, strict=True)]
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
        def for_each_sample(reference: Callable[..., Any]) -> list[Any]:
            return [
                reference(self.case.spec, *sample.qkv, sample.d_out, d_lse=sample.d_lse, **sample.options)
                for sample in self.samples
            ]

        expected, low = zip(*for_each_sample(expected_gradients), strict=True)
        return judged_by_name(
            found,
            together(expected),
            together(low),
            lambda: together(for_each_sample(gradients_of_rounded_output)),
        )

    def _compared(
        self, pass_: Pass, found: Mapping[str, Any], judge_results: Callable[[], Mapping[str, Verdict]]
    ) -> tuple[Mapping[str, Verdict], list[str]]:
        """Returns the verdicts and the names of the results that differ from the first run.

        Results equal to those of the first run keep its verdicts, because the oracle is slow.
        """
        if pass_ not in self.first:
            self.first[pass_] = (found, judge_results())
        first, verdicts = self.first[pass_]
        differing = [name for name in found if not same_bits(found[name], first[name])]
        return (judge_results() if differing else verdicts), differing

    def _oracle_outputs(self, sample: Sample) -> _Outputs:
        """Returns the output and LSE of the oracle, in the dtypes of a kernel's outputs."""
        out, lse = reference.attention(self.case.spec, *sample.qkv, return_lse=True, **sample.options)
        return out.astype(self.case.spec.out_element.numpy), lse.astype("float32")


def _call_forward(compiled: Any, spec: AttentionSpec, sample: Sample) -> _Outputs:
    """Returns the output and LSE of a call that writes to arrays full of NaN."""
    into = poisoned_outputs(spec, sample.inputs.q)
    out, lse = compiled(*sample.qkv, return_lse=True, out=into, **sample.options)
    return out, lse


def _call_backward(compiled: Any, spec: AttentionSpec, sample: Sample, outputs: _Outputs) -> dict[str, Any]:
    """Returns the gradients by name of a call that writes to arrays full of NaN."""
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
