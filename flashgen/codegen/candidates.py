"""Which plans of a spec's forward kernel are worth timing on a target, best first by an explicit model of their cost.

Each family's default plans are the one small table of measured ones: what a spec gets that nobody tuned. This module
knows of them only that the default stands first in its list, so that tuning can say what it gained. A plan that wins
again and again belongs into that table.

**Feasible** is a plan that has no `problem()`, that does not cut across the blocks of a mask that reads a table of
them, and whose registers suffice by estimate. The assembler has the last word on registers: whoever times
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

from flashgen.codegen.assembly import check_spec
from flashgen.codegen.demand import demand_of, is_power_of_2
from flashgen.codegen.dispatch import default_plan
from flashgen.codegen.families import forward_family
from flashgen.codegen.plan import Plan
from flashgen.codegen.targets import Target
from flashgen.codegen.tiling import ELEMENT_BYTES, padded
from flashgen.codegen.workload import Workload, steps_of
from flashgen.language.spec import AttentionSpec

MOST = 12
_OF_A_SHAPE = 2

_INSTRUCTION_LANES = Target.partitions * Target.threads_per_warp  # of a multiprocessor, per cycle
_TILE_CYCLES = 1500.0  # Q in, the first keys in, O out
_FIXED_CYCLES = 120.0  # of a step: barriers, the rows' maxima, the rescaling of the output
_PER_STAGE = 0.01  # of a step: a stage beyond two hides little, and is more to fill
_L2_BYTES = 32.0  # per cycle and multiprocessor


def candidates(spec: AttentionSpec, target: Target, workload: Workload, most: int = MOST) -> tuple[Plan, ...]:
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


def _feasible(spec: AttentionSpec, target: Target) -> Iterator[Plan]:
    whole_blocks = demand_of(spec).reads_blocks
    for plan in forward_family(target).candidates(spec, target):
        cuts_across = whole_blocks and not is_power_of_2(plan.tile_k)
        if not cuts_across and plan.registers(spec) <= plan.register_budget and plan.problem(spec, target) is None:
            yield plan


def cost(plan: Plan, spec: AttentionSpec, workload: Workload) -> float:
    """Cycles of the busiest multiprocessor, by the model above. Only good for comparing plans."""
    rounds = -(-workload.heads * -(-workload.len_q // plan.tile_q) // workload.multiprocessors)
    blocks = max(min(plan.blocks, rounds), 1)
    steps = steps_of(spec, workload.len_q, workload.len_k, plan.tile_q, plan.tile_k)
    step = _step_cycles(plan, blocks, spec)
    return rounds * (_TILE_CYCLES / blocks + steps * (_FIXED_CYCLES / blocks + step))


def _step_cycles(plan: Plan, blocks: int, spec: AttentionSpec) -> float:
    """Of a step of keys beside those that each takes whatever its size."""
    matrix = plan.matrix_cycles(spec)
    score_cycles = 1 / Target.exponentials_per_cycle + demand_of(spec).instructions / _INSTRUCTION_LANES
    other = plan.tile_q * plan.tile_k * score_cycles
    compute = max(matrix, other) + plan.exposed(blocks) * min(matrix, other)
    loads = ELEMENT_BYTES * plan.tile_k * (padded(spec.head_dim) + padded(spec.value_dim)) / _L2_BYTES
    if plan.stages == 1:
        return compute + loads / blocks
    return max(compute, loads) * (1 + _PER_STAGE * (plan.stages - 2))
