"""The backward plans that are worth timing for a spec, a target and the sizes of a call.

There are few: a family lists them, or tries every variant of its kernel that fits. All of them are timed, so no cost
model is needed. Plans for which the assembler reports register spills are left out by the caller.
"""

from __future__ import annotations

from typing import Any

from flashgen.codegen.families import backward_family
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.workload import Workload
from flashgen.language.spec import AttentionSpec


def backward_candidates(
    spec: AttentionSpec, default: RenderedKernel, workload: Workload, deterministic: bool
) -> tuple[Any, ...]:
    """Returns the plans that may replace that of the main kernel `default` (dK and dV), which comes first.

    Plans with one CTA per query head are candidates only if several query heads share a KV head and gradients need not
    be deterministic. Plans that order the additions to dQ by a semaphore are candidates only for deterministic
    gradients. If tiles are read from lists, all plans have the tile sizes of the default plan, so that the lists that a
    caller keeps are valid for each.
    """
    plan, target = default.plan, default.target

    def is_worth_it(other: Any) -> bool:
        same_tiles = (other.tile_q, other.tile_k) == (plan.tile_q, plan.tile_k)
        divides = other.heads_apart and (workload.heads_per_kv == 1 or deterministic)
        ordered = other.in_turns and not deterministic
        return type(other) is type(plan) and not divides and not ordered and (same_tiles or not default.reads)

    fitting = (
        other
        for other in backward_family(target).candidates(spec, target)
        if is_worth_it(other) and other.problem(spec, target) is None
    )
    return tuple(dict.fromkeys((plan, *fitting)))
