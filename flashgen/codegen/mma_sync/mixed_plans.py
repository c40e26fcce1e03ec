"""Plans of the kernel for mixed prefill and decode: varlen batches over a paged KV cache.

A CTA has either a tile of queries of a prompt, as in the forward kernel, or a stream-K work unit on the keys of
sequences of few queries, as in the decode kernel. The former is limited by compute and the latter by memory. An SM
holds two CTAs of either kind, so that a CTA of each kind hides the latency of the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from flashgen.codegen.demand import Weight, demand_of
from flashgen.codegen.mma_sync.decode_plans import FEW_ROWS, DecodePlan, decode_rings, refuse, search_buffers
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan, fitting_plans, leaves_registers
from flashgen.codegen.padding import MMA_K, RESERVED_SHARED, is_wide, padded
from flashgen.codegen.plan import Checked, shared_memory_problem
from flashgen.codegen.shared_memory import NO_SHARED_MEMORY, SharedMemoryLayout
from flashgen.codegen.targets import Target
from flashgen.language.spec import AttentionSpec

MIXED_WORK_UNIT_BYTES = 32  # shared memory of the current work unit
MIXED_TILE_BYTES = 12  # shared memory of the prefill tile that a CTA has found
_WARPS_TO_HIDE_LATENCY = 8  # on an SM
_PREFILL_KEYS = 64
_WIDE = 192  # columns of the output
_EXTRA_ACCUMULATORS = 16  # registers
_PREFILL_DIVISOR = 2  # a sequence with at least half of a tile's queries is a prompt
FEW = "few"
"""The role of the kernel for sequences of few queries, in calls in which another kernel processes the prompts."""


@dataclass(frozen=True)
class MixedPlan(Checked):
    """The plan of the kernel for mixed prefill and decode.

    Attributes:
        few: the plan of CTAs that process stream-K work units of sequences of few queries. It must be scheduled.
        prompt: the plan of CTAs that process a tile of a prompt's queries. None if all sequences are processed as
            those of few queries, as with 8-bit keys.
        prompts_beside: in plans without `prompt`, the number of queries from which on another kernel of the call
            processes a sequence; 0 if there is no other kernel.
    """

    few: DecodePlan
    prompt: ForwardPlan | None = None
    prompts_beside: int = 0
    packed_heads: ClassVar[int] = 1  # how many heads share a tile is a size of the call

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
    def prefill_queries(self) -> int:
        """The minimum number of queries of a prompt; 0 if no sequence is processed as a prompt."""
        return self.prompt.tile_q // _PREFILL_DIVISOR if self.prompt else self.prompts_beside

    @property
    def register_budget(self) -> int:
        return self._main.register_budget

    def registers(self, spec: AttentionSpec) -> int:
        """Estimates the registers of a thread, for the kind of CTA that needs more."""
        return max(self.few.registers(spec), self.prompt.registers(spec) if self.prompt else 0)

    def matrix_cycles(self, spec: AttentionSpec) -> float:
        """Estimates the cycles of an iteration of a prefill tile, or of the work units if there is none."""
        return self._main.matrix_cycles(spec)

    def exposed(self, blocks: int) -> float:
        return self._main.exposed(blocks)

    def summary(self, spec: AttentionSpec) -> str:
        """Returns the line that the kernel's header has about the plan."""
        few = f"{self.few.tile_q} rows x {self.few.tile_k} keys per warp, {self.few.stages} stages"
        prompt = f", for up to {self.prompts_beside - 1} queries" if self.prompts_beside else ""
        if self.prompt:
            prompt = (
                f"; prefill of {self.prefill_queries} queries or more: {self.prompt.tile_q} queries x "
                f"{self.prompt.tile_k} keys, {self.prompt.stages} stage(s)"
            )
        return (
            f"decode: {few}{prompt}; {self.few.warps} warps, {self.blocks} CTA(s) per multiprocessor, "
            f"{self.shared_bytes(spec)} bytes of shared memory"
        )

    def shared_memory(self, spec: AttentionSpec) -> SharedMemoryLayout:
        """Returns the layout of CTAs of few queries. Its size is that of the kind of CTA that needs more."""
        prompt = self.prompt.shared_bytes(spec) if self.prompt else 0
        return self.few.shared_memory(spec, MIXED_WORK_UNIT_BYTES, prompt)

    def prefill_memory(self, spec: AttentionSpec) -> SharedMemoryLayout:
        """Returns the layout of CTAs with a prefill tile, which is empty if the plan has none."""
        if not self.prompt:
            return NO_SHARED_MEMORY
        tiles, total = self.prompt.shared_memory(spec).buffers, self.shared_bytes(spec)
        return SharedMemoryLayout((*tiles, *search_buffers(self.few.warps, MIXED_TILE_BYTES)), min_bytes=total)

    def problem(self, spec: AttentionSpec, target: Target) -> str | None:
        """Returns why the plan is inconsistent or does not fit the spec or the target; None if it is valid."""
        if not spec.is_mixed:
            return "it is for varlen batches over pages: declare layout='thd' and page_size=..."
        if not self.few.scheduled:
            return "few must be scheduled=True: only the device knows the lengths"
        if self.prompts_beside < 0 or (self.prompt and self.prompts_beside):
            return f"prompts_beside={self.prompts_beside} must be positive, and 0 where the plan has a prompt's tiles"
        if spec.kv_dtype and self.prompt:
            return f"prompt must be None with kv_dtype={spec.kv_dtype!r}, which only blocks of few queries can read"
        if self.prompt and (self.prompt.warps, self.prompt.blocks) != (self.few.warps, self.few.blocks):
            return "few and prompt must have the same warps and blocks"
        found = self.few.problem(spec, target) or (self.prompt.problem(spec, target) if self.prompt else None)
        return found or shared_memory_problem(self.shared_bytes(spec), target, "take fewer keys or stages")


@lru_cache(maxsize=256)
def choose_mixed_plan(spec: AttentionSpec, target: Target) -> MixedPlan:
    """Returns the default plan: of the plans that fit, preferably one that hides latency, with the most warps.

    Raises:
        UnsupportedError: no plan fits the target.
    """
    plans = list(_candidates(spec, target))
    fitting = [plan for plan in plans if plan.problem(spec, target) is None]
    if not fitting:
        refuse(spec, target, MixedPlan(decode_rings(spec, target, FEW_ROWS, scheduled=True)[-1]))
    if is_wide(spec) and not any(plan.prompt for plan in fitting):
        return fitting[0]
    fitting = [plan for plan in fitting if plan.prompt] or fitting
    more = _extra_accumulators(spec, target)
    spare = [plan for plan in fitting if plan.prompt is None or leaves_registers(plan.prompt, spec, target, more)]
    return min(spare, key=_rank) if spare else min(fitting, key=lambda plan: plan.registers(spec))


def _extra_accumulators(spec: AttentionSpec, target: Target) -> int:
    """Returns the registers that may hold accumulators beyond the forward's limit, as sm_90's assembler shows."""
    scalars = any(not capture.ndim for capture in spec.captures)
    lean = target.register_pressure == "low" and demand_of(spec).weight <= Weight.PLAIN and not scalars
    return _EXTRA_ACCUMULATORS if lean else 0


def _rank(plan: MixedPlan) -> tuple[bool, int]:
    return plan.blocks * plan.few.warps < _WARPS_TO_HIDE_LATENCY, -plan.few.warps


def _candidates(spec: AttentionSpec, target: Target) -> Iterator[MixedPlan]:
    """Yields plans in order of preference: by prefill tiles, then by the keys that work units have in flight.

    Plans of more than MAX_UNSPLIT columns without prefill tiles come last: tiles of both kinds may not fit.
    """
    rings = decode_rings(spec, target, FEW_ROWS, scheduled=True)
    wide = is_wide(spec)
    if not wide:
        rings += [replace(few, tile_k=few.tile_k // 2) for few in rings if few.tile_k > MMA_K]
    if spec.kv_dtype:
        yield from map(MixedPlan, rings if wide else sorted(rings, key=lambda few: -few.keys_in_flight))
        return
    for warps in sorted({few.warps for few in rings}, reverse=True):
        for prompt in fitting_plans(spec, target, warps):
            if prompt.warps != warps or prompt.tile_k > _max_prefill_keys(spec):
                continue
            for few in (few for few in rings if few.warps == warps):
                needed = MixedPlan(few, prompt).shared_bytes(spec) + RESERVED_SHARED
                blocks = min(prompt.blocks, max(target.shared_per_multiprocessor // needed, 1))
                yield MixedPlan(replace(few, blocks=blocks), replace(prompt, blocks=blocks))
    if wide:
        yield from map(MixedPlan, rings)


def _max_prefill_keys(spec: AttentionSpec) -> int:
    """Returns the maximum keys of a prefill tile for which registers suffice. Captured arrays need registers too."""
    return _PREFILL_KEYS // 2 if spec.captures and padded(spec.value_dim) > _WIDE else _PREFILL_KEYS
