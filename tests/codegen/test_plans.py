"""Plans: contradictory or unsuitable plans are refused by name; default plans fit everywhere."""

from __future__ import annotations

from itertools import product

import pytest

import flashgen.language as fg
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan, choose_forward_plan
from flashgen.codegen.padding import padded
from flashgen.codegen.targets import TARGETS, target_named, target_of_capability
from flashgen.errors import UnsupportedError
from flashgen.language import AttentionSpec
from flashgen.verify import variants
from flashgen.verify.variants import spec_of

SPEC = AttentionSpec(64)
DIMS = range(8, 264, 8)


@pytest.mark.parametrize(
    ("plan", "target", "message"),
    [
        (ForwardPlan(100, 64, 4), "sm_80", "tile_q=100"),
        (ForwardPlan(64, 64, 8), "sm_80", "tile_q=64 must be a multiple of 16 x warps=8"),
        (ForwardPlan(64, 64, 3), "sm_80", "warps=3"),
        (ForwardPlan(64, 40, 4), "sm_80", "tile_k=40"),
        (ForwardPlan(64, 64, 4, stages=3), "sm_80", "stages=3"),
        (ForwardPlan(64, 64, 4, stages=0), "sm_80", "stages=0"),
        (ForwardPlan(64, 64, 4, stages=2), "sm_75", "stages=2 needs asynchronous copies, which sm_75 has not"),
        (ForwardPlan(256, 256, 4, stages=2), "sm_86", r"163840 bytes of shared memory.* sm_86 has 101376"),
    ],
)
def test_impossible_plans_are_refused(plan: ForwardPlan, target: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as error:
        plan.check(SPEC, TARGETS[target])
    assert str(plan) in str(error.value)


def test_dropout_needs_full_blocks_of_random_bytes() -> None:
    ForwardPlan(64, 48, 4).check(SPEC, TARGETS["sm_80"])
    with pytest.raises(UnsupportedError, match="of 32 with dropout"):
        ForwardPlan(64, 48, 4).check(AttentionSpec(64, dropout=0.1), TARGETS["sm_80"])


def test_shared_memory_is_the_size_of_the_tiles() -> None:
    plan = ForwardPlan(64, 32, 4, stages=2)
    assert plan.shared_bytes(AttentionSpec(40, value_dim=64)) == 2 * (64 * 48 + 2 * 32 * (48 + 64))
    assert plan.shared_bytes(AttentionSpec(8, value_dim=256)) == 2 * max(64 * 16 + 2 * 32 * 272, 64 * 256)
    assert [padded(width) for width in (8, 16, 24, 256)] == [16, 16, 32, 256]


@pytest.mark.rotated(4)
@pytest.mark.parametrize("name", TARGETS)
def test_default_plans_fit(name: str) -> None:
    target = TARGETS[name]
    for head_dim, value_dim in product(DIMS, DIMS):
        spec = AttentionSpec(head_dim, value_dim=value_dim)
        plan = choose_forward_plan(spec, target)  # the constructor checks the plan
        assert plan.shared_bytes(spec) <= target.shared_per_block
        reserved = target.reserved_shared_per_block
        assert plan.blocks * (plan.shared_bytes(spec) + reserved) <= target.shared_per_multiprocessor
        assert 32 <= plan.threads <= 1024 and plan.tile_q % (16 * plan.warps) == 0


@pytest.mark.parametrize("name", TARGETS)
def test_default_plans_fit_every_variant(name: str) -> None:
    for variant, dim in product(variants(), (8, 64, 128, 160, 256)):
        choose_forward_plan(spec_of(variant, dim, "float16"), TARGETS[name]).check(
            spec_of(variant, dim, "float16"), TARGETS[name]
        )


def test_a_plan_depends_only_on_the_spec() -> None:
    target = TARGETS["sm_80"]
    spec = AttentionSpec(128, mask=fg.causal())
    assert choose_forward_plan(spec, target) == choose_forward_plan(AttentionSpec.from_json(spec.to_json()), target)


def test_targets_by_name_and_capability() -> None:
    assert target_of_capability(8, 6) is target_named("sm_86") is TARGETS["sm_86"]
    assert TARGETS["sm_75"].dtypes == ("float16",) and not TARGETS["sm_75"].asynchronous_copies
    assert all(
        target.shared_per_block < target.shared_per_multiprocessor or name == "sm_75"
        for name, target in TARGETS.items()
    )
    for name in ("sm_70", "SM_80", "80", "", 80, None, ["sm_80"]):
        with pytest.raises(UnsupportedError, match="target="):
            target_named(name)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="sm_70"):
        target_of_capability(7, 0)
