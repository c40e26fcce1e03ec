"""When query heads that share a KV head get their own CTAs in the backward, on Hopper.

A CTA that loops over the queries of all heads of a KV head keeps dK and dV in registers from the first tile to the
last. With few KV heads there are few such CTAs: 32 query heads on one KV head with 16384 keys have 128 of them, which
leaves some of 132 SMs idle, and under a causal mask the others wait for the longest CTA, which takes twice the average.
With one CTA per query head there are more and shorter ones. They accumulate partial dK and dV in global memory, which
two more kernels convert. This pays where CTAs are too few to fill the GPU evenly.
"""

from __future__ import annotations

import sympy

from flashgen.codegen.hopper.backward_plans import HopperBackwardPlan
from flashgen.codegen.sizes import ceil_div
from flashgen.codegen.workload import Workload
from flashgen.language.spec import AttentionSpec

_EVEN_WAVES = 4  # CTAs of unequal length per SM from which on the tail of the last wave hardly shows
_FILLED = 0.8  # of the SMs in all waves of equal CTAs


def is_split_faster(plan: HopperBackwardPlan, spec: AttentionSpec, workload: Workload) -> bool:
    """Whether a call of these sizes has too few CTAs without the split of its query heads."""
    ctas = workload.heads // workload.heads_per_kv * ceil_div(workload.len_k, plan.tile_k)
    if spec.mask.expression != sympy.true:
        return bool(ctas < _EVEN_WAVES * workload.multiprocessors)
    waves = ceil_div(ctas, workload.multiprocessors)
    return bool(ctas < _FILLED * waves * workload.multiprocessors)
