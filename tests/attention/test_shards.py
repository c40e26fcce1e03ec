"""Sharded calls: masks, scores and dropout use positions in the full sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import reference
from flashgen.build import nvrtc
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.stages import forward_kernels
from flashgen.codegen.targets import target_named
from flashgen.codegen.visited import visited_keys
from flashgen.errors import ArgumentError, SpecError
from flashgen.verify import Case, Shape, shard_cases, verify

LENGTH, CHUNK = 160, 32
slopes = fg.Tensor("slopes", "float32", 1, grad=True)
VARIANTS = {
    "positions": fg.AttentionSpec(32, mask=fg.causal() & fg.sliding_window(70), score=fg.alibi(4), dropout=0.25),
    "captures": fg.AttentionSpec(
        *(32, "bfloat16"),
        mask=fg.document("ids") & fg.causal(),
        score=lambda s, b, h, q, k: s + slopes[h] * (q - k) / 64.0,
    ),
    "heads": fg.AttentionSpec(32, mask=lambda b, h, q, k: (q - k) % (h + b + 1) == 0, dropout=0.1),
    "lengths": fg.AttentionSpec(32, mask=fg.prefix_lm(50), score=lambda s, b, h, q, k: s * (fg.len_k - k) / 400.0),
}


def whole_and_parts(spec: fg.AttentionSpec) -> tuple[Any, Any]:
    """Returns the reference's (output, LSE) of the last rows, and the merged sharded calls, one per chunk of keys."""
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, 4, LENGTH, 32)).astype(np.float16) for _ in range(3))
    every = {"ids": (np.arange(LENGTH) // 37).astype(np.int32), "slopes": random.random(6).astype(np.float32)}
    captures = {capture.name: every[capture.name] for capture in spec.captures}
    seed = {"seed": 7} if spec.dropout else {}
    out, lse = reference.attention(spec, q, k, v, return_lse=True, **seed, **captures)
    rows = slice(64, 128)
    parts = [
        reference.attention(
            *(spec.shard(), q[1:, 2:, rows], k[1:, 2:, start : start + CHUNK], v[1:, 2:, start : start + CHUNK]),
            return_lse=True,
            shard_b=1,
            shard_h=2,
            shard_q=64,
            shard_k=start,
            whole_q=LENGTH,
            whole_k=LENGTH,
            **(captures | seed),
        )
        for start in range(0, LENGTH, CHUNK)
    ]
    merged = reference.merge_states([part[0] for part in parts], [part[1] for part in parts])
    return (out[1:, 2:, rows], lse[1:, 2:, rows]), merged


@pytest.mark.parametrize("name", VARIANTS)
def test_the_sharded_reference_equals_the_full_one(name: str) -> None:
    whole, merged = whole_and_parts(VARIANTS[name])
    for wanted, got in zip(whole, merged, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-12)


@pytest.mark.rotated(36)
@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize("name", VARIANTS)
def test_kernels_equal_the_reference(name: str, target: str) -> None:
    spec = VARIANTS[name].shard()
    if target == "sm_75" and spec.dtype == "bfloat16":
        pytest.skip("Turing has no bfloat16")
    shapes = [Shape(80, 96, 1, 4, 2), Shape(2, 300, 1, 4, 2)]  # the second runs a decode kernel
    cases = [Case(spec, shape) for shape in shapes]
    for result in verify(cases, target=target, passes=("forward", "backward"), emulate=True):
        assert result.ok, str(result)


@pytest.mark.parametrize("spec", [fg.AttentionSpec(32, mask=fg.sliding_window(70)), VARIANTS["lengths"]], ids=str)
def test_packed_heads_use_the_positions_of_their_queries(spec: fg.AttentionSpec) -> None:
    """Shards of windows pack heads like the full kernels that they replace."""
    random = np.random.default_rng(1)
    q, k, v = (
        random.standard_normal((1, heads, rows, 32)).astype(np.float16) for heads, rows in [(8, 96), *[(2, 112)] * 2]
    )
    places = {"shard_b": 0, "shard_h": 0, "shard_q": 192, "shard_k": 160, "whole_q": 400, "whole_k": 400}
    packed = fg.compile(spec.shard(), plan=HopperPlan(1, 32, packed_heads=4), target="sm_90a", emulate=True)
    got = packed(q, k, v, return_lse=True, **places)
    wanted = reference.attention(spec.shard(), q, k, v, return_lse=True, **places)
    for each, right in zip(got, wanted, strict=True):
        np.testing.assert_allclose(each, right, atol=2e-3)


@pytest.mark.rotated(9)
@pytest.mark.parametrize("case", shard_cases()[::3], ids=str)
def test_sweep_cases_on_the_emulator(case: Case) -> None:
    for result in verify([case], target="sm_90a", passes=("forward", "backward"), emulate=True):
        assert result.ok, str(result)


@pytest.mark.gpu
@pytest.mark.quick_every(4)
@pytest.mark.parametrize("case", shard_cases(), ids=str)
def test_sweep_cases_on_a_gpu(case: Case, other_target: str) -> None:
    for target in (None, other_target):
        for result in verify([case], target=target, passes=("forward", "backward")):
            assert result.ok, str(result)


def test_closed_forms_stay_closed_forms() -> None:
    for mask in (fg.causal(), fg.sliding_window(64), fg.prefix_lm(50), fg.dilated_window(60, 3)):
        spec = fg.AttentionSpec(64, mask=mask)
        assert visited_keys(spec) is not None
        assert visited_keys(spec.shard()) is not None, mask.name


def test_positions_are_computed_in_32_bits() -> None:
    spec = fg.AttentionSpec(64, mask=fg.causal() & fg.sliding_window(64), score=fg.alibi(4)).shard()
    for target in ("sm_80", "sm_90a"):
        source = forward_kernels(spec, target_named(target))["forward"].source
        begin = source.index("mask_mod(")
        assert "long long" not in source[begin : source.index("}", begin)]


MOST_SPILLED = 64  # spilled bytes per thread: positions and dropout bits exceed the registers of a thread


@pytest.mark.skipif(not nvrtc.is_available(), reason="needs NVRTC: pip install '.[cuda13]'")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_no_spills(dropout: float) -> None:
    spec = fg.AttentionSpec(128, "bfloat16", mask=fg.causal(), dropout=dropout).shard()
    attention = fg.compile(spec, target="sm_90a")
    for resources in (attention.resources, *attention.backward_resources.values()):
        assert max(resources.spill_stores, resources.spill_loads) <= (MOST_SPILLED if dropout else 0)


def test_json_and_names() -> None:
    spec = VARIANTS["positions"].shard()
    assert fg.AttentionSpec.from_json(spec.to_json()) == spec == spec.shard()
    assert spec != VARIANTS["positions"]
    assert "-shard-" in spec.name
    assert "sharded" not in VARIANTS["positions"].to_json(), "the text of specs without shards does not change"
    assert fg.AttentionSpec(32, mask=fg.causal(), sharded=True) == fg.AttentionSpec(32, mask=fg.causal()).shard()


def test_invalid_shards_are_refused() -> None:
    with pytest.raises(SpecError, match="layout='thd'"):
        fg.AttentionSpec(32, layout="thd").shard()
    with pytest.raises(SpecError, match="page_size=16"):
        fg.AttentionSpec(32, page_size=16, sharded=True)
    with pytest.raises(SpecError, match="already names"):
        fg.Scalar("shard_q")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"shard_q": -32}, "shard_q=-32"),
        ({"whole_k": 63}, "whole_k=63: the 64 rows of k must lie within"),
        ({"shard_k": 16, "whole_k": 80}, "multiple of 32"),
        ({"shard_h": 65535}, "shard_h=65535"),
        ({"whole_q": 10**9 + 1}, "within 1000000000"),
    ],
)
def test_offsets_outside_the_sequence_are_refused(changed: dict[str, int], message: str) -> None:
    places = {"shard_b": 0, "shard_h": 0, "shard_q": 0, "shard_k": 0, "whole_q": 64, "whole_k": 64}
    attention = fg.compile(fg.AttentionSpec(32, dropout=0.5).shard(), emulate=True)
    q, k, v = (np.zeros((1, 2, 64, 32), np.float16) for _ in range(3))
    with pytest.raises(ArgumentError, match=message):
        attention(q, k, v, seed=1, **(places | changed))
