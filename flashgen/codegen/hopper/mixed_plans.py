"""How Hopper divides a ragged batch over pages: prompts by its own forward, few queries by parts of their keys.

Two kernels, one after the other. Tiles of prompts are as large as wgmma wants them, and a block of them takes all of a
multiprocessor; sequences of few queries are bound by memory, and mma.sync's kernel reads as fast as there is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from flashgen.codegen.hopper.measured_plans import choose_hopper_plan
from flashgen.codegen.hopper.plans import PROMPT_QUERIES, HopperPlan
from flashgen.codegen.mma_sync.decode_plans import FEW_ROWS, DecodePlan, choose_decode_plan
from flashgen.codegen.mma_sync.mixed_plans import MixedPlan
from flashgen.codegen.plan import Checked
from flashgen.codegen.shared_memory import SharedMemoryLayout
from flashgen.codegen.targets import Target
from flashgen.language.spec import AttentionSpec


@dataclass(frozen=True)
class HopperMixedPlan(Checked):
    """The plan of the two kernels of a mixed batch; what a plan says of itself is said of the first.

    Attributes:
        prompt: of sequences of 64 queries or more.
        few: of blocks that share the keys of all others, a scheduled plan.
    """

    prompt: HopperPlan
    few: DecodePlan
    blocks: ClassVar[int] = HopperPlan.blocks
    packed_heads: ClassVar[int] = 1

    def show_options(self, spec: AttentionSpec) -> str:
        return ""

    @property
    def of_few(self) -> MixedPlan:
        """The second kernel's plan."""
        return MixedPlan(self.few, prompts_beside=PROMPT_QUERIES)

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
        """One line for the first kernel's header."""
        return f"prompts of {PROMPT_QUERIES} queries or more: {self.prompt.summary(spec)}"

    def problem(self, spec: AttentionSpec, target: Target) -> str | None:
        """Why the plan contradicts itself, or does not fit the spec or the target; None where it does."""
        return self.prompt.problem(spec, target) or self.of_few.problem(spec, target)


@lru_cache(maxsize=256)
def choose_hopper_mixed_plan(spec: AttentionSpec, target: Target) -> HopperMixedPlan:
    """The default plan: those that prompts alone, and decode steps alone, have over pages."""
    return HopperMixedPlan(choose_hopper_plan(spec, target), choose_decode_plan(spec, target, FEW_ROWS, True))
