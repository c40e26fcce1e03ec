"""Which plans of a decode kernel are worth timing, for calls that take one of them by default."""

from __future__ import annotations

from collections import Counter

from flashgen.codegen.candidates import MOST
from flashgen.codegen.families import forward_family
from flashgen.codegen.family import DecodePlan
from flashgen.codegen.targets import Target
from flashgen.language.spec import AttentionSpec

_OF_A_SHAPE = 2


def decode_candidates(spec: AttentionSpec, target: Target, own: DecodePlan, most: int = MOST) -> tuple[DecodePlan, ...]:
    """Feasible plans, at most so many: `own` first, the others as their family ranks them.

    They have its rows, as calls are told apart by these. At most two have as many threads and blocks, and half of them
    the same keys: the ranking may be wrong about these, and then the list would hold nothing else.
    """
    chosen, shapes = [own], Counter[tuple[int, ...]]()
    for plan in forward_family(target).decode.candidates(spec, target, own):
        keys, shape = (plan.tile_k,), (plan.threads, plan.blocks)
        fits = plan.registers(spec) <= plan.register_budget and plan.problem(spec, target) is None
        if plan != own and fits and shapes[shape] < _OF_A_SHAPE and shapes[keys] < most // 2:
            chosen.append(plan)
            shapes.update((keys, shape))
    return tuple(chosen[:most])
