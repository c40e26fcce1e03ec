"""Calls of mixed batches on the emulator, with the text of one kernel changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

import flashgen as fg
from flashgen.codegen.hopper.mixed_plans import HopperMixedPlan
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.mma_sync.decode_plans import DecodePlan
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan
from flashgen.codegen.mma_sync.mixed_plans import MixedPlan
from flashgen.launch.engines import Emulator
from flashgen.runtime.schedule import Schedule
from flashgen.verify import judged
from flashgen.verify.problems import Shape, poisoned_outputs, random_inputs
from planting import Result


@dataclass(frozen=True)
class MixedSubject:
    """A mixed batch over pages.

    Attributes:
        lengths: (queries, keys) of each sequence.
        outside: rows of queries before the first sequence and after the last, which belong to none.
        multiprocessors: those of the emulated GPU; few, so that a block processes several tiles.
        kernels: the beginning of the name of the kernel in which faults are planted.
    """

    target: str
    plan: Any
    page_size: int
    lengths: tuple[tuple[int, int], ...]
    outside: int
    multiprocessors: int
    kernels: str = ""

    def _compiled(self, **options: Any) -> Any:
        spec = fg.AttentionSpec(16, mask=fg.causal(), page_size=self.page_size, layout="thd")
        return fg.compile(spec, self.target, emulate=True, plan=self.plan, **options)

    def texts(self) -> dict[str, str]:
        return {name: text for name, text in self._compiled().sources.items() if name.startswith(self.kernels)}

    def run(
        self, texts: Mapping[str, str] | None, *, sanitize: Any, schedule: Schedule, shared_bytes: int = 0
    ) -> Result:
        source = None if texts is None else {**self._compiled().sources, **texts}
        compiled = self._compiled(source=source, sanitize=sanitize, schedule=schedule)
        q, k, v, given = self._inputs()
        out, lse = poisoned_outputs(compiled.spec, q)
        with mock.patch.object(Emulator, "multiprocessors", lambda *_: self.multiprocessors):
            compiled(q, k, v, return_lse=True, out=(out, lse), **given)
        return Result(judged(compiled.spec, q, k, v, out, lse, given).ok)

    def _inputs(self) -> tuple[Any, ...]:
        """Returns (Q, K, V, the call's other arguments)."""
        paged = fg.AttentionSpec(16, mask=fg.causal(), page_size=self.page_size, layout="bshd")
        inputs = random_inputs(paged, Shape(1, 190, len(self.lengths), 6, 2), seed=1)
        for array in (inputs.k, inputs.v):
            np.nan_to_num(array, copy=False)
        begins = self.outside + np.cumsum([0, *(queries for queries, _ in self.lengths)])
        random = np.random.default_rng(2)
        q = random.standard_normal((begins[-1] + self.outside, 6, 16), np.float32).astype(np.float16)
        given = {
            "cu_seqlens_q": begins.astype(np.int32),
            "page_table": np.maximum(inputs.captures["page_table"], 0),
            "seqused_k": np.array([keys for _, keys in self.lengths], np.int32),
        }
        return q, inputs.k, inputs.v, given


def mixed_subjects() -> dict[str, MixedSubject]:
    # Prompts of several tiles, decode queries of several tiles of rows, and sequences without either between them.
    few = ((1, 150), (70, 90), (0, 40), (15, 190), (0, 0), (1, 3), (33, 20), (1, 120))
    # Prompts of several tiles, of one, and without keys; more sequences than a warp handles at once.
    many = ((1, 50), (150, 190), (63, 70), (64, 64), *((0, 3), (1, 9)) * 16, (70, 0), (130, 100))
    plan = MixedPlan(DecodePlan(16, 32, 2, 2, scheduled=True), ForwardPlan(32, 32, 2))
    hopper = HopperMixedPlan(HopperPlan(1, 32), DecodePlan(16, 32, 2, 2, scheduled=True))
    return {
        "sm_80": MixedSubject("sm_80", plan, 4, few, outside=2, multiprocessors=8),
        "Hopper, prompts": MixedSubject("sm_90a", hopper, 8, many, 70, 3, "fwd-"),
        "Hopper, decoded": MixedSubject("sm_90a", hopper, 8, many, 70, 3, "few-"),
    }
