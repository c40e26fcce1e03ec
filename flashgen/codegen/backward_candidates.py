"""Which plans of a spec's backward are worth timing on a target, for calls of some sizes.

They are few: a family's own table, or every form of its kernel that fits. All of them are timed, so that no model of
their cost is needed; the assembler leaves out those that spill.
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
    """Plans of the kind of the default one, of whose kernel that walks queries they would take the place; that first.

    Query heads have blocks of their own only where several share a head of k and v, and gradients need not have the
    same bits in every run; they add in turns only where gradients need. Where tiles are read from lists all plans have
    the default one's, so that lists that a caller keeps stand for each.
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
