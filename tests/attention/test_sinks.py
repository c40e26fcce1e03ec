"""Sinks: one extra score per head without a value, in the output, the LSE and the gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashgen as fg
from flashgen import attention
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.errors import ArgumentError, LaunchError, SpecError
from flashgen.verify import Case, judged, judged_gradients, sink_cases, verify
from flashgen.verify.gradients import gradients_by_name
from flashgen.verify.samples import samples

TARGETS = ("sm_80", "sm_90a")
targets = pytest.mark.parametrize("target", TARGETS)
SINKS = fg.Tensor("sinks", "float32", 1, grad=True)


def spec_of(**given: Any) -> fg.AttentionSpec:
    return fg.AttentionSpec(32, "float16", **{"sink": SINKS, **given})


def arrays(len_q: int, len_k: int, heads: int = 4, batch: int = 2) -> tuple[Any, Any, Any]:
    random = np.random.default_rng(2)
    shapes = ((batch, heads, len_q, 32), (batch, 2, len_k, 32), (batch, 2, len_k, 32))
    q, k, v = (random.standard_normal(shape, dtype=np.float32).astype(np.float16) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize("case", sink_cases(), ids=str)
@targets
@pytest.mark.rotated(36)
def test_every_family_on_the_emulator(case: Case, target: str) -> None:
    for deterministic in (False, True):
        options: dict[str, Any] = {"emulate": True, "target": target, "deterministic": deterministic}
        for result in verify((case,), passes=("forward", "backward"), schedule_count=2, **options):
            assert result.ok, f"{result.case} on {result.engine}: {result.problem or result.verdict}"


@pytest.mark.slow
@pytest.mark.parametrize("sanitize", ["address", "thread"])
@pytest.mark.parametrize("case", sink_cases()[::3], ids=str)
@pytest.mark.rotated(36)
def test_sanitizers_find_nothing(case: Case, sanitize: Any) -> None:
    """One problem, where `verify` uses several because a sink has few elements: each costs as many launches."""
    target = TARGETS[sink_cases().index(case) // 3 % len(TARGETS)]
    shape = replace(case.shape, len_q=min(case.shape.len_q, 70), len_k=min(case.shape.len_k, 90))
    (sample,) = samples(replace(case, shape=shape), 0, backward=False)
    compiled = attention.compile(case.spec, emulate=True, target=target, sanitize=sanitize)
    out, lse = compiled(*sample.qkv, return_lse=True, **sample.options)
    found = gradients_by_name(compiled.backward(sample.d_out, *sample.qkv, out, lse, **sample.options))
    rest = dict(sample.options)
    seed = rest.pop("seed", 0)
    verdicts = judged_gradients(case.spec, *sample.qkv, sample.d_out, found, **sample.options)
    verdicts["out"] = judged(case.spec, *sample.qkv, out, lse, rest, seed=seed)
    assert all(verdict.ok for verdict in verdicts.values()), verdicts


@pytest.mark.gpu
@pytest.mark.parametrize("case", sink_cases(), ids=str)
def test_on_a_gpu(case: Case) -> None:
    for result in verify((case,), passes=("forward", "backward"), deterministic=True, schedule_count=3):
        assert result.ok, f"{result.case}: {result.problem or result.verdict}"


def test_a_sink_equals_an_extra_key_with_value_zero() -> None:
    """Compared with attention without sinks over one more key, whose score is the sink."""
    q, k, v = (array.astype(np.float32) for array in arrays(20, 30))
    sinks = np.array([0.5, -1, 2, 0], np.float32)
    out, lse = fg.reference.attention(spec_of(), q, k, v, sinks=sinks, return_lse=True)
    table = fg.Tensor("table", "float32", 1)
    score = fg.trace_score(lambda score, b, h, q, k: fg.where(k < fg.len_k - 1, score, table[h]))
    more = [np.concatenate([array, np.zeros_like(array[:, :, :1])], axis=2) for array in (k, v)]
    plain = fg.AttentionSpec(32, "float16", score=score)
    expected = fg.reference.attention(plain, q, *more, table=sinks, return_lse=True)
    np.testing.assert_allclose(out, expected[0], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-12)


def test_the_references_gradient_is_the_slope() -> None:
    q, k, v = (array.astype(np.float64) for array in arrays(7, 9, batch=1))
    sinks, random = np.array([0.5, -1, 2, 0.1]), np.random.default_rng(5)
    d_out, d_lse = random.standard_normal(q.shape), random.standard_normal(q.shape[:3])
    spec = spec_of(sink=fg.Tensor("sinks", "float32", 1, grad=True), mask=fg.causal())

    def loss(given: Any) -> float:
        out, lse = fg.reference.attention(spec, q, k, v, sinks=given.astype(np.float32), return_lse=True)
        return float((out * d_out).sum() + (lse * d_lse).sum())

    found = fg.reference.backward(spec, q, k, v, d_out, d_lse=d_lse, sinks=sinks.astype(np.float32)).captures["sinks"]
    for head in range(4):
        step = np.eye(4)[head] * 2.0**-10
        slope = (loss(sinks + step) - loss(sinks - step)) / 2.0**-9
        assert abs(slope - found[head]) < 1e-4 * max(1, abs(slope)), head


@targets
@pytest.mark.parametrize("sinks", [(-np.inf, -1e4, 1e4, 700.0), (3e4, -3e4, 0.0, 88.0)])
def test_sinks_of_extreme_magnitude(target: str, sinks: tuple[float, ...]) -> None:
    """A dominating sink gives an output of 0; a very small one gives the output without sink."""
    q, k, v = arrays(70, 130)
    given = {"sinks": np.array(sinks, np.float32)}
    out, lse = fg.compile(spec_of(), target, emulate=True)(q, k, v, return_lse=True, **given)
    expected, of_rows = fg.reference.attention(spec_of(), q, k, v, return_lse=True, **given)
    assert np.abs(out - expected).max() < 2e-3 and np.isfinite(lse).all()
    assert (np.abs(lse - of_rows) <= np.maximum(1e-3, np.abs(of_rows) * 2.0**-20)).all()
    assert judged(spec_of(), q, k, v, out, lse, given).ok


@targets
def test_rows_without_keys_have_only_the_sink(target: str) -> None:
    q, k, v = arrays(70, 40)
    k[...] = v[...] = np.nan
    spec = spec_of(mask=fg.trace_mask(lambda b, h, q, k: k < 0))
    out, lse = fg.compile(spec, target, emulate=True)(q, k, v, return_lse=True, sinks=np.arange(4, dtype=np.float32))
    assert (out == 0).all()
    np.testing.assert_allclose(lse, np.broadcast_to(np.arange(4)[None, :, None], lse.shape), atol=1e-6)


@targets
def test_no_keys_at_all(target: str) -> None:
    q, k, v = arrays(30, 0)
    attention, sinks = fg.compile(spec_of(), target, emulate=True), np.array([1, -2, 3, 0.5], np.float32)
    out, lse = attention(q, k, v, return_lse=True, sinks=sinks)
    assert (out == 0).all()
    np.testing.assert_allclose(lse, np.broadcast_to(sinks[None, :, None], lse.shape), atol=1e-6)
    d_lse = np.random.default_rng(0).standard_normal(lse.shape, dtype=np.float32)
    gradients = attention.backward(out, q, k, v, out, lse, d_lse=d_lse, sinks=sinks)
    assert (gradients.dq == 0).all()
    np.testing.assert_allclose(gradients.captures["sinks"], d_lse.sum(axis=(0, 2)), rtol=1e-5)


def test_packed_heads_have_separate_sinks() -> None:
    q, k, v = arrays(5, 90, heads=16)
    given = {"sinks": np.linspace(-3, 5, 16).astype(np.float32)}
    for packed in (1, 2, 8):
        attention = fg.compile(spec_of(), "sm_90a", emulate=True, plan=HopperPlan(2, 64, packed_heads=packed))
        out, lse = attention(q, k, v, return_lse=True, **given)
        assert judged(spec_of(), q, k, v, out, lse, given).ok


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sinks_of_16_bits(dtype: str) -> None:
    spec = spec_of(sink=fg.Tensor("sinks", dtype, 1, grad=True), mask=fg.causal())
    q, k, v = arrays(60, 60, heads=16)
    given = {"sinks": np.linspace(-2, 2, 16).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16)}
    attention = fg.compile(spec, "sm_80", emulate=True)
    out, lse = attention(q, k, v, return_lse=True, **given)
    found = gradients_by_name(attention.backward(np.ones_like(q), q, k, v, out, lse, **given))
    assert found["d_sinks"].dtype == given["sinks"].dtype
    assert all(each.ok for each in judged_gradients(spec, q, k, v, np.ones_like(q), found, **given).values())


def test_sinks_without_a_gradient_launch_no_kernel() -> None:
    attention = fg.compile(spec_of(sink=fg.Tensor("sinks", "float32", 1)), "sm_80", emulate=True)
    assert "sink" not in attention.backward_kernels
    assert "sink" in fg.compile(spec_of(), "sm_80", emulate=True).backward_kernels


def test_invalid_sinks() -> None:
    for wrong in (fg.Tensor("sinks", "float32", 2), fg.Tensor("sinks", "int32", 1), fg.Scalar("sink", "float32"), 1.0):
        with pytest.raises(SpecError, match="must be a Tensor of one dimension and floats"):
            spec_of(sink=wrong)
    with pytest.raises(SpecError, match="the mask or the score function reads 'slopes' too"):
        spec_of(score=fg.alibi("slopes"), sink=fg.Tensor("slopes", "float32", 1))
    q, k, v = arrays(10, 10)
    attention = fg.compile(spec_of(), "sm_80", emulate=True)
    with pytest.raises(ArgumentError, match=r"capture 'sinks' has shape \(3,\); a sink for each query head is \(4,\)"):
        attention(q, k, v, sinks=np.zeros(3, np.float32))
    with pytest.raises(ArgumentError, match="capture 'sinks' is missing"):
        attention(q, k, v)
    with pytest.raises(ArgumentError, match="sink is not in the papers' algorithms"):
        fg.reference.standard(spec_of(), q, k, v, sinks=np.zeros(4, np.float32))


def test_names_of_specs_without_a_sink_do_not_change() -> None:
    assert fg.AttentionSpec(64, mask=fg.causal()).name == "fp16-d64-causal-dc7bbe62"
    spec = spec_of()
    assert fg.AttentionSpec.from_json(spec.to_json()) == spec and spec.name.startswith("fp16-d32-full-sink-")
    with pytest.raises(SpecError, match="must be a captured array"):
        fg.AttentionSpec.from_json('{"head_dim": 64, "sink": "sinks"}')


FAULTS = {
    "the sink is not counted": ("fwd", ".add_sink(sink);", ".add_sink(minus_infinity());"),
    "the output does not shrink": ("fwd", ".rescale_factor / (", ".sum / ("),
    "the sink is scaled": ("fwd", "kSinkToScore = 5.65685415f", "kSinkToScore = 1.0f"),
    "the gradient's sign": ("bwd-sink", "sum -= exp2", "sum += exp2"),
    "rows left out": ("bwd-sink", "row < arguments.rows", "row < arguments.rows - 128"),
    "a warp left out": ("bwd-sink", "threadIdx.x < kThreads / 32 ?", "threadIdx.x < 1 ?"),
}


@pytest.mark.rotated(9)
@pytest.mark.parametrize("fault", FAULTS)
@targets
def test_planted_mistakes_are_noticed(fault: str, target: str) -> None:
    kind, right, wrong = FAULTS[fault]
    q, k, v = arrays(130, 90)
    given = {"sinks": np.array([30, -5, 1, 3], np.float32)}
    d_out = np.random.default_rng(1).standard_normal(q.shape, dtype=np.float32).astype(np.float16)
    emitted = fg.compile(spec_of(), target, emulate=True)
    texts = {
        name: text.replace(right, wrong)
        for name, text in {**emitted.sources, **emitted.backward_sources}.items()
        if name.startswith(kind) and right in text
    }
    assert texts, fault
    for source in (None, texts):
        attention = fg.compile(spec_of(), target, emulate=True, source=source)
        try:
            out, lse = attention(q, k, v, return_lse=True, **given)
            found = gradients_by_name(attention.backward(d_out, q, k, v, out, lse, **given))
            verdicts = judged_gradients(spec_of(), q, k, v, d_out, found, **given)
            right_ = judged(spec_of(), q, k, v, out, lse, given).ok and all(each.ok for each in verdicts.values())
        except LaunchError:
            right_ = False
        assert right_ == (source is None), fault
