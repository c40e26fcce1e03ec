"""The plans from which tuning of Hopper's backward may choose."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from flashgen.codegen.hopper.backward_plans import HopperBackwardPlan
from flashgen.codegen.hopper.cluster_plans import HopperClusterPlan
from flashgen.codegen.hopper.wide_plans import HopperWidePlan
from flashgen.codegen.targets import Target
from flashgen.language.spec import AttentionSpec

_STAGES = (2, 3, 4)
_WIDE_QUERIES = (32, 48, 64, 80, 96)
_CLUSTER_QUERIES = (32, 48, 64)


def every_hopper_backward_plan(spec: AttentionSpec, target: Target) -> Iterator[HopperBackwardPlan | HopperWidePlan]:
    """Yields plans of both kinds, including plans that do not fit.

    Each plan of the first kind comes in three forms: plain, with one CTA per query head, and with dQ in a fixed order.
    """
    for tile_q, stages, early_scores in product((64, 128), _STAGES, (True, False)):
        yield HopperBackwardPlan(tile_q, stages, early_scores)
        yield HopperBackwardPlan(tile_q, stages, early_scores, heads_apart=True)
        yield HopperBackwardPlan(tile_q, stages, early_scores, in_turns=True)
    for tile_q, stages in product(_WIDE_QUERIES, _STAGES):
        yield HopperWidePlan(tile_q, stages)


def every_cluster_plan() -> Iterator[HopperClusterPlan]:
    """Yields the plans of clusters, including plans that do not fit."""
    for tile_q, stages in product(_CLUSTER_QUERIES, _STAGES):
        yield HopperClusterPlan(stages, tile_q)
