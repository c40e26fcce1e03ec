"""Calls of emitted forward and decode kernels on the emulator, with the kernel's text changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np

import flashgen.language as fg
from flashgen.attention import Attention
from flashgen.attention import callable as callable_module
from flashgen.codegen.hopper.decode_plans import HopperDecodePlan
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.mma_sync.decode_plans import DecodePlan
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan
from flashgen.codegen.plan import Plan
from flashgen.codegen.shared_memory import SharedMemoryLayout
from flashgen.codegen.stages import Kernels, forward_kernels
from flashgen.codegen.targets import target_named
from flashgen.launch.engines import Emulator
from flashgen.runtime.schedule import Schedule
from flashgen.verify import Shape, judged, random_inputs
from flashgen.verify.problems import poisoned_outputs
from planting import Result

_SEED = 11
_RECORDS: dict[str, Any] = {
    "head_dim": 576,
    "value_dim": 512,
    "dtype": "bfloat16",
    "shared_kv": True,
    "kv_dtype": "fp8_ds_mla",
}
_CHANGED = ("forward", "merge")  # roles of the kernels in which faults are planted


@dataclass(frozen=True)
class ForwardSubject:
    """A kernel and one call of it, with small tiles, so that a small call has several of them and several warps."""

    spec: fg.AttentionSpec
    shape: Shape
    stages: int = 1
    tile_k: int = 32
    target: str = "sm_80"
    packed_heads: int = 1
    splits: int | None = None
    scheduled: bool = False
    split: int = 1

    @property
    def plan(self) -> Plan:
        if self.target == "sm_90a" and (self.splits or self.scheduled):
            return HopperDecodePlan(self.tile_k, self.stages, self.scheduled)
        if self.scheduled:
            return DecodePlan(16, self.tile_k, 2, self.stages, scheduled=True)
        if self.splits:
            return DecodePlan(16, self.tile_k, max(self.split, 2), self.stages, split=self.split)
        if self.target == "sm_90a":
            heads = {"packed_heads": self.packed_heads, "split": self.split}
            return HopperPlan(2, self.tile_k, self.stages, takes_turns=self.split == 1, **heads)
        return ForwardPlan(32, self.tile_k, 2 * self.split, self.stages, split=self.split)

    def _kernels(self) -> Kernels:
        return forward_kernels(self.spec, target_named(self.target), plan=self.plan)

    def texts(self) -> dict[str, str]:
        return {role: kernel.source for role, kernel in self._kernels().items() if role in _CHANGED}

    def run(
        self, texts: Mapping[str, str] | None, *, sanitize: Any, schedule: Schedule, shared_bytes: int = 0
    ) -> Result:
        inputs = random_inputs(self.spec, self.shape, seed=1)
        out, lse = poisoned_outputs(self.spec, inputs.q)
        kernels = dict(self._kernels())
        shared = SharedMemoryLayout(min_bytes=kernels["forward"].shared_bytes + shared_bytes)
        kernels["forward"] = replace(kernels["forward"], shared=shared)
        kernels |= {role: replace(kernels[role], source=text) for role, text in (texts or {}).items()}
        with mock.patch.object(callable_module, "forward_kernels", lambda *_, plan: kernels):
            engine = Emulator(sanitize, schedule)
            attention = Attention(self.spec, target_named(self.target), engine, self.plan)
        seed = {"seed": _SEED} if self.spec.dropout else {}
        attention(
            *(inputs.q, inputs.k, inputs.v),
            return_lse=True,
            out=(out, lse),
            num_splits=self.splits,
            **seed,
            **inputs.captures,
        )
        verdict = judged(self.spec, inputs.q, inputs.k, inputs.v, out, lse, inputs.captures, **seed)
        return Result(verdict.ok, bool(np.isnan(out.astype(np.float32)).any() or np.isnan(lse).any()))


def added_array(head_dim: int) -> fg.AttentionSpec:
    """Returns a spec whose scores add the elements of a captured array, of which kernels load tiles."""
    bias = fg.Tensor("bias", "float16", 3)
    return fg.AttentionSpec(head_dim, score=lambda s, b, h, q, k: s + bias[h, q, k])


def forward_subjects() -> dict[str, ForwardSubject]:
    """Returns calls with several tiles, the last ones partial, and, where masked, rows without keys."""
    ragged, rows_without_keys = Shape(70, 100, 1, 2, 1), Shape(70, 50, 1, 2, 1)
    causal = fg.AttentionSpec(16, mask=fg.causal())
    return {
        "one stage": ForwardSubject(causal, ragged, stages=1),
        "two stages": ForwardSubject(causal, ragged, stages=2),
        "one key over": ForwardSubject(causal, Shape(64, 97, 1, 1, 1)),
        "wide values": ForwardSubject(fg.AttentionSpec(16, value_dim=64, mask=fg.causal()), ragged),
        # Rows exceed their maxima: at the default scale, random scores vary too little for any rescaling.
        "steep scores": ForwardSubject(fg.AttentionSpec(16, scale=4.0, mask=fg.causal()), ragged),
        "rows without keys": ForwardSubject(causal, rows_without_keys),
        "grouped heads": ForwardSubject(fg.AttentionSpec(16), Shape(40, 40, 1, 4, 2)),
        "dropout": ForwardSubject(fg.AttentionSpec(16, dropout=0.3), Shape(40, 70, 2, 2, 2)),
        "window": ForwardSubject(fg.AttentionSpec(16, mask=fg.sliding_window(40)), ragged),
        "score": ForwardSubject(fg.AttentionSpec(16, score=fg.alibi("slopes")), ragged),
        "distances": ForwardSubject(fg.AttentionSpec(16, score=fg.relative_bias("table", 24)), Shape(70, 100, 1, 2, 2)),
        "hopper, distances": ForwardSubject(
            fg.AttentionSpec(16, score=fg.relative_bias("table", 24)), Shape(150, 200, 1, 2, 2), target="sm_90a"
        ),
        "hopper": ForwardSubject(
            fg.AttentionSpec(32, scale=4.0, mask=fg.causal()), Shape(150, 200, 1, 2, 2), stages=2, target="sm_90a"
        ),
        "hopper, array": ForwardSubject(added_array(32), Shape(150, 192, 3, 2, 2), stages=2, target="sm_90a"),
        # Two draws. A step has three blocks of keys, so that two of a warp's 32 lanes draw nothing.
        "hopper, dropout": ForwardSubject(
            fg.AttentionSpec(16, dropout=0.3), Shape(70, 1990, 2, 1, 1), stages=2, tile_k=96, target="sm_90a"
        ),
        # The output overlays Q, whose panels are narrower: rows of a warp overlay those of others.
        "hopper, no room": ForwardSubject(
            fg.AttentionSpec(256, value_dim=240), Shape(100, 100, 1, 1, 1), stages=2, tile_k=80, target="sm_90a"
        ),
        # Several tails per block: a tile of keys is two pages, or a part of one.
        "hopper, pages": ForwardSubject(
            fg.AttentionSpec(32, mask=fg.causal(), page_size=16), Shape(260, 201, 3, 2, 1), stages=2, target="sm_90a"
        ),
        "hopper, large pages": ForwardSubject(
            fg.AttentionSpec(32, mask=fg.causal(), page_size=64), Shape(150, 201, 2, 2, 1), stages=2, target="sm_90a"
        ),
        # Several work tiles per block, with converted queries in shared memory, and keys of two pages each.
        "hopper, 8 bits": ForwardSubject(
            fg.AttentionSpec(
                160, dtype="bfloat16", value_dim=32, mask=fg.causal(), page_size=16, kv_dtype="float8_e4m3fn"
            ),
            Shape(260, 201, 3, 2, 1),
            stages=2,
            target="sm_90a",
        ),
        # Consumers hold a part of the queries in registers.
        "hopper, 8 bits, tiles of two pages": ForwardSubject(
            fg.AttentionSpec(128, dtype="bfloat16", mask=fg.causal(), page_size=32, kv_dtype="float8_e4m3fn"),
            Shape(140, 201, 2, 2, 1),
            stages=2,
            tile_k=64,
            target="sm_90a",
        ),
        "one split": ForwardSubject(causal, Shape(5, 210, 1, 6, 2), stages=2, splits=1),
        "splits": ForwardSubject(causal, Shape(7, 195, 1, 6, 2), stages=2, splits=3),
        "splits of a head": ForwardSubject(causal, Shape(5, 195, 1, 2, 2), stages=2, splits=3),
        "splits, steep scores": ForwardSubject(
            fg.AttentionSpec(16, scale=4.0), Shape(5, 210, 1, 6, 2), stages=2, splits=2
        ),
        "splits, dropout": ForwardSubject(
            fg.AttentionSpec(16, dropout=0.3), Shape(20, 210, 2, 6, 2), stages=2, splits=2
        ),
        "splits, rows without keys": ForwardSubject(causal, Shape(20, 12, 1, 2, 1), stages=2, splits=2),
        "splits, one stage": ForwardSubject(causal, Shape(5, 190, 1, 6, 2), stages=1, splits=2),
        "pages": ForwardSubject(
            fg.AttentionSpec(16, mask=fg.causal(), page_size=4), Shape(5, 90, 3, 6, 2), stages=2, splits=2
        ),
        "large pages": ForwardSubject(
            fg.AttentionSpec(16, mask=fg.causal(), page_size=64), Shape(5, 190, 3, 6, 2), stages=2, splits=2
        ),
        "bytes": ForwardSubject(
            fg.AttentionSpec(32, mask=fg.causal(), kv_dtype="int8"), Shape(5, 190, 1, 6, 2), stages=2, splits=2
        ),
        "runs": ForwardSubject(
            fg.AttentionSpec(16, mask=fg.causal(), page_size=4), Shape(5, 190, 5, 6, 2), stages=2, scheduled=True
        ),
        "float32": ForwardSubject(fg.AttentionSpec(16, value_dim=24, mask=fg.causal(), out_dtype="float32"), ragged),
        "hopper, float32": ForwardSubject(
            fg.AttentionSpec(16, value_dim=24, mask=fg.causal(), out_dtype="float32"),
            Shape(150, 200, 1, 2, 2),
            stages=2,
            target="sm_90a",
        ),
        # Two warpgroups share the rows of a CTA.
        "hopper, wide": ForwardSubject(
            fg.AttentionSpec(264, scale=1.0, mask=fg.causal()), Shape(150, 200, 1, 2, 2), 2, target="sm_90a", split=2
        ),
        # One step: with one stage, a later step waits for V, which is loaded when every warp has read Q.
        "hopper, wide, no room": ForwardSubject(
            fg.AttentionSpec(512, value_dim=448), Shape(150, 60, 1, 2, 2), 1, 64, target="sm_90a", split=2
        ),
        "hopper, V in K": ForwardSubject(
            fg.AttentionSpec(320, shared_kv=True),
            Shape(150, 200, 1, 2, 2),
            2,
            target="sm_90a",
            split=2,
        ),
        # Decode: two tiles of rows, the second one partial, and five splits or units of two steps each.
        "hopper decode": ForwardSubject(
            fg.AttentionSpec(320, shared_kv=True, scale=0.4, mask=fg.causal()),
            Shape(5, 300, 1, 16, 1),
            2,
            target="sm_90a",
            splits=5,
        ),
        "hopper decode, few splits": ForwardSubject(
            fg.AttentionSpec(320, shared_kv=True, scale=0.4, mask=fg.causal()),
            Shape(5, 300, 1, 16, 1),
            2,
            target="sm_90a",
            splits=3,
        ),
        "hopper decode, one split": ForwardSubject(
            fg.AttentionSpec(264, value_dim=200), Shape(5, 150, 2, 32, 2), 2, target="sm_90a", splits=1
        ),
        # K has columns beyond those that are V, and the score warpgroup holds a part of Q in registers.
        "hopper decode, latent": ForwardSubject(
            fg.AttentionSpec(576, value_dim=512, shared_kv=True, scale=0.4, mask=fg.causal()),
            Shape(5, 300, 1, 16, 1),
            2,
            target="sm_90a",
            splits=2,
        ),
        "hopper decode, units": ForwardSubject(
            fg.AttentionSpec(576, value_dim=512, shared_kv=True, scale=0.4, mask=fg.causal(), page_size=16),
            Shape(5, 140, 5, 16, 1),
            2,
            target="sm_90a",
            scheduled=True,
        ),
        # Three stages of K: its other columns, which have two, are loaded a step after the others.
        "hopper decode, pages": ForwardSubject(
            fg.AttentionSpec(576, value_dim=512, shared_kv=True, scale=0.4, page_size=32),
            Shape(5, 300, 2, 16, 1),
            3,
            target="sm_90a",
            splits=2,
        ),
        "records": ForwardSubject(
            fg.AttentionSpec(**_RECORDS, page_size=64, scale=0.4, mask=fg.causal()),
            Shape(5, 150, 2, 4, 1),
            3,
            splits=2,
            split=4,
        ),
        "records, small pages": ForwardSubject(
            fg.AttentionSpec(**_RECORDS, page_size=4), Shape(5, 150, 2, 4, 1), 2, splits=2, split=4
        ),
        "records, bulk": ForwardSubject(
            fg.AttentionSpec(**_RECORDS, page_size=64, scale=0.4, mask=fg.causal()),
            Shape(5, 150, 2, 4, 1),
            2,
            target="sm_90",
            splits=1,
            split=4,
        ),
        "hopper records": ForwardSubject(
            fg.AttentionSpec(**_RECORDS, page_size=16, scale=0.4, mask=fg.causal()),
            Shape(5, 250, 2, 16, 1),
            2,
            target="sm_90a",
            splits=2,
        ),
        "wide": ForwardSubject(fg.AttentionSpec(264, scale=1.0, mask=fg.causal()), ragged, split=2),
        "shared tiles": ForwardSubject(
            fg.AttentionSpec(264, scale=1.0, mask=fg.causal()), Shape(5, 150, 1, 6, 2), 2, 16, splits=2, split=2
        ),
        "shared tiles, 8 bits": ForwardSubject(
            fg.AttentionSpec(288, kv_dtype="int8"), Shape(5, 150, 1, 6, 2), 2, 16, splits=2, split=4
        ),
        "shared tiles, empty splits": ForwardSubject(
            fg.AttentionSpec(264, mask=fg.causal()), Shape(5, 20, 1, 6, 2), 2, 16, splits=4, split=2
        ),
        "shared tiles, large pages": ForwardSubject(
            fg.AttentionSpec(264, mask=fg.causal(), page_size=64), Shape(5, 150, 3, 2, 1), 2, 16, splits=2, split=2
        ),
        "packed": ForwardSubject(causal, Shape(70, 100, 1, 8, 2), stages=2, target="sm_90a", packed_heads=4),
    }
