"""Which plans of a decode kernel are worth timing, for calls that take one of them by default."""

from __future__ import annotations

from collections import Counter

from flashgen.codegen.candidates import MOST
from flashgen.codegen.families import forward_family
from flashgen.codegen.family import DecodingPlan
from flashgen.codegen.targets import Target
from flashgen.language.spec import AttentionSpec

_OF_A_SHAPE = 2


def decode_candidates(
    spec: AttentionSpec, target: Target, own: DecodingPlan, most: int = MOST
) -> tuple[DecodingPlan, ...]:
    """Feasible plans, at most so many: `own` first, the others as their family ranks them.

    They have its rows, as calls are told apart by these. At most two have as many threads and blocks, and half of them
    the same keys: the ranking may be wrong about these, and then the list would hold nothing else.
    """
    decoding = forward_family(target).decoding
    assert decoding, "a plan of a decode kernel is of a family that has them"
    chosen, shapes = [own], Counter[tuple[int, ...]]()
    for plan in decoding.every_plan(spec, target, own):
        keys, shape = (plan.tile_k,), (plan.threads, plan.blocks)
        fits = plan.registers(spec) <= plan.register_budget and plan.problem(spec, target) is None
        if plan != own and fits and shapes[shape] < _OF_A_SHAPE and shapes[keys] < most // 2:
            chosen.append(plan)
            shapes.update((keys, shape))
    return tuple(chosen[:most])
