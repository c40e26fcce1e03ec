"""Which plans of a spec's forward kernel are worth timing on a target, best first by an explicit model of their cost.

The defaults (`_WINNERS` of hopper_winners.py, `_PREFERENCE` of plans.py) are the one small table of measured winners:
what a spec gets that nobody tuned. This module knows of them only that the default stands first in its list, so that
tuning can say what it gained. A winner that is found again and again belongs into that table.

**Feasible** is a plan that has no `problem()`, that does not cut across the blocks of a mask that reads a table of
them, and whose registers suffice by estimate (`registers`). The assembler has the last word on registers: whoever times
plans leaves out those that spill.

**Cost** is cycles of the busiest multiprocessor for the lengths of a `Workload`:

    rounds x (kTile / blocks + steps x (kStep / blocks + step))

    rounds    tiles of queries, of all heads, over the multiprocessors, rounded up
    blocks    that a multiprocessor holds at once, one of which works while another waits; at most the rounds
    steps     tiles of keys that a tile of queries visits, on average, by the mask's ranges; all where it has none
    step      max(compute, loads) where there are two stages, else compute + loads / blocks
    compute   max(matrix, other) + exposed x min(matrix, other): the products on the tensor cores, and all that is done
              to scores beside; what of the shorter is not hidden behind the longer follows from who may overtake whom
    loads     of K and V from the L2

The numbers are an H100's by its data sheet (wgmma) or an A100's (mma.sync), rounded. Nothing hangs on a percent of
them: a list is timed, not believed, and the model need only leave out what has no chance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np

from flashgen.analysis.closed_forms.tile_ranges import evaluate_range, key_range
from flashgen.codegen.assembly import check_spec
from flashgen.codegen.families import AnyForwardPlan, default_plan
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.plans import RESERVED_SHARED, ForwardPlan, padded, reads_blocks
from flashgen.codegen.plans import weight as variant_weight
from flashgen.codegen.targets import Target
from flashgen.language.spec import AttentionSpec

MOST = 12
_OF_A_SHAPE = 2

_THREAD_REGISTERS = 255  # the most that an instruction can name
_MULTIPROCESSOR_REGISTERS = 65536
_REGISTER_STEP = 8  # the assembler's caps are multiples of it

# Registers of a thread beside scores, probabilities and output, by how much the variant itself needs
# (`plans.weight`): addresses, row states, what scores and masks are computed with. Of the kernels that compile without
# spills the one with the most of the former tells them.
_OTHER_HOPPER = {"none": 30, "plain": 32, "busy": 40, "moderate": 56, "loading": 64, "costly": 64, "heavy": 96}
_OTHER_MMA = {"none": 63, "plain": 72, "busy": 80, "moderate": 95, "loading": 80, "costly": 95, "heavy": 140}

# Instructions for each score beside its products and its exponential: scaling, maximum, sum, conversion; the variant's.
_INSTRUCTIONS = {"none": 5, "plain": 5, "busy": 7, "moderate": 10, "loading": 9, "costly": 14, "heavy": 14}
_INSTRUCTION_LANES, _EXPONENTIALS = 128, 16  # of a multiprocessor, per cycle

_TILE_CYCLES = 1500.0  # Q in, the first keys in, O out
_FIXED_CYCLES = 120.0  # of a step: barriers, the rows' maxima, the rescaling of the output
_PER_STAGE = 0.01  # of a step: a stage beyond two hides little, and is more to fill
_WARPS_TO_HIDE_LATENCY = 8  # on a multiprocessor, of mma.sync
_L2_BYTES = 32.0  # per cycle and multiprocessor

_weight = lru_cache(maxsize=128)(variant_weight)  # asked for with every plan


@dataclass(frozen=True)
class Workload:
    """What plans are ranked for: lengths, heads of all batches, and the multiprocessors that share them."""

    len_q: int
    len_k: int
    heads: int
    multiprocessors: int


def candidates(spec: AttentionSpec, target: Target, workload: Workload, most: int = MOST) -> tuple[AnyForwardPlan, ...]:
    """Feasible plans, at most so many: the default one first, the others by their cost for the workload.

    At most two have tiles of one shape, and half of them the same queries: the model may be wrong about a shape, and
    then a list of it in all its stages and orders would hold nothing else. The same list on every machine.

    UnsupportedError where the target cannot run the spec.
    """
    check_spec(spec, target)
    default = default_plan(spec, target)
    ranked = sorted(_feasible(spec, target), key=lambda plan: (cost(plan, spec, workload), str(plan)))
    chosen, shapes = [default], Counter[tuple[int, ...]]()
    for plan in ranked:
        queries, shape = (plan.tile_q,), (plan.tile_q, plan.tile_k)
        if plan != default and shapes[shape] < _OF_A_SHAPE and shapes[queries] < most // 2:
            chosen.append(plan)
            shapes.update((queries, shape))
    return tuple(chosen[:most])


def _feasible(spec: AttentionSpec, target: Target) -> Iterator[AnyForwardPlan]:
    every: Iterator[AnyForwardPlan] = _hopper_plans() if target.family == "hopper" else _mma_plans(spec, target)
    whole_blocks = reads_blocks(spec)
    for plan in every:
        cuts_across = whole_blocks and plan.tile_k & (plan.tile_k - 1)
        if not cuts_across and registers(plan, spec) <= budget(plan) and plan.problem(spec, target) is None:
            yield plan


def _hopper_plans() -> Iterator[HopperPlan]:
    for consumers, tile_k, stages in product((1, 2, 3), range(32, 257, 16), (1, 2, 3)):
        for takes_turns in (False, True) if consumers > 1 else (False,):
            yield HopperPlan(consumers, tile_k, stages=stages, takes_turns=takes_turns)


_MMA_TILES = tuple(product((64, 128, 256), (32, 48, 64, 80, 96, 112, 128), (4, 8), (1, 2)))
_MMA_BLOCKS = (1, 2, 3)


def _mma_plans(spec: AttentionSpec, target: Target) -> Iterator[ForwardPlan]:
    for (tile_q, tile_k, warps, stages), blocks in product(_MMA_TILES, _MMA_BLOCKS):
        plan = ForwardPlan(tile_q, tile_k, warps, stages, blocks)
        if blocks * (plan.shared_bytes(spec) + RESERVED_SHARED) <= target.shared_per_multiprocessor:
            yield plan


def registers(plan: AnyForwardPlan, spec: AttentionSpec) -> int:
    """The registers of a thread that computes, by estimate.

    The float32 scores and output of its warp's rows over 32 lanes, and what the variant needs. In Hopper's kernel the
    16-bit probabilities of one step stand beside the scores of the next; the other's pass into their scores' place.
    """
    rows = plan.tile_q // plan.warps
    scores, output = rows * plan.tile_k // 32, rows * padded(spec.value_dim) // 32
    if isinstance(plan, HopperPlan):
        return scores + scores // 2 + output + _OTHER_HOPPER[_weight(spec)]
    return scores + output + _OTHER_MMA[_weight(spec)]


def budget(plan: AnyForwardPlan) -> int:
    """The registers that a thread may have."""
    if isinstance(plan, HopperPlan):
        return plan.consumer_registers
    share = _MULTIPROCESSOR_REGISTERS // (plan.threads * plan.blocks)
    return min(share // _REGISTER_STEP * _REGISTER_STEP, _THREAD_REGISTERS)


def cost(plan: AnyForwardPlan, spec: AttentionSpec, workload: Workload) -> float:
    """Cycles of the busiest multiprocessor, by the model above. Only good for comparing plans."""
    rounds = -(-workload.heads * -(-workload.len_q // plan.tile_q) // workload.multiprocessors)
    blocks = max(min(1 if isinstance(plan, HopperPlan) else plan.blocks, rounds), 1)
    steps = steps_of(spec, workload, plan.tile_q, plan.tile_k)
    step = _step_cycles(plan, blocks, spec)
    return rounds * (_TILE_CYCLES / blocks + steps * (_FIXED_CYCLES / blocks + step))


@lru_cache(maxsize=1024)
def steps_of(spec: AttentionSpec, workload: Workload, tile_q: int, tile_k: int) -> float:
    """Tiles of keys that a tile of queries visits, on average: all where only a call knows the mask's captures."""
    ranges = key_range(spec.mask.expression)
    if ranges is None or ranges.captures or not workload.len_q:
        return -(-workload.len_k // tile_k)
    first = np.arange(0, workload.len_q, tile_q)
    last = np.minimum(first + tile_q, workload.len_q) - 1
    begin, end, _, _ = evaluate_range(ranges, first, last, workload.len_q, workload.len_k)
    return float(np.where(end > begin, -(-end // tile_k) - begin // tile_k, 0).mean())


def _step_cycles(plan: AnyForwardPlan, blocks: int, spec: AttentionSpec) -> float:
    """Of a step of keys beside those that each takes whatever its size."""
    matrix = _matrix_cycles(plan, spec)
    other = plan.tile_q * plan.tile_k * (1 / _EXPONENTIALS + _INSTRUCTIONS[_weight(spec)] / _INSTRUCTION_LANES)
    compute = max(matrix, other) + _exposed(plan, blocks) * min(matrix, other)
    loads = 2 * plan.tile_k * (padded(spec.head_dim) + padded(spec.value_dim)) / _L2_BYTES
    if plan.stages == 1:
        return compute + loads / blocks
    return max(compute, loads) * (1 + _PER_STAGE * (plan.stages - 2))


def _matrix_cycles(plan: AnyForwardPlan, spec: AttentionSpec) -> float:
    """Of a step's products: by the tensor cores' rate, or, of mma.sync, by that at which warps read K and V."""
    width = padded(spec.head_dim) + padded(spec.value_dim)
    if isinstance(plan, HopperPlan):
        return plan.tile_q * plan.tile_k * width / 2048
    shared_reads = plan.warps * plan.tile_k * width * 2 / 128
    return max(plan.tile_q * plan.tile_k * width / 1024, shared_reads)


def _exposed(plan: AnyForwardPlan, blocks: int) -> float:
    """The share of the shorter of products and softmax that the other does not hide."""
    if isinstance(plan, HopperPlan):
        return 0.5 if plan.consumers == 1 else 0.1 if plan.takes_turns else 0.12
    return 0.3 if plan.warps * blocks >= _WARPS_TO_HIDE_LATENCY else 0.6
