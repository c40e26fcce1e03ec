"""How one launch divides a ragged batch over pages: prompts by tiles of queries, few queries by parts of their keys.

A block has a tile of queries of a prompt, as the forward kernel's do, or a run of the keys of sequences of few queries,
as the decode kernel's do where blocks share them. Products bind the former and memory the latter; two blocks of either
kind fit on a multiprocessor, so that one of each hides what the other waits for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from flashgen.codegen.demand import Weight, demand_of
from flashgen.codegen.mma_sync.decode_plans import FEW_ROWS, DecodePlan, decode_rings, search_buffers
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan, fitting_plans, leaves_registers
from flashgen.codegen.plan import Checked, shared_memory_problem
from flashgen.codegen.shared_memory import NO_SHARED_MEMORY, SharedMemoryLayout
from flashgen.codegen.targets import Target
from flashgen.codegen.tiling import MMA_DEPTH, RESERVED_SHARED, padded
from flashgen.language.spec import AttentionSpec

MIXED_RUN_BYTES = 32  # of shared memory, for the run at which a block is
MIXED_TILE_BYTES = 12  # likewise, for the tile of a prompt that a block has found
_WARPS_TO_HIDE_LATENCY = 8  # on a multiprocessor
_PROMPT_KEYS = 64
_WIDE = 192  # columns of the output
_MORE = 16  # registers
_PROMPT_SHARE = 2  # a sequence of a half of a tile's queries, or more, is a prompt
FEW = "few"
"""The role of the kernel of sequences of few queries, where another kernel of the call has the prompts."""


@dataclass(frozen=True)
class MixedPlan(Checked):
    """The plan of the kernel for prompts and few queries together.

    Attributes:
        few: of blocks that share the keys of sequences of few queries, a scheduled plan.
        prompt: of blocks that have a tile of a prompt's queries; None where all sequences are taken as those of few,
            which is so for keys of 8 bits.
        prompts_beside: of a plan without `prompt`, queries of a sequence from which on another kernel of the call has
            it; 0 where none does.
    """

    few: DecodePlan
    prompt: ForwardPlan | None = None
    prompts_beside: int = 0
    packed_heads: ClassVar[int] = 1  # any number of heads makes rows: it is a size of the call

    def show_options(self, spec: AttentionSpec) -> str:
        return f"--kernel {FEW}" if self.prompts_beside else ""

    @property
    def _main(self) -> ForwardPlan | DecodePlan:
        return self.prompt or self.few

    @property
    def tile_q(self) -> int:
        return self._main.tile_q

    @property
    def tile_k(self) -> int:
        return self._main.tile_k

    @property
    def stages(self) -> int:
        return self._main.stages

    @property
    def blocks(self) -> int:
        return self.few.blocks

    @property
    def threads(self) -> int:
        return self.few.threads

    @property
    def prompt_queries(self) -> int:
        """Queries of a sequence from which on it is a prompt; 0 where none is."""
        return self.prompt.tile_q // _PROMPT_SHARE if self.prompt else self.prompts_beside

    @property
    def register_budget(self) -> int:
        return self._main.register_budget

    def registers(self, spec: AttentionSpec) -> int:
        """Of the kind of blocks that takes more."""
        return max(self.few.registers(spec), self.prompt.registers(spec) if self.prompt else 0)

    def matrix_cycles(self, spec: AttentionSpec) -> float:
        """Of a step of a prompt's."""
        return self._main.matrix_cycles(spec)

    def exposed(self, blocks: int) -> float:
        return self._main.exposed(blocks)

    def summary(self, spec: AttentionSpec) -> str:
        """One line for the kernel's header."""
        few = f"{self.few.tile_q} rows x {self.few.tile_k} keys a warp, {self.few.stages} stages"
        prompt = f"; of up to {self.prompts_beside - 1} queries" if self.prompts_beside else ""
        if self.prompt:
            prompt = (
                f"; prompts of {self.prompt_queries} queries or more: {self.prompt.tile_q} queries x "
                f"{self.prompt.tile_k} keys, {self.prompt.stages} stage(s)"
            )
        return (
            f"few queries: {few}{prompt}; {self.few.warps} warps, {self.blocks} block(s) per multiprocessor, "
            f"{self.shared_bytes(spec)} bytes of shared memory"
        )

    def shared_memory(self, spec: AttentionSpec) -> SharedMemoryLayout:
        """The layout of blocks of few queries, in the memory of the kind of blocks that needs more."""
        prompt = self.prompt.shared_bytes(spec) if self.prompt else 0
        return self.few.shared_memory(spec, MIXED_RUN_BYTES, prompt)

    def prompt_memory(self, spec: AttentionSpec) -> SharedMemoryLayout:
        """The layout of blocks that have a tile of a prompt; none where the plan has no such blocks."""
        if not self.prompt:
            return NO_SHARED_MEMORY
        tiles, total = self.prompt.shared_memory(spec).buffers, self.shared_bytes(spec)
        return SharedMemoryLayout((*tiles, *search_buffers(self.few.warps, MIXED_TILE_BYTES)), min_bytes=total)

    def problem(self, spec: AttentionSpec, target: Target) -> str | None:
        """Why the plan contradicts itself, or does not fit the spec or the target; None where it does."""
        if not (spec.is_ragged and spec.page_size):
            return "it is for ragged batches over pages: declare layout='thd' and page_size=..."
        if not self.few.scheduled:
            return "few must be scheduled=True: only the device knows the lengths"
        if self.prompts_beside < 0 or (self.prompt and self.prompts_beside):
            return f"prompts_beside={self.prompts_beside} must be positive, and 0 where the plan has a prompt's tiles"
        if spec.kv_dtype and self.prompt:
            return f"prompt must be None with kv_dtype={spec.kv_dtype!r}, which blocks of few queries read alone"
        if self.prompt and (self.prompt.warps, self.prompt.blocks) != (self.few.warps, self.few.blocks):
            return "few and prompt must have the same warps and blocks"
        found = self.few.problem(spec, target) or (self.prompt.problem(spec, target) if self.prompt else None)
        return found or shared_memory_problem(self.shared_bytes(spec), target, "take fewer keys or stages")


@lru_cache(maxsize=256)
def choose_mixed_plan(spec: AttentionSpec, target: Target) -> MixedPlan:
    """The default plan: of those that fit the target the first whose warps hide latency, of most warps, and so on.

    UnsupportedError where none fits.
    """
    plans = list(_candidates(spec, target))
    fitting = [plan for plan in plans if plan.problem(spec, target) is None]
    if not fitting:
        MixedPlan(decode_rings(spec, target, FEW_ROWS, scheduled=True)[-1]).check(spec, target)
    more = _more(spec, target)
    spare = [plan for plan in fitting if plan.prompt is None or leaves_registers(plan.prompt, spec, target, more)]
    return min(spare, key=_rank) if spare else min(fitting, key=lambda plan: plan.registers(spec))


def _more(spec: AttentionSpec, target: Target) -> int:
    """Registers that may accumulate beside those of the forward's kernels, by sm_90's assembler."""
    numbers = any(not capture.ndim for capture in spec.captures)
    lean = target.register_pressure == "low" and demand_of(spec).weight <= Weight.PLAIN and not numbers
    return _MORE if lean else 0


def _rank(plan: MixedPlan) -> tuple[bool, int]:
    return plan.blocks * plan.few.warps < _WARPS_TO_HIDE_LATENCY, -plan.few.warps


def _candidates(spec: AttentionSpec, target: Target) -> Iterator[MixedPlan]:
    """Plans, the preferred ones first: by the prompts' tiles, then by what is on its way to blocks of few queries."""
    rings = decode_rings(spec, target, FEW_ROWS, scheduled=True)
    rings += [replace(few, tile_k=few.tile_k // 2) for few in rings if few.tile_k > MMA_DEPTH]
    if spec.kv_dtype:
        yield from sorted(map(MixedPlan, rings), key=lambda plan: -_on_the_way(plan.few))
        return
    for warps in sorted({few.warps for few in rings}, reverse=True):
        prompts = (plan for plan in fitting_plans(spec, target, warps) if plan.tile_k <= _most_keys(spec))
        for prompt in prompts:
            for few in (few for few in rings if few.warps == warps):
                needed = MixedPlan(few, prompt).shared_bytes(spec) + RESERVED_SHARED
                blocks = min(prompt.blocks, max(target.shared_per_multiprocessor // needed, 1))
                yield MixedPlan(replace(few, blocks=blocks), replace(prompt, blocks=blocks))


def _most_keys(spec: AttentionSpec) -> int:
    """Of a step of a prompt's: with more a thread's registers do not suffice, which captures take some of, too."""
    return _PROMPT_KEYS // 2 if spec.captures and padded(spec.value_dim) > _WIDE else _PROMPT_KEYS


def _on_the_way(few: DecodePlan) -> int:
    """Keys that are on their way to a multiprocessor."""
    return few.blocks * few.warps * (few.stages - 1) * few.tile_k
