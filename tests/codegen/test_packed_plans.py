"""Packed heads on Hopper: dispatch, text and assembled code."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

import flashgen.language as fg
from flashgen.build import nvrtc
from flashgen.codegen.dispatch import render_forward
from flashgen.codegen.hopper.head_packing import max_packed_heads, packed_plan
from flashgen.codegen.hopper.measured_plans import choose_hopper_plan
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.stages import kernels_of
from flashgen.codegen.targets import target_named
from flashgen.codegen.workload import Workload
from flashgen.errors import UnsupportedError
from flashgen.language import AttentionSpec

SM_90A = target_named("sm_90a")
CAUSAL, FULL = AttentionSpec(128, mask=fg.causal()), AttentionSpec(128)
ALIBI = replace(CAUSAL, score=fg.alibi("slopes"))
DROPPED = replace(CAUSAL, dropout=0.1)
BY_HEAD = replace(CAUSAL, mask=fg.block_sparse(fg.Tensor("layout", "bool", 4), 64, 64))
DOCUMENT = replace(CAUSAL, mask=fg.document("ids"))
PLAN = HopperPlan(2, 128)
needs_nvrtc = pytest.mark.skipif(not nvrtc.is_available(), reason="needs CuPy and NVRTC: pip install '.[cuda13]'")


def chosen(spec: AttentionSpec, batch: int, heads: int, heads_kv: int, len_q: int, len_k: int) -> int:
    """Returns the number of packed heads on a GPU with 132 multiprocessors."""
    workload = Workload(len_q, len_k, batch * heads, 132, heads // heads_kv)
    packed = packed_plan(PLAN, spec, SM_90A, workload)
    assert packed is None or replace(packed, packed_heads=1) == PLAN
    return packed.packed_heads if packed else 1


@pytest.mark.parametrize("spec", [CAUSAL, FULL, ALIBI, replace(CAUSAL, mask=fg.sliding_window(100))], ids=str)
def test_heads_are_packed_where_the_busiest_multiprocessor_has_less_work(spec: AttentionSpec) -> None:
    assert chosen(spec, 8, 32, 8, 1, 4096) == 4  # 2 waves of tiles, or 1
    assert chosen(spec, 16, 32, 1, 3, 4096) == 32
    assert chosen(spec, 16, 32, 8, 64, 8192) == 4  # half-empty tiles
    assert chosen(spec, 16, 32, 8, 300, 300) == 4  # 2.3 tiles
    assert chosen(spec, 64, 128, 1, 8, 100) == 64


@pytest.mark.parametrize("spec", [CAUSAL, FULL, ALIBI], ids=str)
def test_heads_are_not_packed_without_gain(spec: AttentionSpec) -> None:
    assert chosen(spec, 1, 32, 8, 1, 10**6) == 1  # one tile per multiprocessor without packing
    assert chosen(spec, 16, 32, 32, 1, 4096) == 1  # no heads share KV heads
    assert chosen(spec, 16, 24, 8, 1, 4096) == 1  # 3 heads share one, which leave a remainder in a tile
    assert chosen(spec, 4, 32, 8, 4096, 4096) == 1  # full tiles
    assert chosen(spec, 4, 32, 8, 4000, 4000) == 1  # a gain of less than a tenth


@pytest.mark.parametrize("window", [100, 400])
def test_shards_are_packed_like_full_sequences_of_their_size(window: int) -> None:
    """The position of a shard is a number of the call and does not affect dispatch."""
    spec = replace(CAUSAL, mask=fg.sliding_window(window))
    sizes = (1, 32, 8, 31744, 32768)
    assert chosen(spec.shard(), *sizes) == chosen(spec, *sizes) == (4 if window == 400 else 1)
    assert chosen(CAUSAL.shard(), 1, 32, 8, 32768, 32768) == 1


@pytest.mark.parametrize("spec", [DROPPED, BY_HEAD, DOCUMENT], ids=str)
def test_specs_that_are_not_packed_automatically(spec: AttentionSpec) -> None:
    assert chosen(spec, 16, 32, 8, 1, 4096) == 1


@pytest.mark.parametrize(("sharing", "packed"), [(1, 1), (2, 2), (3, 1), (6, 2), (8, 8), (12, 4), (64, 64), (128, 64)])
def test_the_largest_divisor_of_the_group_is_packed(sharing: int, packed: int) -> None:
    assert max_packed_heads(sharing) == packed


def test_lanes_have_rows_of_one_head_if_scores_read_much_per_head() -> None:
    bias = fg.trace_score(lambda score, b, h, q, k: score + fg.Tensor("bias", "float32", 3)[h, q, k], "bias")
    for score in (bias, fg.relative_bias("table", 24)):
        assert chosen(replace(CAUSAL, score=score), 16, 32, 1, 3, 4096) == 8


@pytest.mark.parametrize(
    ("plan", "spec", "says"),
    [
        (replace(PLAN, packed_heads=3), CAUSAL, "packed_heads=3 must be a power of 2 from 1 to 64"),
        (replace(PLAN, packed_heads=128), CAUSAL, "packed_heads=128 must be"),
        (replace(PLAN, packed_heads=0), CAUSAL, "packed_heads=0 must be"),
        (replace(PLAN, packed_heads=4), DROPPED, "must be 1, as dropout"),
        (replace(PLAN, packed_heads=4), BY_HEAD, "must be 1, as block_sparse.* differs between heads"),
        (HopperPlan(1, 32, packed_heads=16), DOCUMENT, "leaves tiles of 4 x 32, too small to be listed"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_plans_that_cannot_pack_are_refused_by_name(plan: HopperPlan, spec: AttentionSpec, says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        render_forward(spec, SM_90A, plan)


@pytest.mark.parametrize(("packed", "of_q", "of_o"), [(2, (2, 32), (2, 8)), (16, (16, 4), (16, 1)),
                                                      (64, (64, 1), (16, 1))])  # fmt: skip
def test_boxes_of_heads_and_queries(packed: int, of_q: tuple[int, int], of_o: tuple[int, int]) -> None:
    plan = replace(PLAN, packed_heads=packed)
    kernel = render_forward(AttentionSpec(96, value_dim=128), SM_90A, plan)
    assert kernel.boxes == {"q": (32, *of_q), "k": (32, 128), "v": (64, 128), "o": (64, *of_o)}
    assert plan.rows == 128 and plan.tile_q == 128 // packed
    assert kernel.name.endswith(f"-packed{packed}")
    assert f"{128 // packed} queries of {packed} heads x 128 keys" in kernel.source
    assert f"flashgen show --packed-heads {packed} --target sm_90a" in kernel.source


def test_unpacked_kernels_contain_no_packing_code() -> None:
    for spec in (CAUSAL, FULL, ALIBI, DOCUMENT):
        assert not re.search(r"kPack|packed_heads|packed-heads|\bpacks?\b", render_forward(spec, SM_90A).source)


def test_the_packed_kernel_of_a_default_plan() -> None:
    (kernel,) = kernels_of(ALIBI, SM_90A, packed_heads=8).values()
    assert kernel == render_forward(ALIBI, SM_90A, replace(choose_hopper_plan(ALIBI, SM_90A), packed_heads=8))
    with pytest.raises(UnsupportedError, match="packed_heads=8: sm_80 packs no heads; target='sm_90a' does"):
        kernels_of(ALIBI, target_named("sm_80"), packed_heads=8)


@needs_nvrtc
@pytest.mark.parametrize(
    ("spec", "packed"),
    [
        (CAUSAL, 4),
        (replace(ALIBI, head_dim=64, value_dim=64, dtype="bfloat16"), 16),
        (AttentionSpec(256, mask=fg.sliding_window(99)), 8),
        (replace(ALIBI, head_dim=256, value_dim=256), 4),
    ],
    ids=str,
)
@pytest.mark.rotated(3)
def test_packed_kernels_compile_without_spills_or_serialized_products(spec: AttentionSpec, packed: int) -> None:
    (kernel,) = kernels_of(spec, SM_90A, packed_heads=packed).values()
    result: Any = nvrtc.compile(kernel.source, "sm_90a", kernel.name)
    assert not result.resources.spills and not re.search(r"\(C75\d\d\)", result.log)
    assert result.resources.registers * kernel.threads <= 65536
