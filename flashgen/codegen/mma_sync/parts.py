"""Into how many parts a call's keys are split, by whichever of mma.sync's plans that split them."""

from __future__ import annotations

from flashgen.codegen.mma_sync.decode_plans import DecodePlan
from flashgen.codegen.mma_sync.mixed import choose_mixed_columns
from flashgen.codegen.mma_sync.mixed_plans import MixedPlan
from flashgen.codegen.mma_sync.runs import choose_columns
from flashgen.codegen.mma_sync.splits import choose_splits
from flashgen.codegen.sizes import Sizes
from flashgen.language.spec import AttentionSpec

SplittingPlan = DecodePlan | MixedPlan


def parts_of(spec: AttentionSpec, plan: SplittingPlan, sizes: Sizes) -> int:
    """Parts of the keys, or columns of the grid where blocks share the keys of all sequences."""
    if isinstance(plan, MixedPlan):
        return choose_mixed_columns(spec, plan, sizes)
    return choose_columns(spec, plan, sizes) if plan.scheduled else choose_splits(spec, plan, sizes)
