"""V as a part of K: calls take q and kv, and each tile of K serves both products."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import reference
from flashgen.codegen.costs import WorkSizes, forward_cost
from flashgen.codegen.dispatch import render_backward_kernels, render_forward
from flashgen.codegen.mma_sync.decode_plans import decode_plans
from flashgen.codegen.targets import TARGETS
from flashgen.errors import ArgumentError, UnsupportedError
from flashgen.verify import Case, random_inputs, verify
from flashgen.verify.problems import Shape

SPECS: Mapping[str, dict[str, Any]] = {
    "latent": {"head_dim": 576, "value_dim": 512, "mask": fg.causal(), "dtype": "bfloat16"},
    "512": {"head_dim": 512, "sink": fg.Tensor("sinks", "float32", 1, grad=True), "mask": fg.sliding_window(40)},
    "192 and 128": {"head_dim": 192, "value_dim": 128, "dropout": 0.25, "layout": "bshd"},
    "odd dims": {"head_dim": 72, "value_dim": 24, "score": fg.alibi("slopes"), "mask": fg.causal()},
    "varlen": {"head_dim": 96, "value_dim": 64, "layout": "thd", "mask": fg.causal()},
    "float32": {"head_dim": 64, "out_dtype": "float32", "grad_dtype": "float32", "mask": fg.document("ids")},
    "learned": {"head_dim": 128, "score": fg.relative_bias(fg.Tensor("table", "float32", 2, grad=True), 30)},
    "large scale": {"head_dim": 64, "scale": 1.0, "score": fg.softcap(20.0)},
}
TARGETS_TESTED = ("sm_80", "sm_86", "sm_90a")


@pytest.mark.rotated(9)
@pytest.mark.parametrize("target", TARGETS_TESTED)
@pytest.mark.parametrize("name", SPECS)
def test_both_passes(name: str, target: str) -> None:
    shape = Shape(70, 70, 2, 4, 2) if "ids" in str(SPECS[name]) else Shape(70, 100, 2, 4, 2)
    cases = [Case(fg.AttentionSpec(shared_kv=True, **SPECS[name]), shape)]
    for result in verify(cases, passes=("forward", "backward"), target=target, emulate=True):
        assert result.ok, (result.problem, result.verdicts)


@pytest.mark.rotated(9)
@pytest.mark.parametrize("name", SPECS)
def test_deterministic_backward(name: str) -> None:
    shape = Shape(70, 70, 2, 4, 2) if "ids" in str(SPECS[name]) else Shape(70, 100, 2, 4, 2)
    cases = [Case(fg.AttentionSpec(shared_kv=True, **SPECS[name]), shape)]
    for result in verify(cases, passes=("backward",), deterministic=True, target="sm_80", emulate=True):
        assert result.ok, (result.problem, result.verdicts)


CACHED: Mapping[str, tuple[dict[str, Any], Shape]] = {
    "contiguous": ({"head_dim": 576, "value_dim": 512}, Shape(1, 700, 2, 16, 1)),
    "narrow": ({"head_dim": 128, "value_dim": 64, "mask": fg.causal()}, Shape(3, 700, 2, 4, 1)),
    "pages": ({"head_dim": 576, "value_dim": 512, "page_size": 64, "dtype": "bfloat16"}, Shape(2, 300, 3, 12, 1)),
    "small pages": ({"head_dim": 72, "value_dim": 40, "page_size": 1}, Shape(1, 300, 2, 8, 2)),
    "prompts": ({"head_dim": 512, "page_size": 16}, Shape(90, 150, 2, 2, 1)),
    "mixed": ({"head_dim": 576, "value_dim": 512, "page_size": 16, "layout": "thd"}, Shape(70, 200, 3, 4, 1)),
    "mixed, narrow": (
        {"head_dim": 96, "value_dim": 40, "page_size": 8, "layout": "thd", "mask": fg.causal(), "dropout": 0.25},
        Shape(70, 200, 3, 4, 2),
    ),
    "sink": ({"head_dim": 512, "page_size": 64, "sink": fg.Tensor("sinks", "float32", 1)}, Shape(1, 300, 3, 8, 1)),
}


@pytest.mark.rotated(9)
@pytest.mark.parametrize("sanitize", [None, "address", "thread"])
@pytest.mark.parametrize("target", TARGETS_TESTED)
@pytest.mark.parametrize("name", CACHED)
def test_decode_pages_and_mixed_batches(name: str, target: str, sanitize: Any) -> None:
    options, shape = CACHED[name]
    cases = [Case(fg.AttentionSpec(shared_kv=True, **options), shape)]
    for result in verify(cases, target=target, emulate=True, sanitize=sanitize):
        assert result.ok, (result.problem, result.verdicts)


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("name", CACHED)
def test_caches_on_a_gpu(name: str) -> None:
    options, shape = CACHED[name]
    for result in verify([Case(fg.AttentionSpec(shared_kv=True, **options), shape)]):
        assert result.ok, (result.problem, result.verdicts)


@pytest.mark.rotated(9)
@pytest.mark.parametrize("sanitize", ["address", "thread"])
@pytest.mark.parametrize("dims", [(576, 512), (80, 40)])
def test_races_and_overflows(dims: tuple[int, int], sanitize: Any) -> None:
    cases = [Case(fg.AttentionSpec(dims[0], value_dim=dims[1], shared_kv=True), Shape(40, 70, 1, 2, 1))]
    given: Any = {"passes": ("forward", "backward"), "emulate": True, "sanitize": sanitize, "schedule_count": 2}
    for target in ("sm_75", "sm_80") if max(dims) < 256 else ("sm_80", "sm_90a"):
        for deterministic in (False, True):
            for result in verify(cases, target=target, deterministic=deterministic, **given):
                assert result.ok, (result.problem, result.verdicts)


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_on_a_gpu(name: str, deterministic: bool) -> None:
    shape = Shape(600, 600, 2, 4, 2) if "ids" in str(SPECS[name]) else Shape(600, 1000, 2, 4, 2)
    cases = [Case(fg.AttentionSpec(shared_kv=True, **SPECS[name]), shape)]
    for result in verify(cases, passes=("forward", "backward"), deterministic=deterministic):
        assert result.ok, (result.problem, result.verdicts)


def test_results_equal_those_of_a_view() -> None:
    """The output has the bits of a call with v = kv[..., :value_dim], and the gradient is dk plus dv."""
    shared, apart = fg.AttentionSpec(96, value_dim=64, shared_kv=True), fg.AttentionSpec(96, value_dim=64)
    inputs = random_inputs(shared, Shape(40, 70, 2, 4, 2))
    q, kv, v = inputs.q, inputs.k, inputs.k[..., :64]
    one, other = (fg.compile(spec, target="sm_80", emulate=True) for spec in (shared, apart))
    out, lse = one(q, kv, return_lse=True)
    expected, expected_lse = other(q, kv, v, return_lse=True)
    assert np.array_equal(out, expected) and np.array_equal(lse, expected_lse)
    gradients = one.backward(out, q, kv, out, lse)
    assert len(gradients) == 2 and gradients.dv is None and gradients.dk.shape == kv.shape
    dq, dk, dv = other.backward(out, q, kv, v, out, lse)
    dk[..., :64] += dv
    np.testing.assert_allclose(gradients.dk.astype(float), dk.astype(float), atol=4e-3)
    np.testing.assert_allclose(gradients.dq.astype(float), dq.astype(float), atol=2e-3)
    _, pullback = one.vjp(q, kv)
    assert all(np.array_equal(*each) for each in zip(pullback(out), gradients, strict=True))


def test_reference_takes_no_values() -> None:
    spec = fg.AttentionSpec(16, value_dim=8, shared_kv=True)
    inputs = random_inputs(spec, Shape(5, 7, 1, 2, 1))
    assert inputs.v is None
    out = reference.attention(spec, inputs.q, inputs.k)
    expected = reference.attention(fg.AttentionSpec(16, value_dim=8), inputs.q, inputs.k, inputs.k[..., :8])
    assert np.array_equal(out, expected)
    found = reference.backward(spec, inputs.q, inputs.k, None, out)
    assert found.dv is None and found.dk.shape == inputs.k.shape
    with pytest.raises(ArgumentError, match="v: with shared_kv=True, V is the first columns of k"):
        reference.attention(spec, inputs.q, inputs.k, inputs.k)
    with pytest.raises(ArgumentError, match="v is missing"):
        reference.attention(fg.AttentionSpec(16, value_dim=8), inputs.q, inputs.k)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_kernels_load_k_alone(target: str) -> None:
    spec = fg.AttentionSpec(576, value_dim=512, shared_kv=True)
    kernels = [render_forward(spec, TARGETS[target])]
    for deterministic in (False, True):
        kernels += render_backward_kernels(spec, TARGETS[target], deterministic=deterministic)
    kernels += [render_forward(spec, TARGETS[target], plan) for plan in decode_plans(spec, TARGETS[target])]
    for kernel in kernels:
        assert not {"v", "v_strides", "dv"} & {field.name for field in kernel.layout.fields}, kernel.name
        assert not re.search(r"\b(load_values|dv|v_strides)\b", kernel.source), kernel.name


def test_costs_count_keys_once() -> None:
    work = WorkSizes(1, 1, 1, 1, 1000)
    shared, apart = (fg.AttentionSpec(576, value_dim=512, shared_kv=each) for each in (True, False))
    assert forward_cost(apart).hbm(work) - forward_cost(shared).hbm(work) == 1000 * 512 * 2
    assert forward_cost(apart).flops(work) == forward_cost(shared).flops(work)


def test_json_of_other_specs_is_unchanged() -> None:
    assert "shared_kv" not in fg.AttentionSpec(64).to_json()
    spec = fg.AttentionSpec(64, shared_kv=True)
    assert fg.AttentionSpec.from_json(spec.to_json()) == spec and "sharedkv" in spec.name
    assert "shared_kv=True" in repr(spec)


def test_wrong_calls_are_refused_by_name() -> None:
    compiled = fg.compile(fg.AttentionSpec(32, value_dim=16, shared_kv=True), target="sm_80", emulate=True)
    q = np.ones((1, 2, 8, 32), "float16")
    with pytest.raises(ArgumentError, match="v: with shared_kv=True, V is the first 16 columns of k: leave v out"):
        compiled(q, q, q)
    out, lse = compiled(q, q, return_lse=True)
    with pytest.raises(ArgumentError, match="lse is missing: give d_out, q, kv, out and lse"):
        compiled.backward(out, q, q, out)
    apart = fg.compile(fg.AttentionSpec(32), target="sm_80", emulate=True)
    with pytest.raises(ArgumentError, match="v is missing: give q, k and v, or declare shared_kv=True"):
        apart(q, q)
    with pytest.raises(ArgumentError, match="lse is missing: give d_out, q, k, v, out and lse"):
        apart.backward(out, q, q, out, lse)
    small = fg.AttentionSpec(32, shared_kv=True, scale=1e-6)
    with pytest.raises(UnsupportedError, match="scale=1e-06: with shared_kv=True the backward divides"):
        render_backward_kernels(small, TARGETS["sm_80"])
