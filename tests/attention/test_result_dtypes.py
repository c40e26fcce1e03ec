"""Outputs and gradients in float32 (`out_dtype`, `grad_dtype`), of kernels whose inputs have 16 bits."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.errors import ArgumentError, SpecError
from flashgen.verify import Case, verify
from flashgen.verify.problems import Shape

FLOAT32 = {"out_dtype": "float32", "grad_dtype": "float32"}
SPECS: Mapping[str, dict[str, Any]] = {
    "causal": {"head_dim": 64, "mask": fg.causal()},
    "padded columns": {"head_dim": 72, "value_dim": 40, "dtype": "bfloat16", "dropout": 0.25},
    "wide": {"head_dim": 192, "value_dim": 128, "dtype": "bfloat16", "mask": fg.causal()},
    "varlen": {"head_dim": 64, "layout": "thd", "mask": fg.causal()},
    "wide varlen": {"head_dim": 160, "layout": "thd", "mask": fg.sliding_window(40)},
    "sink": {"head_dim": 128, "layout": "bshd", "sink": fg.Tensor("sinks", "float32", 1, grad=True)},
}
CACHES: Mapping[str, dict[str, Any]] = {
    "pages": {"page_size": 16, "mask": fg.causal()},
    "8 bits": {"kv_dtype": "int8", "mask": fg.causal()},
    "mixed": {"page_size": 16, "layout": "thd", "mask": fg.causal()},
}
TARGETS = ("sm_75", "sm_80", "sm_90a")


def check(spec: fg.AttentionSpec, target: str | None, shape: Shape, emulate: bool = True, **options: Any) -> None:
    for result in verify([Case(spec, shape)], target=target, emulate=emulate, **options):
        assert result.ok, (result.problem, result.verdicts)


@pytest.mark.rotated(18)
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", SPECS)
def test_both_passes_give_float32_results(name: str, target: str, deterministic: bool) -> None:
    if target == "sm_75" and SPECS[name].get("dtype") == "bfloat16":
        pytest.skip("sm_75 has no bfloat16")
    spec = fg.AttentionSpec(**SPECS[name], **FLOAT32)
    check(spec, target, Shape(150, 170, 2, 4, 2), passes=("forward", "backward"), deterministic=deterministic)


@pytest.mark.rotated(8)
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("len_q", [3, 150])
@pytest.mark.parametrize("name", CACHES)
def test_a_cache_gives_a_float32_output(name: str, len_q: int, target: str) -> None:
    check(fg.AttentionSpec(64, **CACHES[name], out_dtype="float32"), target, Shape(len_q, 170, 2, 8, 2))


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("name", [*SPECS, *CACHES])
def test_on_a_gpu(name: str) -> None:
    """With the GPU's own target, at lengths of several tiles."""
    if name in CACHES:
        spec, passes = fg.AttentionSpec(64, **CACHES[name], out_dtype="float32"), ("forward",)
        shapes = [Shape(3, 1000, 2, 8, 2), Shape(300, 1000, 2, 8, 2)]
    else:
        spec, passes = fg.AttentionSpec(**SPECS[name], **FLOAT32), ("forward", "backward")
        shapes = [Shape(1000, 1100, 2, 4, 2)]
    for shape in shapes:
        check(spec, None, shape, emulate=False, passes=passes)
        check(spec, None, shape, emulate=False, passes=passes, deterministic=True)


@pytest.mark.parametrize("target", TARGETS)
def test_float32_results_are_not_rounded(target: str) -> None:
    """With equal weights of 1/64, the output and dV are means, which float32 holds to 1e-6 and float16 to 5e-4."""
    spec = fg.AttentionSpec(64, **FLOAT32)
    random = np.random.default_rng(0)
    q, (k, v, d_out) = np.zeros((1, 1, 64, 64), "float16"), random.standard_normal((3, 1, 1, 64, 64)).astype("float16")
    compiled = fg.compile(spec, target=target, emulate=True)
    out, lse = compiled(q, k, v, return_lse=True)
    gradients = compiled.backward(d_out, q, k, v, out, lse)
    assert all(array.dtype == np.float32 for array in (out, gradients.dq, gradients.dk, gradients.dv))
    means = [each.astype(np.float64).mean(axis=2, keepdims=True) for each in (v, d_out)]
    np.testing.assert_allclose(out, np.broadcast_to(means[0], out.shape), rtol=0, atol=1e-6)
    np.testing.assert_allclose(gradients.dv, np.broadcast_to(means[1], out.shape), rtol=0, atol=1e-6)
    for array in (out, *gradients[:3]):
        assert (array != array.astype(np.float16)).mean() > 0.5 or not array.any()


def test_types_of_results_that_are_the_default_are_left_out_of_the_json() -> None:
    plain = fg.AttentionSpec(64, "bfloat16")
    assert fg.AttentionSpec(64, "bfloat16", out_dtype="bfloat16", grad_dtype="bf16") == plain
    assert "_dtype" not in plain.to_json()
    spec = fg.AttentionSpec(64, "bfloat16", out_dtype="float32", grad_dtype=np.float32)
    assert fg.AttentionSpec.from_json(spec.to_json()) == spec != plain
    assert "-ofp32-gfp32-" in spec.name and "out_dtype='float32', grad_dtype='float32'" in repr(spec)


@pytest.mark.parametrize("name", ["out_dtype", "grad_dtype"])
def test_other_types_of_results_are_refused(name: str) -> None:
    with pytest.raises(SpecError, match=f"{name}='float64' is not supported: give one of float16, bfloat16, float32"):
        fg.AttentionSpec(64, **{name: "float64"})
    with pytest.raises(SpecError, match=f"{name}='bfloat16' is not supported with dtype='float16': give 'float16' or"):
        fg.AttentionSpec(64, **{name: "bfloat16"})


def test_given_results_must_have_the_types_of_the_spec() -> None:
    compiled = fg.compile(fg.AttentionSpec(64, **FLOAT32), target="sm_80", emulate=True)
    q = np.ones((1, 1, 16, 64), "float16")
    with pytest.raises(ArgumentError, match=r"out is float16 \(1, 1, 16, 64\); give float32"):
        compiled(q, q, q, out=np.empty_like(q))
    out, lse = compiled(q, q, q, return_lse=True)
    with pytest.raises(ArgumentError, match=r"d_out is float32 \(1, 1, 16, 64\); give float16"):
        compiled.backward(out, q, q, q, out, lse)
    with pytest.raises(ArgumentError, match=r"dq is float16 \(1, 1, 16, 64\); give float32"):
        compiled.backward(q, q, q, q, out, lse, into=(np.empty_like(q), out, out))


def test_rows_of_a_float32_output_begin_at_multiples_of_16_bytes() -> None:
    compiled = fg.compile(fg.AttentionSpec(8, out_dtype="float32"), target="sm_90a", emulate=True)
    q = np.ones((1, 1, 16, 8), "float16")
    wide = np.zeros((1, 1, 16, 12), "float32")
    np.testing.assert_array_equal(compiled(q, q, q, out=wide[..., :8]), np.ones((1, 1, 16, 8)))
    with pytest.raises(ArgumentError, match="every row must start at a multiple of 16 bytes"):
        compiled(q, q, q, out=np.zeros((1, 1, 16, 10), "float32")[..., :8])
