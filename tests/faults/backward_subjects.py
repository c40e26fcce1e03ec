"""Calls of mma.sync's backward on the emulator, with the text of one kernel changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest import mock

import numpy as np

import flashgen.codegen.mma_sync.backward as backward_module
import flashgen.language as fg
from flashgen import reference
from flashgen.attention import Attention
from flashgen.codegen.mma_sync.backward_plans import BackwardPlan, QueriesPlan
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.shared_memory import SharedMemoryLayout
from flashgen.codegen.stages import Kernels, backward_kernels
from flashgen.codegen.targets import TARGETS
from flashgen.launch.engines import Emulator, EmulatorRunner
from flashgen.runtime.schedule import Schedule
from flashgen.verify import Shape, gradients_by_name, judged_gradients, learned, random_gradients, random_inputs
from flashgen.verify.gradients import poisoned_gradients
from planting import Result

SEED = 11
_PLAN = BackwardPlan(32, 32, 2)
RAGGED = Shape(70, 100, 1, 2, 1)  # several tiles in both directions, partial last ones, and a group of two query heads


@dataclass(frozen=True)
class BackwardSubject:
    """A backward pass and one call of it, with small tiles, so that a small call has several of them.

    Attributes:
        part: the kernel in which faults are planted.
        of_lse: whether the LSE has a gradient, too.
    """

    spec: fg.AttentionSpec
    plan: BackwardPlan = _PLAN
    queries_plan: QueriesPlan | None = None
    part: str = "dkdv"
    shape: Shape = RAGGED
    of_lse: bool = False

    @property
    def deterministic(self) -> bool:
        return self.queries_plan is not None

    def texts(self) -> dict[str, str]:
        return {self.part: _rendered(self)[self.part].source}

    def run(
        self, texts: Mapping[str, str] | None, *, sanitize: Any, schedule: Schedule, shared_bytes: int = 0
    ) -> Result:
        kernels = _rendered(self)
        kernel = kernels[self.part]
        source = texts[self.part] if texts else kernel.source
        shared = SharedMemoryLayout(min_bytes=kernel.shared_bytes + shared_bytes)
        changed = replace(kernel, source=source, shared=shared)
        engine = SanitizesOne(sanitize, schedule, entry=kernel.entry) if texts else Emulator(sanitize, schedule)
        attention = Attention(self.spec, TARGETS["sm_80"], engine, deterministic=self.deterministic)
        attention.__dict__["backward_kernels"] = {**kernels, self.part: changed}
        inputs, d_out, out, lse, given = _problem(self.spec, self.shape, self.of_lse)
        into = poisoned_gradients(self.spec, inputs)
        gradients = attention.backward(d_out, inputs.q, inputs.k, inputs.v, out, lse, into=into, **given)
        found = gradients_by_name(gradients)
        verdicts = judged_gradients(self.spec, inputs.q, inputs.k, inputs.v, d_out, found, **given)
        holds_nan = any(bool(np.isnan(array.astype(np.float32)).any()) for array in found.values())
        return Result(all(verdict.ok for verdict in verdicts.values()), holds_nan)


@dataclass(frozen=True)
class SanitizesOne(Emulator):
    """Sanitizes only the kernel in which a fault is planted.

    The other kernels of the pass are sanitized in the call without a fault, which is checked, too.
    """

    entry: str = ""

    def runner(self, kernel: RenderedKernel, prebuild: str) -> EmulatorRunner:
        return EmulatorRunner(kernel, self.sanitize if kernel.entry == self.entry else None, self.schedule)


@cache
def _rendered(subject: BackwardSubject) -> Kernels:
    chosen: Callable[..., Any] = lambda *_: subject.queries_plan
    with mock.patch.object(backward_module, "choose_queries_plan", chosen):
        return backward_kernels(subject.spec, TARGETS["sm_80"], subject.deterministic, plan=subject.plan)


@cache
def _problem(spec: fg.AttentionSpec, shape: Shape, of_lse: bool) -> tuple[Any, ...]:
    inputs = random_inputs(spec, shape, seed=1)
    d_out, d_lse = random_gradients(spec, shape, 1, of_lse)
    given = {**inputs.captures, **({"seed": SEED} if spec.dropout else {})}
    out, lse = reference.attention(spec, inputs.q, inputs.k, inputs.v, return_lse=True, **given)
    return inputs, d_out, out.astype(inputs.q.dtype), lse.astype(np.float32), {"d_lse": d_lse, **given}


def backward_subjects() -> dict[str, BackwardSubject]:
    def causal(dim: int) -> fg.AttentionSpec:
        return fg.AttentionSpec(dim, mask=fg.causal(align="top_left"))  # no query attends to the last keys

    exact = QueriesPlan(32, 32, 2)
    table = fg.Tensor("table", "float32", 2, grad=True)
    by_key = fg.Tensor("by_key", "float32", 1, grad=True)
    by_query = fg.Tensor("by_query", "float32", 1, grad=True)
    bias = fg.trace_score(lambda s, b, h, q, k: s + table[h, (q - k) % 7] + by_key[k] + by_query[q] * (k % 3), "bias")
    of_lanes = fg.trace_score(lambda s, b, h, q, k: s + table[h, k % 8 + q // 1000], "of_lanes")
    slopes = learned(fg.alibi("slopes"))
    dense = fg.trace_score(lambda s, b, h, q, k: s + fg.Tensor("dense", "float16", 3, grad=True)[h, q, k], "dense")
    # Beyond the last key a score and its slope are infinite; beyond the last query the score is NaN.
    low = fg.trace_score(lambda s, b, h, q, k: fg.where(k < fg.len_k, s - 300, fg.exp(s + 1000)), "low")
    ends = fg.trace_score(lambda s, b, h, q, k: fg.where(q < fg.len_q, s, fg.log(s - 1000)), "ends")
    hidden = fg.trace_score(lambda s, b, h, q, k: fg.where(q % 3 == 0, -float("inf"), s), "hidden")
    return {
        # The dkdv kernel, by the warps that share keys, and by stages of Q and dO
        "one stage": BackwardSubject(causal(16), BackwardPlan(32, 32, 2, 1, 1)),
        "two stages": BackwardSubject(causal(16), BackwardPlan(32, 32, 2, 1, 2)),
        "split in 2": BackwardSubject(causal(32), BackwardPlan(32, 32, 4, 2, 2)),
        "split in 2, one stage": BackwardSubject(causal(32), BackwardPlan(32, 32, 4, 2, 1)),
        "split in 4": BackwardSubject(causal(64), BackwardPlan(64, 32, 8, 4, 2)),
        "split in 4, one stage": BackwardSubject(causal(64), BackwardPlan(64, 32, 8, 4, 1)),
        "exact, one stage": BackwardSubject(causal(16), BackwardPlan(32, 32, 2, 1, 1), exact),
        "exact, two stages": BackwardSubject(causal(16), BackwardPlan(32, 32, 2, 1, 2), exact),
        "exact, split in 2": BackwardSubject(causal(32), BackwardPlan(32, 32, 4, 2, 2), exact),
        "exact, split in 4": BackwardSubject(causal(64), BackwardPlan(64, 32, 8, 4, 1), exact),
        # The dq kernel
        "queries, one stage": BackwardSubject(causal(16), queries_plan=QueriesPlan(32, 32, 2, 1, 1), part="dq"),
        "queries, two stages": BackwardSubject(causal(16), queries_plan=QueriesPlan(32, 32, 2, 1, 2), part="dq"),
        "queries, split in 2": BackwardSubject(causal(32), queries_plan=QueriesPlan(32, 64, 4, 2, 2), part="dq"),
        "queries, split in 2, one stage": BackwardSubject(
            causal(32), queries_plan=QueriesPlan(32, 64, 4, 2, 1), part="dq"
        ),
        # warps that share wide rows, with 8 queries or keys each
        "wide": BackwardSubject(causal(264), BackwardPlan(32, 32, 8, 4, 1)),
        "wide queries": BackwardSubject(causal(264), queries_plan=QueriesPlan(32, 16, 4, 2, 1), part="dq"),
        "shared kv": BackwardSubject(fg.AttentionSpec(64, value_dim=24, shared_kv=True), BackwardPlan(32, 32, 4, 2)),
        "wide rows": BackwardSubject(causal(264), part="preprocess", shape=Shape(70, 50, 1, 2, 1)),
        # what a variant adds
        "no mask": BackwardSubject(fg.AttentionSpec(16)),
        "one query over": BackwardSubject(fg.AttentionSpec(16), shape=Shape(65, 40, 1, 2, 1)),
        "two groups, queries": BackwardSubject(
            fg.AttentionSpec(16), queries_plan=exact, part="dq", shape=Shape(40, 40, 1, 4, 2)
        ),
        "of the LSE": BackwardSubject(causal(16), part="preprocess", of_lse=True),
        "rows": BackwardSubject(causal(16), part="preprocess", shape=Shape(70, 50, 1, 2, 1)),
        "rows of nothing but -inf": BackwardSubject(fg.AttentionSpec(16, score=hidden), part="preprocess"),
        "sums": BackwardSubject(causal(16), part="postprocess"),
        "dropout": BackwardSubject(fg.AttentionSpec(16, dropout=0.3), shape=Shape(70, 100, 2, 2, 2)),
        "dropout, split in 2": BackwardSubject(fg.AttentionSpec(32, dropout=0.3), BackwardPlan(32, 32, 4, 2, 2)),
        "dropout, queries": BackwardSubject(
            fg.AttentionSpec(16, dropout=0.3), queries_plan=exact, part="dq", shape=Shape(70, 100, 2, 2, 2)
        ),
        "bias of ends": BackwardSubject(fg.AttentionSpec(16, score=ends)),
        "low scores": BackwardSubject(fg.AttentionSpec(16, score=low)),
        "low scores, queries": BackwardSubject(fg.AttentionSpec(16, score=low), queries_plan=exact, part="dq"),
        "window": BackwardSubject(fg.AttentionSpec(16, mask=fg.sliding_window(80))),
        "softcap": BackwardSubject(fg.AttentionSpec(16, scale=1.0, score=fg.softcap(2))),
        "softcap, queries": BackwardSubject(
            fg.AttentionSpec(16, scale=1.0, score=fg.softcap(2)), queries_plan=exact, part="dq"
        ),
        "slopes": BackwardSubject(fg.AttentionSpec(16, mask=fg.causal(), score=slopes)),
        "exact slopes": BackwardSubject(fg.AttentionSpec(16, mask=fg.causal(), score=slopes), queries_plan=exact),
        "bias": BackwardSubject(fg.AttentionSpec(16, score=bias), shape=Shape(40, 70, 1, 2, 1)),
        "elements of lanes": BackwardSubject(fg.AttentionSpec(16, score=of_lanes), shape=Shape(40, 70, 1, 2, 1)),
        "pairs": BackwardSubject(fg.AttentionSpec(16, score=dense)),
        "dense": BackwardSubject(fg.AttentionSpec(16, score=dense), part="dense_dense", shape=Shape(150, 133, 3, 2, 1)),
        "distances": BackwardSubject(
            fg.AttentionSpec(16, score=fg.relative_bias(table, 2)), shape=Shape(40, 70, 1, 2, 1)
        ),
        "far distances": BackwardSubject(
            fg.AttentionSpec(16, score=fg.relative_bias(table, 2)),
            BackwardPlan(32, 32, 2, 1, 1),
            shape=Shape(70, 100, 1, 2, 1),
        ),
        "exact bias": BackwardSubject(
            fg.AttentionSpec(16, score=bias), queries_plan=exact, shape=Shape(40, 70, 1, 2, 1)
        ),
    }
