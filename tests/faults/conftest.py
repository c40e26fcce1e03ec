"""Emitted forward kernels, launched on the emulator with a changed text: what planted faults need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import flashgen.language as fg
from flashgen import attention
from flashgen.attention import Attention
from flashgen.attention import callable as callable_module
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.mma_sync.decode_plans import DecodePlan
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan
from flashgen.codegen.plan import Plan
from flashgen.codegen.stages import Kernels, forward_kernels
from flashgen.codegen.targets import target_named
from flashgen.launch.engines import Emulator
from flashgen.runtime.schedule import Schedule
from flashgen.verify import Shape, judged, random_inputs
from flashgen.verify.problems import poisoned_outputs

SEED = 11


@dataclass(frozen=True)
class Subject:
    """A kernel and one call of it. The tiles are small, so that a small call has several of them and several warps."""

    spec: fg.AttentionSpec
    shape: Shape
    stages: int = 1
    tile_k: int = 32
    target: str = "sm_80"
    packed_heads: int = 1
    splits: int | None = None
    scheduled: bool = False

    @property
    def plan(self) -> Plan:
        if self.scheduled:
            return DecodePlan(16, self.tile_k, 2, self.stages, scheduled=True)
        if self.splits:
            return DecodePlan(16, self.tile_k, 2, self.stages)
        if self.target == "sm_90a":
            return HopperPlan(2, self.tile_k, self.stages, takes_turns=True, packed_heads=self.packed_heads)
        return ForwardPlan(32, self.tile_k, 2, self.stages)

    @property
    def compiled(self) -> Attention:
        """The kernel as it is emitted."""
        return attention.compile(self.spec, target=self.target, emulate=True, plan=self.plan)

    @property
    def shared_bytes(self) -> int:
        return self.compiled.plan.shared_bytes(self.spec)


@dataclass(frozen=True)
class Outcome:
    """What a launch wrote into outputs that were full of NaN."""

    subject: Subject
    out: np.ndarray[Any, Any]
    lse: np.ndarray[Any, Any]
    inputs: Any = field(repr=False)

    @property
    def holds_nan(self) -> bool:
        return bool(np.isnan(self.out.astype(np.float32)).any() or np.isnan(self.lse).any())

    @property
    def is_right(self) -> bool:
        """The verdict of `flashgen verify`."""
        i, dropout = self.inputs, {"seed": SEED} if self.subject.spec.dropout else {}
        return judged(self.subject.spec, i.q, i.k, i.v, self.out, self.lse, i.captures, **dropout).ok


Launch = Callable[..., Outcome]


def _launch(
    subject: Subject,
    source: str | None = None,
    *,
    sanitize: Any = None,
    schedule: Schedule | None = None,
    shared_bytes: int | None = None,
) -> Outcome:
    """A call of the subject whose kernel has `source` for its text."""
    spec = subject.spec
    inputs = random_inputs(spec, subject.shape, seed=1)
    out, lse = poisoned_outputs(spec, inputs.q, inputs.v)

    def render(*how: Any, plan: Any) -> Kernels:
        kernels = forward_kernels(*how, plan=plan)
        kernel = kernels["forward"]
        shared = kernel.shared_bytes if shared_bytes is None else shared_bytes
        changed = replace(kernel, source=source or kernel.source, shared_bytes=shared)
        return {**kernels, "forward": changed}

    with mock.patch.object(callable_module, "forward_kernels", render):
        changed = Attention(
            spec, target_named(subject.target), Emulator(sanitize, schedule or Schedule()), subject.plan
        )
    how = {"num_splits": subject.splits} | ({"seed": SEED} if spec.dropout else {})
    changed(inputs.q, inputs.k, inputs.v, return_lse=True, out=(out, lse), **how, **inputs.captures)
    return Outcome(subject, out, lse, inputs)


@pytest.fixture(scope="session")
def launch() -> Launch:
    return _launch


@pytest.fixture(scope="session")
def subjects() -> dict[str, Subject]:
    """Calls with several tiles of queries and keys, a ragged last one of each, and, where masked, rows without keys."""
    ragged, rows_without_keys = Shape(70, 100, 1, 2, 1), Shape(70, 50, 1, 2, 1)
    causal = fg.AttentionSpec(16, mask=fg.causal())
    return {
        "one stage": Subject(causal, ragged, stages=1),
        "two stages": Subject(causal, ragged, stages=2),
        "one key over": Subject(causal, Shape(64, 97, 1, 1, 1)),
        "wide values": Subject(fg.AttentionSpec(16, value_dim=64, mask=fg.causal()), ragged),
        # Rows outgrow their references: with the default scale, random scores hardly differ, and nothing is rescaled.
        "steep scores": Subject(fg.AttentionSpec(16, scale=4.0, mask=fg.causal()), ragged),
        "rows without keys": Subject(causal, rows_without_keys),
        "grouped heads": Subject(fg.AttentionSpec(16), Shape(40, 40, 1, 4, 2)),
        "dropout": Subject(fg.AttentionSpec(16, dropout=0.3), Shape(40, 70, 2, 2, 2)),
        "window": Subject(fg.AttentionSpec(16, mask=fg.sliding_window(40)), ragged),
        "score": Subject(fg.AttentionSpec(16, score=fg.alibi("slopes")), ragged),
        "distances": Subject(fg.AttentionSpec(16, score=fg.relative_bias("table", 24)), Shape(70, 100, 1, 2, 2)),
        "hopper, distances": Subject(
            fg.AttentionSpec(16, score=fg.relative_bias("table", 24)), Shape(150, 200, 1, 2, 2), target="sm_90a"
        ),
        "hopper": Subject(
            fg.AttentionSpec(32, scale=4.0, mask=fg.causal()), Shape(150, 200, 1, 2, 2), stages=2, target="sm_90a"
        ),
        # Two draws. A step is three blocks of keys, so that two of a warp's 32 lanes prepare none.
        "hopper, dropout": Subject(
            fg.AttentionSpec(16, dropout=0.3), Shape(70, 1990, 2, 1, 1), stages=2, tile_k=96, target="sm_90a"
        ),
        # The output takes the place of Q, where its panels are narrower: a warp's rows lie over those of others.
        "hopper, no room": Subject(
            fg.AttentionSpec(256, value_dim=240), Shape(100, 100, 1, 1, 1), stages=2, tile_k=80, target="sm_90a"
        ),
        # Several tails a block: a tile of keys is two pages, or a part of one.
        "hopper, pages": Subject(
            fg.AttentionSpec(32, mask=fg.causal(), page_size=16), Shape(260, 201, 3, 2, 1), stages=2, target="sm_90a"
        ),
        "hopper, large pages": Subject(
            fg.AttentionSpec(32, mask=fg.causal(), page_size=64), Shape(150, 201, 2, 2, 1), stages=2, target="sm_90a"
        ),
        "one split": Subject(causal, Shape(5, 210, 1, 6, 2), stages=2, splits=1),
        "splits": Subject(causal, Shape(7, 195, 1, 6, 2), stages=2, splits=3),
        "splits of a head": Subject(causal, Shape(5, 195, 1, 2, 2), stages=2, splits=3),
        "splits, steep scores": Subject(fg.AttentionSpec(16, scale=4.0), Shape(5, 210, 1, 6, 2), stages=2, splits=2),
        "splits, dropout": Subject(fg.AttentionSpec(16, dropout=0.3), Shape(20, 210, 2, 6, 2), stages=2, splits=2),
        "splits, rows without keys": Subject(causal, Shape(20, 12, 1, 2, 1), stages=2, splits=2),
        "splits, one stage": Subject(causal, Shape(5, 190, 1, 6, 2), stages=1, splits=2),
        "pages": Subject(
            fg.AttentionSpec(16, mask=fg.causal(), page_size=4), Shape(5, 90, 3, 6, 2), stages=2, splits=2
        ),
        "large pages": Subject(
            fg.AttentionSpec(16, mask=fg.causal(), page_size=64), Shape(5, 190, 3, 6, 2), stages=2, splits=2
        ),
        "bytes": Subject(
            fg.AttentionSpec(32, mask=fg.causal(), kv_dtype="int8"), Shape(5, 190, 1, 6, 2), stages=2, splits=2
        ),
        "runs": Subject(
            fg.AttentionSpec(16, mask=fg.causal(), page_size=4), Shape(5, 190, 5, 6, 2), stages=2, scheduled=True
        ),
        "packed": Subject(causal, Shape(70, 100, 1, 8, 2), stages=2, target="sm_90a", packed_heads=4),
    }
