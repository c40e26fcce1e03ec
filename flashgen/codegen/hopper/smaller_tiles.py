"""When a call's tiles of queries are too few for the card, on Hopper, and it takes smaller ones.

A block has 64 queries for each warpgroup that computes. Three of them are the fastest where there is enough to do; but
512 queries of 32 heads are 96 such tiles, which leave 36 of 132 multiprocessors without any, while two warpgroups, and
more keys a step, make 128 tiles, each done in two thirds of the time. What is compared is what the busiest
multiprocessor does, as where heads are packed, times what the smaller tiles lose where both fill the card.
"""

from __future__ import annotations

from dataclasses import replace

from flashgen.codegen.hopper.measured_plans import choose_hopper_plan
from flashgen.codegen.hopper.pages import has_small_pages
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.targets import Target
from flashgen.codegen.workload import Workload, rounds_of, steps_of
from flashgen.language.spec import AttentionSpec

_LARGER, _SMALLER = HopperPlan(3, 80), HopperPlan(2, 128)
_FEW_ROUNDS = 2  # of the default's tiles over the card: with more, what is left of the last one hardly shows
_MOST_OF_LARGER = 0.9  # of the work that smaller tiles may be: for less a model may be wrong
_LOSS, _LOSS_OVER_SMALL_PAGES = 1.09, 1.16
"""What a score costs by smaller tiles, measured on an H100 over pages of 64 and of 16 keys; contiguous ones as the
former."""


def smaller_plan(spec: AttentionSpec, target: Target) -> HopperPlan | None:
    """The plan of fewer queries a tile beside a spec's default one; None where none was measured.

    Masks whose tiles are listed have other default plans: lists are made ahead, for the tiles of these.
    """
    if spec.is_ragged or spec.kv_dtype:
        return None
    return _SMALLER if choose_hopper_plan(spec, target) == _LARGER else None


def smaller_option(plan: HopperPlan, spec: AttentionSpec, target: Target) -> str:
    """What `flashgen show` is told for a plan of smaller tiles, packed or not; nothing for others."""
    return " --smaller-tiles" if replace(plan, packed_heads=1) == smaller_plan(spec, target) else ""


def smaller_tiles(plan: HopperPlan, spec: AttentionSpec, target: Target, workload: Workload) -> HopperPlan | None:
    """The plan of smaller tiles where these are at least a tenth less work for calls of these sizes; else None."""
    smaller = smaller_plan(spec, target)
    if plan != _LARGER or smaller is None or rounds_of(plan, workload) > _FEW_ROUNDS:
        return None
    loss = _LOSS_OVER_SMALL_PAGES if has_small_pages(spec) else _LOSS
    return smaller if loss * _work(smaller, spec, workload) <= _MOST_OF_LARGER * _work(plan, spec, workload) else None


def _work(plan: HopperPlan, spec: AttentionSpec, workload: Workload) -> float:
    """Scores that the busiest multiprocessor computes."""
    steps = steps_of(spec, workload.len_q, workload.len_k, plan.tile_q, plan.tile_k)
    return rounds_of(plan, workload) * steps * plan.rows * plan.tile_k
