"""The forward plans that are worth timing for a spec and a target, ranked by an analytical cost model.

A family's default plans are a small table of measured plans, which specs use without tuning. Here the default plan only
comes first in the list, so that tuning can report its gain over it. A plan that wins repeatedly belongs in that table.

A plan is **feasible** if it has no `problem()`, its estimated registers fit, and its tiles do not straddle the blocks
of a block mask. The assembler has the final word on registers: the code that times plans skips plans that spill.

The **cost** is in cycles of the busiest multiprocessor, for the lengths of a `Workload`:

    rounds x (_TILE_CYCLES / blocks + steps x (_FIXED_CYCLES / blocks + step))

    rounds    query tiles of all heads / multiprocessors, rounded up
    blocks    resident thread blocks of a multiprocessor, which hide each other's latency; at most `rounds`
    steps     average number of key tiles that a query tile visits, by the mask's ranges; all key tiles without ranges
    step      max(compute, loads) with two stages or more, else compute + loads / blocks
    compute   max(matrix, other) + exposed x min(matrix, other): `matrix` is the matrix products on the tensor cores,
              `other` is everything else that is done to scores, and `exposed` is the fraction of the shorter one that
              does not overlap with the longer one
    loads     of K and V from L2

The constants are rounded from the data sheets of the H100 (wgmma) and the A100 (mma.sync). They need not be precise:
the plans are timed, and the model only leaves out plans that cannot win.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from flashgen.codegen.assembly import check_spec
from flashgen.codegen.demand import demand_of, is_power_of_2
from flashgen.codegen.dispatch import default_plan
from flashgen.codegen.families import forward_family
from flashgen.codegen.padding import padded
from flashgen.codegen.plan import Plan
from flashgen.codegen.targets import Target
from flashgen.codegen.workload import Workload, steps_of
from flashgen.language.spec import AttentionSpec

MAX_CANDIDATES = 12
_MAX_PER_SHAPE = 2

_INSTRUCTION_LANES = Target.partitions * Target.threads_per_warp  # of a multiprocessor, per cycle
_TILE_CYCLES = 1500.0  # per query tile: load Q and the first keys, store O
_FIXED_CYCLES = 120.0  # per step: barriers, row maxima, rescaling of the output
_PER_STAGE = 0.01  # cost of each stage beyond two, as a fraction of a step: it hides little and must be filled
_L2_BYTES = 32.0  # per cycle and multiprocessor


def candidates(
    spec: AttentionSpec, target: Target, workload: Workload, limit: int = MAX_CANDIDATES
) -> tuple[Plan, ...]:
    """Returns at most `limit` feasible plans: the default plan, then the others by increasing cost for the workload.

    At most two of them have the same tile shape, and at most half the same `tile_q`. Otherwise a wrong estimate for one
    shape could fill the list with its variants. The list does not depend on the machine.

    Raises:
        UnsupportedError: The target cannot run the spec.
    """
    check_spec(spec, target)
    default = default_plan(spec, target)
    ranked = sorted(_feasible(spec, target), key=lambda plan: (cost(plan, spec, workload), str(plan)))
    chosen, shapes = [default], Counter[tuple[int, ...]]()
    for plan in ranked:
        queries, shape = (plan.tile_q,), (plan.tile_q, plan.tile_k)
        if plan != default and shapes[shape] < _MAX_PER_SHAPE and shapes[queries] < limit // 2:
            chosen.append(plan)
            shapes.update((queries, shape))
    return tuple(chosen[:limit])


def _feasible(spec: AttentionSpec, target: Target) -> Iterator[Plan]:
    reads_blocks = demand_of(spec).reads_blocks
    for plan in forward_family(target).candidates(spec, target):
        straddles_blocks = reads_blocks and not is_power_of_2(plan.tile_k)
        if not straddles_blocks and plan.registers(spec) <= plan.register_budget and plan.problem(spec, target) is None:
            yield plan


def cost(plan: Plan, spec: AttentionSpec, workload: Workload) -> float:
    """Returns the estimated cycles of the busiest multiprocessor. Only comparisons between plans are meaningful."""
    rounds = -(-workload.heads * -(-workload.len_q // plan.tile_q) // workload.multiprocessors)
    blocks = max(min(plan.blocks, rounds), 1)
    steps = steps_of(spec, workload.len_q, workload.len_k, plan.tile_q, plan.tile_k)
    step = _step_cycles(plan, blocks, spec)
    return rounds * (_TILE_CYCLES / blocks + steps * (_FIXED_CYCLES / blocks + step))


def _step_cycles(plan: Plan, blocks: int, spec: AttentionSpec) -> float:
    """Returns the cycles of a step over one key tile, without the fixed cycles of each step."""
    matrix = plan.matrix_cycles(spec)
    score_cycles = 1 / Target.exponentials_per_cycle + demand_of(spec).instructions / _INSTRUCTION_LANES
    other = plan.tile_q * plan.tile_k * score_cycles
    compute = max(matrix, other) + plan.exposed(blocks) * min(matrix, other)
    loads = spec.kv_element.bytes * plan.tile_k * (padded(spec.head_dim) + padded(spec.value_dim)) / _L2_BYTES
    if plan.stages == 1:
        return compute + loads / blocks
    return max(compute, loads) * (1 + _PER_STAGE * (plan.stages - 2))
