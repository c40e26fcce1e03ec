"""The decode plans that are worth timing for calls with a given default decode plan."""

from __future__ import annotations

from collections import Counter

from flashgen.codegen.candidates import MAX_CANDIDATES
from flashgen.codegen.families import forward_family
from flashgen.codegen.family import DecodePlan
from flashgen.codegen.targets import Target
from flashgen.language.spec import AttentionSpec

_MAX_PER_SHAPE = 2


def decode_candidates(spec: AttentionSpec, target: Target, default: DecodePlan) -> tuple[DecodePlan, ...]:
    """Returns at most MAX_CANDIDATES feasible plans: `default`, then the others as their family ranks them.

    All have the query rows per tile of `default`, by which calls are assigned to plans. At most two have the same
    numbers of threads and blocks, and at most half the same `tile_k`. Otherwise a wrong ranking could fill the list
    with variants of one plan.
    """
    chosen, shapes = [default], Counter[tuple[int, ...]]()
    for plan in forward_family(target).decode.candidates(spec, target, default):
        keys, shape = (plan.tile_k,), (plan.threads, plan.blocks)
        fits = plan.registers(spec) <= plan.register_budget and plan.problem(spec, target) is None
        if plan != default and fits and shapes[shape] < _MAX_PER_SHAPE and shapes[keys] < MAX_CANDIDATES // 2:
            chosen.append(plan)
            shapes.update((keys, shape))
    return tuple(chosen[:MAX_CANDIDATES])
