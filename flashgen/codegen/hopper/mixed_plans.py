"""Plans of Hopper's two kernels for mixed prefill and decode: varlen batches over a paged KV cache.

The kernels run one after the other. Prefill uses Hopper's forward kernel, with tiles as large as wgmma needs them and
one CTA per SM. Sequences of few queries are limited by memory bandwidth, which the mma.sync kernel saturates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from flashgen.codegen.hopper.measured_plans import choose_hopper_plan
from flashgen.codegen.hopper.plans import PREFILL_QUERIES, HopperPlan
from flashgen.codegen.mma_sync.decode_plans import FEW_ROWS, DecodePlan, choose_decode_plan
from flashgen.codegen.mma_sync.mixed_plans import MixedPlan
from flashgen.codegen.plan import Checked
from flashgen.codegen.shared_memory import SharedMemoryLayout
from flashgen.codegen.targets import Target
from flashgen.language.spec import AttentionSpec


@dataclass(frozen=True)
class HopperMixedPlan(Checked):
    """The plan of the two kernels of a mixed batch. Its properties are those of the first kernel.

    Attributes:
        prompt: the plan for sequences of 64 queries or more.
        few: the plan for all other sequences, with stream-K work units. It must be scheduled.
    """

    prompt: HopperPlan
    few: DecodePlan
    blocks: ClassVar[int] = HopperPlan.blocks
    packed_heads: ClassVar[int] = 1

    def show_options(self, spec: AttentionSpec) -> str:
        return ""

    @property
    def of_few(self) -> MixedPlan:
        """The plan of the second kernel."""
        return MixedPlan(self.few, prompts_beside=PREFILL_QUERIES)

    @property
    def tile_q(self) -> int:
        return self.prompt.tile_q

    @property
    def tile_k(self) -> int:
        return self.prompt.tile_k

    @property
    def stages(self) -> int:
        return self.prompt.stages

    @property
    def threads(self) -> int:
        return self.prompt.threads

    @property
    def register_budget(self) -> int:
        return self.prompt.register_budget

    def registers(self, spec: AttentionSpec) -> int:
        return self.prompt.registers(spec)

    def matrix_cycles(self, spec: AttentionSpec) -> float:
        return self.prompt.matrix_cycles(spec)

    def exposed(self, blocks: int) -> float:
        return self.prompt.exposed(blocks)

    def shared_memory(self, spec: AttentionSpec) -> SharedMemoryLayout:
        return self.prompt.shared_memory(spec)

    def summary(self, spec: AttentionSpec) -> str:
        """Returns the line that the first kernel's header has about the plan."""
        return f"prompts of {PREFILL_QUERIES} queries or more: {self.prompt.summary(spec)}"

    def problem(self, spec: AttentionSpec, target: Target) -> str | None:
        """Returns why the plan is inconsistent or does not fit the spec or the target; None if it is valid."""
        return self.prompt.problem(spec, target) or self.of_few.problem(spec, target)


@lru_cache(maxsize=256)
def choose_hopper_mixed_plan(spec: AttentionSpec, target: Target) -> HopperMixedPlan:
    """Returns the default plan: the default plans for prefill alone and for decode alone with a paged KV cache."""
    return HopperMixedPlan(choose_hopper_plan(spec, target), choose_decode_plan(spec, target, FEW_ROWS, True))
