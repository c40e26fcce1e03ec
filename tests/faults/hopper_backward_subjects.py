"""Calls of Hopper's backward on the emulator, with the text of one kernel changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import flashgen.language as fg
from flashgen import attention
from flashgen.codegen.hopper.backward_plans import HopperBackwardPlan
from flashgen.codegen.hopper.cluster_plans import HopperClusterPlan
from flashgen.codegen.hopper.wide_plans import HopperWidePlan
from flashgen.runtime.schedule import Schedule
from flashgen.verify import Shape, gradients_by_name, judged_gradients, random_gradients, random_inputs
from flashgen.verify.gradients import poisoned_gradients
from flashgen.verify.variants import learned
from forward_subjects import added_array
from planting import Result

# Several tiles of queries and of keys, the last ones partial, and a group of two query heads.
_SHAPE = Shape(330, 600, 1, 2, 1)
_SMALL = Shape(170, 200, 1, 2, 1)  # the same for clusters, whose tiles are smaller


@dataclass(frozen=True)
class HopperBackwardSubject:
    """A backward pass and one call of it.

    Attributes:
        part: the kernel in which faults are planted.
        options: options of `flashgen.compile`.
    """

    spec: fg.AttentionSpec
    part: str = "dkdv"
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    shape: Shape = _SHAPE

    def _compiled(self, **options: Any) -> attention.Attention:
        return attention.compile(self.spec, target="sm_90a", emulate=True, **self.options, **options)

    def texts(self) -> dict[str, str]:
        sources = self._compiled().backward_sources
        return {self.part: next(text for name, text in sources.items() if f"-{self.part}-" in name)}

    def run(
        self, texts: Mapping[str, str] | None, *, sanitize: Any, schedule: Schedule, shared_bytes: int = 0
    ) -> Result:
        inputs, out, lse, d_out, given = _problem(self)
        compiled = self._compiled(source=texts, sanitize=sanitize, schedule=schedule)
        into = poisoned_gradients(self.spec, inputs)
        found = compiled.backward(d_out, inputs.q, inputs.k, inputs.v, out, lse, into=into, **given)
        verdicts = judged_gradients(self.spec, inputs.q, inputs.k, inputs.v, d_out, gradients_by_name(found), **given)
        return Result(all(verdict.ok for verdict in verdicts.values()))


@cache
def _problem(subject: HopperBackwardSubject) -> tuple[Any, ...]:
    """Returns the inputs of a call, its output and LSE, the gradient of the output, and its other arguments."""
    inputs = random_inputs(subject.spec, subject.shape, seed=11)
    given = {**inputs.captures, **({"seed": 7} if subject.spec.dropout else {})}
    out, lse = subject._compiled()(inputs.q, inputs.k, inputs.v, return_lse=True, **given)
    return inputs, out, lse, random_gradients(subject.spec, subject.shape, 11)[0], given


def hopper_backward_subjects() -> dict[str, HopperBackwardSubject]:
    """Returns the kernels of each plan, and calls in which tiles of keys are split, contend, or are empty."""
    return {
        "keys": HopperBackwardSubject(
            fg.AttentionSpec(64, mask=fg.causal()), options={"backward_plan": HopperBackwardPlan(64)}
        ),
        "float32": HopperBackwardSubject(
            fg.AttentionSpec(64, mask=fg.causal(), grad_dtype="float32"),
            options={"backward_plan": HopperBackwardPlan(64)},
        ),
        "array": HopperBackwardSubject(added_array(64), shape=Shape(330, 592, 1, 2, 1)),
        "late": HopperBackwardSubject(fg.AttentionSpec(64, mask=fg.causal())),
        "chunks": HopperBackwardSubject(fg.AttentionSpec(144, value_dim=16, mask=fg.causal())),
        "wide": HopperBackwardSubject(
            fg.AttentionSpec(144, value_dim=136, mask=fg.causal()), options={"backward_plan": HopperWidePlan()}
        ),
        # With more stages of Q than of q * k, whose slots are therefore not free when those of Q are.
        "wide, learned": HopperBackwardSubject(
            fg.AttentionSpec(144, value_dim=136, mask=fg.causal(), score=learned(fg.softcap(20)(fg.alibi("slopes")))),
            options={"backward_plan": HopperWidePlan(32, 3)},
        ),
        "wide, dropped": HopperBackwardSubject(
            fg.AttentionSpec(144, value_dim=136, mask=fg.causal(), score=fg.softcap(20), dropout=0.25),
            options={"backward_plan": HopperWidePlan(32, 3)},
        ),
        "cluster": HopperBackwardSubject(
            fg.AttentionSpec(264, mask=fg.causal()),
            options={"backward_plan": HopperClusterPlan(2, 32)},
            shape=_SMALL,
        ),
        "cluster, queries": HopperBackwardSubject(
            fg.AttentionSpec(264, mask=fg.causal()), "dq", {"backward_plan": HopperClusterPlan(2, 32)}, shape=_SMALL
        ),
        "queries": HopperBackwardSubject(
            fg.AttentionSpec(64, mask=fg.causal()),
            "dq",
            {"deterministic": True, "backward_plan": HopperBackwardPlan(64)},
        ),
        "turns": HopperBackwardSubject(
            fg.AttentionSpec(64), options={"backward_plan": HopperBackwardPlan(64, in_turns=True)}
        ),
        "finished apart": HopperBackwardSubject(
            fg.AttentionSpec(64, mask=fg.causal()), options={"backward_plan": HopperBackwardPlan(64, finish_apart=True)}
        ),
        "untouched": HopperBackwardSubject(  # consecutive tiles of keys to which no query attends
            fg.AttentionSpec(64, mask=fg.trace_mask(lambda b, h, q, k: (k < 100) | (k >= 512))),
            options={"backward_plan": HopperBackwardPlan(64)},
        ),
        "parts": HopperBackwardSubject(  # a tile of keys in four splits
            fg.AttentionSpec(64), options={"backward_plan": HopperBackwardPlan(64)}, shape=Shape(2100, 90, 1, 1, 1)
        ),
        "before parts": HopperBackwardSubject(
            fg.AttentionSpec(64),
            "preprocess",
            options={"backward_plan": HopperBackwardPlan(64)},
            shape=Shape(2100, 90, 1, 1, 1),
        ),
        "distances": HopperBackwardSubject(fg.AttentionSpec(64, score=learned(fg.relative_bias("table", 24)))),
        "apart": HopperBackwardSubject(
            fg.AttentionSpec(64, mask=fg.causal()),
            options={"backward_plan": HopperBackwardPlan(128, early_scores=False, heads_apart=True)},
        ),
    }
