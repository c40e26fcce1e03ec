"""Backward plans: contradictory or unsuitable plans are refused by name; default plans fit everywhere."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

import flashgen.language as fg
from flashgen.codegen.backward_kernels import PREPROCESS_ROWS
from flashgen.codegen.dispatch import render_backward_kernels
from flashgen.codegen.mma_sync.backward_plans import (
    BackwardPlan,
    QueriesPlan,
    choose_backward_plan,
    choose_queries_plan,
)
from flashgen.codegen.padding import padded
from flashgen.codegen.sizes import Sizes
from flashgen.codegen.targets import TARGETS, Target
from flashgen.errors import UnsupportedError
from flashgen.language import AttentionSpec
from flashgen.verify import spec_of, variants

SPEC, DROPOUT = AttentionSpec(64), AttentionSpec(64, dropout=0.1)
DIMS = range(8, 264, 8)
MODES = (False, True)
every_target = pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)

# For the dkdv kernel, whose warps divide tile_k, and the dq kernel, whose warps divide tile_q: (tile_q, tile_k, warps,
# ...).
KEYS_PROBLEMS: list[tuple[BackwardPlan, str, str]] = [
    (BackwardPlan(64, 100, 4), "sm_80", "tile_k=100 must be a multiple of 16 x warps=4 / split=1"),
    (BackwardPlan(64, 64, 8), "sm_80", "tile_k=64 must be a multiple of 16 x warps=8 / split=1"),
    (BackwardPlan(64, 64, 8, split=3), "sm_80", "tile_k=64 must be a multiple of 16 x warps=8 / split=3"),
    (BackwardPlan(40, 64, 4), "sm_80", "tile_q=40 must be a multiple of 16 x split=1"),
    (BackwardPlan(48, 64, 4, split=2), "sm_80", "tile_q=48 must be a multiple of 16 x split=2"),
    (BackwardPlan(64, 48, 3, split=3), "sm_80", "tile_q=64 must be a multiple of 16 x split=3"),
    (BackwardPlan(96, 64, 3, split=3), "sm_80", "tile_k=64 must be a multiple of warps=3, which divide its rows"),
    (BackwardPlan(128, 64, 8, split=8), "sm_80", "split=8 must divide head and value dims into multiples of 16"),
    (BackwardPlan(64, 64, 4, stages=3), "sm_80", "stages=3 must be 1 or 2"),
    (BackwardPlan(64, 64, 4, stages=0), "sm_80", "stages=0 must be 1 or 2"),
    (BackwardPlan(64, 64, 4, stages=2), "sm_75", "stages=2 needs asynchronous copies, which sm_75 has not"),
    (BackwardPlan(128, 128, 8, stages=2), "sm_86", "133120 bytes of shared memory and a block of sm_86 has 101376"),
    (BackwardPlan(64, 64, 0), "sm_80", "must be positive, and its warps at most 32"),
    (BackwardPlan(64, 64, 4, split=0), "sm_80", "must be positive"),
    (BackwardPlan(64, 64, 4, blocks=0), "sm_80", "must be positive"),
    (BackwardPlan(64, 1024, 64), "sm_80", "its warps at most 32"),
]
QUERIES_PROBLEMS: list[tuple[QueriesPlan, AttentionSpec, str, str]] = [
    (QueriesPlan(100, 64, 4), SPEC, "sm_80", "tile_q=100 must be a multiple of 16 x warps=4 / split=1"),
    (QueriesPlan(64, 40, 4), SPEC, "sm_80", "tile_k=40 must be a multiple of 16 x split=1"),
    (QueriesPlan(96, 96, 3, split=3), SPEC, "sm_80", "split=3 must divide head and value dims"),
    (QueriesPlan(64, 64, 4, stages=2), SPEC, "sm_75", "stages=2 needs asynchronous copies"),
    (QueriesPlan(128, 256, 8, stages=2), SPEC, "sm_86", "163840 bytes of shared memory and a block of sm_86"),
    (QueriesPlan(64, 48, 4), DROPOUT, "sm_80", "tile_k=48 must be a multiple of 32 with dropout"),
    (QueriesPlan(64, 32, 4, split=2), DROPOUT, "sm_80", "tile_k=32 must be a multiple of 32 x split=2 with dropout"),
]


@pytest.mark.parametrize(("plan", "target", "message"), KEYS_PROBLEMS, ids=lambda value: str(value))
def test_impossible_plans_are_refused(plan: BackwardPlan, target: str, message: str) -> None:
    problem = plan.problem(SPEC, TARGETS[target])
    assert problem is not None and message in problem
    with pytest.raises(UnsupportedError) as error:
        render_backward_kernels(SPEC, TARGETS[target], plan)
    assert str(error.value) == f"{plan}: {problem}"


@pytest.mark.parametrize(("plan", "spec", "target", "message"), QUERIES_PROBLEMS, ids=lambda value: str(value))
def test_impossible_dq_plans_have_a_problem(plan: QueriesPlan, spec: AttentionSpec, target: str, message: str) -> None:
    problem = plan.problem(spec, TARGETS[target])
    assert problem is not None and message in problem


def test_limits_of_the_dkdv_kernel_do_not_apply_to_the_dq_kernel() -> None:
    """The dkdv kernel draws random bytes for blocks of 16 x 32 keys; any number of full mma tiles of queries works."""
    assert BackwardPlan(16, 48, 3).problem(DROPOUT, TARGETS["sm_80"]) is None
    assert QueriesPlan(64, 48, 4).problem(SPEC, TARGETS["sm_80"]) is None


def test_shared_memory_is_the_size_of_the_tiles() -> None:
    spec = AttentionSpec(40, value_dim=64)  # 48 and 64 columns
    tiles = 2 * 64 * (48 + 64) + 2 * (2 * 32 * (48 + 64) + 8 * 32)
    assert BackwardPlan(32, 64, 4).shared_bytes(spec, deterministic=True) == tiles
    assert BackwardPlan(32, 64, 4).shared_bytes(spec) == tiles + 2 * 32 * 64  # dS
    assert BackwardPlan(32, 64, 4, split=2).shared_bytes(spec, deterministic=True) == tiles + 2 * 2 * 32 * 64  # and P
    assert BackwardPlan(32, 64, 4, split=2).shared_bytes(spec) == tiles + 2 * 2 * 32 * 64
    assert QueriesPlan(64, 32, 4, stages=1).shared_bytes(spec) == 2 * (64 + 32) * (48 + 64)
    assert QueriesPlan(64, 32, 4, split=2).shared_bytes(spec) == 2 * ((64 + 2 * 32) * (48 + 64) + 64 * 32)


def test_warps_divide_a_dq_tile_into_full_mma_tiles() -> None:
    for tile_q, warps, head_dim in product((16, 32, 48, 64, 128), (1, 2, 3, 4, 8, 12), DIMS):
        spec = AttentionSpec(head_dim)
        rows, columns = BackwardPlan(tile_q, 64, warps).gradient_warps(spec)
        assert rows * columns <= warps and (tile_q // 16) % rows == 0 and (padded(head_dim) // 16) % columns == 0
        if (tile_q // 16) % warps == 0 or (padded(head_dim) // 16) % warps == 0:
            assert rows * columns == warps, (tile_q, warps, head_dim)
    of = lambda tile_q, head_dim, warps: BackwardPlan(tile_q, 64, warps).gradient_warps(AttentionSpec(head_dim))
    assert of(64, 64, 4) == (2, 2) and of(64, 128, 8) == (2, 4) and of(16, 8, 4) == (1, 1) and of(128, 16, 8) == (8, 1)
    assert of(16, 48, 8) == (1, 3)  # as many warps as find a tile


def fits(plan: Any, shared: int, target: Target) -> None:
    assert shared <= target.shared_per_block
    reserved = target.reserved_shared_per_block
    assert plan.blocks == 1 or plan.blocks * (shared + reserved) <= target.shared_per_multiprocessor
    assert 32 <= plan.threads <= 1024 and plan.blocks * plan.threads * 32 <= 65536


@pytest.mark.rotated(4)
@every_target
@pytest.mark.parametrize("deterministic", MODES, ids=["default", "deterministic"])
def test_default_plans_fit(target: Target, deterministic: bool) -> None:
    for head_dim, value_dim in product(DIMS, (8, 40, 64, 128, 192, 256)):
        for spec in (AttentionSpec(head_dim, value_dim=value_dim), AttentionSpec(value_dim, value_dim=head_dim)):
            plan = choose_backward_plan(spec, target, deterministic)
            assert plan.problem(spec, target, deterministic) is None
            fits(plan, plan.shared_bytes(spec, deterministic), target)
            if deterministic:
                queries = choose_queries_plan(spec, target)
                assert queries.problem(spec, target) is None
                fits(queries, queries.shared_bytes(spec), target)


@every_target
@pytest.mark.rotated(8)
def test_default_plans_fit_every_variant(target: Target) -> None:
    for variant, dim in product(variants(), (8, 64, 128, 160, 256)):
        spec = spec_of(variant, dim, "float16")
        for deterministic in MODES:
            plan = choose_backward_plan(spec, target, deterministic)
            plan.check(spec, target, deterministic)
            fits(plan, plan.shared_bytes(spec, deterministic), target)
        queries = choose_queries_plan(spec, target)
        assert queries.problem(spec, target) is None
        fits(queries, queries.shared_bytes(spec), target)


def test_every_division_is_the_default_of_some_spec() -> None:
    """Tests of default plans therefore cover each kind of kernel."""
    keys = {choose_backward_plan(AttentionSpec(dim), target).split for dim in DIMS for target in TARGETS.values()}
    queries = {choose_queries_plan(AttentionSpec(dim), target).split for dim in DIMS for target in TARGETS.values()}
    assert keys >= {2, 4} and queries >= {1, 2}


def test_a_plan_depends_only_on_the_spec() -> None:
    spec, target = AttentionSpec(128, mask=fg.causal()), TARGETS["sm_80"]
    same = AttentionSpec.from_json(spec.to_json())
    assert choose_backward_plan(spec, target) == choose_backward_plan(same, target)
    assert choose_queries_plan(spec, target) == choose_queries_plan(same, target)


def test_a_plan_of_the_caller_is_kept() -> None:
    plan = replace(choose_backward_plan(SPEC, TARGETS["sm_80"]), stages=1, blocks=1)
    rendered = render_backward_kernels(SPEC, TARGETS["sm_80"], plan)
    keys = next(kernel for kernel in rendered if kernel.role == "dkdv")
    assert keys.plan == plan and keys.threads == plan.threads and keys.shared_bytes == plan.shared_bytes(SPEC)
    rows = keys.values(Sizes(1, 1, 1, 1, 1))["rows"]
    assert rows % plan.tile_q == 0 and rows % PREPROCESS_ROWS == 0
