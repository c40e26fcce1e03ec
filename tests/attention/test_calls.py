"""Valid calls on the emulator: lengths of 0, strides, heads, dims, dtypes, targets, outputs of the caller."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashgen.language as fg
from flashgen import attention
from flashgen.runtime.arrays import nesting
from flashgen.verify import Inputs, Shape, random_inputs

RAGGED = Shape(37, 70, 2, 4, 2)
CAUSAL = fg.AttentionSpec(32, mask=fg.causal())

EMPTY = [(0, 2, 5, 7), (1, 0, 5, 7), (1, 2, 0, 7), (1, 2, 5, 0), (1, 2, 0, 0), (0, 0, 0, 0)]
EMPTY_SPECS = {
    "full": fg.AttentionSpec(16, value_dim=24),
    "causal": fg.AttentionSpec(16, mask=fg.causal(), layout="bshd"),
    "score": fg.AttentionSpec(16, score=fg.alibi("slopes"), dropout=0.1),
    "lists": fg.AttentionSpec(16, mask=fg.document("ids")),
    "lists per head": fg.AttentionSpec(16, mask=fg.block_sparse(fg.Tensor("layout", "bool", 4), 64, 16)),
}


@pytest.mark.parametrize("sizes", EMPTY, ids=str)
@pytest.mark.parametrize("name", EMPTY_SPECS)
def test_a_length_of_0_gives_an_empty_output_or_zeros(name: str, sizes: tuple[int, ...]) -> None:
    spec, (batch, heads, len_q, len_k) = EMPTY_SPECS[name], sizes
    inputs = random_inputs(spec, Shape(len_q, len_k, batch, heads, heads))
    captures = {key: array[:0] if len_k == len_q == 0 else array for key, array in inputs.captures.items()}
    dropout = {"seed": 1} if spec.dropout else {}
    compiled = attention.compile(spec, emulate=True)
    out, lse = compiled(inputs.q, inputs.k, inputs.v, return_lse=True, **captures, **dropout)
    assert out.shape == (*inputs.q.shape[:3], spec.value_dim) and lse.shape == (batch, heads, len_q)
    assert out.dtype == np.float16 and lse.dtype == np.float32
    assert (out == 0).all() and (lse == -np.inf).all()
    given = np.full_like(out, np.nan)
    compiled(inputs.q, inputs.k, inputs.v, out=given, **captures, **dropout)
    assert (given == 0).all()


def strided(array: np.ndarray[Any, Any], how: str) -> np.ndarray[Any, Any]:
    """Returns an equal (batch, heads, length, dim) array with another memory layout."""
    batch, heads, length, dim = array.shape
    if how == "bshd memory":
        return np.ascontiguousarray(array.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    if how == "length first":
        return np.ascontiguousarray(array.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3)
    if how == "rows of a wider array":
        wide = np.full((batch, heads, length, 3 * dim), np.nan, array.dtype)
        wide[..., dim : 2 * dim] = array
        return wide[..., dim : 2 * dim]
    if how == "every second row":
        more = np.full((batch, heads, 2 * length, dim), np.nan, array.dtype)
        more[:, :, ::2] = array
        return more[:, :, ::2]
    if how == "backwards":
        return np.ascontiguousarray(array[::-1, ::-1, ::-1])[::-1, ::-1, ::-1]
    assert how == "one for all heads"
    return np.broadcast_to(array[:, :1], array.shape)


STRIDES = ("bshd memory", "length first", "rows of a wider array", "every second row", "backwards")


@pytest.mark.parametrize("how", STRIDES)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_any_strides(how: str, layout: str, right: Any) -> None:
    spec = fg.AttentionSpec(24, layout=layout, mask=fg.causal())
    inputs = random_inputs(spec, RAGGED)
    q, k, v = (strided(array, how) for array in (inputs.q, inputs.k, inputs.v))
    out, lse = attention.compile(spec, emulate=True)(q, k, v, return_lse=True)
    assert out.transpose(nesting(q.strides)).flags.c_contiguous, "outputs have the memory order of q"
    right(spec, inputs, out, lse)


@pytest.mark.parametrize("how", STRIDES)
def test_strided_accesses_touch_nothing_else(how: str, right: Any) -> None:
    """Runs under AddressSanitizer, with rows of NaN between the used ones, which must stay unchanged."""
    inputs = random_inputs(CAUSAL, RAGGED)
    q, k, v = (strided(array, how) for array in (inputs.q, inputs.k, inputs.v))
    out = strided(np.full((2, 4, 37, 32), np.nan, np.float16), how)
    lse = np.full((2, 4, 37), np.nan, np.float32)
    attention.compile(CAUSAL, emulate=True, sanitize="address")(q, k, v, return_lse=True, out=(out, lse))
    right(CAUSAL, inputs, out, lse)
    if out.base is not None and out.base.size > out.size:
        assert np.isnan(out.base).sum() == out.base.size - out.size


def test_broadcast_keys(right: Any) -> None:
    inputs = random_inputs(CAUSAL, RAGGED)
    k, v = (strided(array, "one for all heads") for array in (inputs.k, inputs.v))
    out, lse = attention.compile(CAUSAL, emulate=True)(inputs.q, k, v, return_lse=True)
    right(CAUSAL, Inputs(inputs.q, k, v), out, lse)


def test_strides_of_dimensions_of_size_1_do_not_matter(right: Any) -> None:
    shape = Shape(1, 1, 1, 1, 1)
    inputs = random_inputs(CAUSAL, shape)
    odd = [
        np.lib.stride_tricks.as_strided(array, array.shape, (2, 6, 10, 2)) for array in (inputs.q, inputs.k, inputs.v)
    ]
    right(CAUSAL, inputs, *attention.compile(CAUSAL, emulate=True)(*odd, return_lse=True))


@pytest.mark.parametrize("heads", [(1, 1), (6, 6), (6, 3), (6, 2), (6, 1)], ids=str)
def test_grouped_heads(heads: tuple[int, int], agrees: Any) -> None:
    agrees(CAUSAL, Shape(37, 70, 2, *heads))
    agrees(fg.AttentionSpec(32, score=fg.alibi("slopes")), Shape(20, 33, 2, *heads))


@pytest.mark.parametrize(
    "dim",
    [pytest.param(dim, marks=[pytest.mark.rotated(9)] if dim % 64 not in (0, 8) else []) for dim in range(8, 264, 8)],
)
def test_every_head_dim(dim: int, agrees: Any) -> None:
    dtype = ("float16", "bfloat16")[dim // 8 % 2]
    agrees(fg.AttentionSpec(dim, dtype, mask=fg.causal()), Shape(33, 50, 1, 1, 1))


@pytest.mark.parametrize(
    ("dim", "value_dim"), [(8, 256), (256, 8), (24, 64), (64, 24), (40, 48), (128, 72), (192, 128)]
)
def test_value_dims(dim: int, value_dim: int, agrees: Any) -> None:
    agrees(fg.AttentionSpec(dim, value_dim=value_dim), Shape(33, 50, 1, 2, 1))


@pytest.mark.parametrize("dim", [8, 40, 64, 128, 256])
def test_turing(dim: int, agrees: Any) -> None:
    agrees(fg.AttentionSpec(dim, mask=fg.causal()), Shape(37, 150, 1, 2, 1), target="sm_75")
    if dim <= 64:
        spec = fg.AttentionSpec(dim, dropout=0.2, mask=fg.document("ids"), score=fg.alibi("slopes"))
        agrees(spec, Shape(70, 70, 2, 2, 2), target="sm_75")


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90", "sm_120"])
def test_plans_of_every_target(target: str, agrees: Any) -> None:
    for spec in (fg.AttentionSpec(128, "bfloat16", mask=fg.causal()), fg.AttentionSpec(64, score=fg.softcap(20))):
        agrees(spec, Shape(130, 260, 1, 1, 1), target=target)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_growing_scores_rescale_the_output(dtype: str, right: Any) -> None:
    """Random scores at the default scale vary too little to exceed the row maximum of earlier tiles."""
    spec = fg.AttentionSpec(32, dtype, scale=1.5)
    inputs = random_inputs(spec, Shape(40, 300, 1, 2, 1))
    growing = (inputs.k.astype(np.float32) * np.linspace(0.2, 3, 300)[:, None]).astype(inputs.k.dtype)
    shrinking = growing[:, :, ::-1]
    compiled = attention.compile(spec, emulate=True)
    for k in (growing, shrinking):
        out, lse = compiled(inputs.q, k, inputs.v, return_lse=True)
        right(spec, Inputs(inputs.q, k, inputs.v), out, lse)


def test_large_scores_do_not_overflow(right: Any) -> None:
    spec = fg.AttentionSpec(16, scale=1.0)
    inputs = random_inputs(spec, Shape(20, 90, 1, 1, 1))
    large = Inputs(inputs.q * np.float16(10), inputs.k * np.float16(10), inputs.v)
    out, lse = attention.compile(spec, emulate=True)(large.q, large.k, large.v, return_lse=True)
    assert np.isfinite(out).all() and np.isfinite(lse).all()
    right(spec, large, out, lse)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_outputs_of_the_caller(layout: str, right: Any) -> None:
    spec = fg.AttentionSpec(16, "bfloat16", layout=layout)
    inputs, compiled = random_inputs(spec, RAGGED), attention.compile(spec, emulate=True)
    out, lse = np.full(inputs.q.shape, np.nan, ml_dtypes.bfloat16), np.full((2, 4, 37), np.nan, np.float32)
    result = compiled(inputs.q, inputs.k, inputs.v, return_lse=True, out=(out, lse))
    assert result[0] is out and result[1] is lse
    right(spec, inputs, out, lse)
    alone = np.full_like(out, np.nan)
    assert compiled(inputs.q, inputs.k, inputs.v, out=alone) is alone
    np.testing.assert_array_equal(alone, out)


def test_return_values() -> None:
    inputs, compiled = random_inputs(CAUSAL, RAGGED), attention.compile(CAUSAL, emulate=True)
    out = compiled(inputs.q, inputs.k, inputs.v)
    again, lse = compiled(inputs.q, inputs.k, inputs.v, return_lse=True)
    assert isinstance(out, np.ndarray) and out.dtype == np.float16 and lse.dtype == np.float32
    np.testing.assert_array_equal(out, again)


def test_dropout_depends_only_on_seed_and_offset(arrays: Any) -> None:
    spec = fg.AttentionSpec(16, dropout=0.5)
    compiled, (q, k, v) = attention.compile(spec, emulate=True), arrays(spec, Shape(40, 50, 2, 2, 2))
    first = compiled(q, k, v, seed=1)
    np.testing.assert_array_equal(first, compiled(q, k, v, seed=1, offset=0))
    for other in ({"seed": 2}, {"seed": 1 + 2**32}, {"seed": 1, "offset": 1}):
        assert (first != compiled(q, k, v, **other)).mean() > 0.5
    alone = compiled(q[1:], k[1:], v[1:], seed=1)  # alone, it gets the dropout of batch 0
    assert (alone != first[1:]).any()
    np.testing.assert_array_equal(compiled(q[:1], k[:1], v[:1], seed=1), first[:1])


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_a_seed_in_memory(arrays: Any, target: str) -> None:
    """Forward and backward drop the same elements as with the number, and read it at each call."""
    spec = fg.AttentionSpec(16, mask=fg.causal(), dropout=0.5)
    compiled, qkv = attention.compile(spec, target=target, emulate=True), arrays(spec, Shape(40, 50, 2, 2, 2))
    given = np.zeros((), np.int64)
    for seed in (1, 2**40 + 3):
        given[...] = seed
        halves = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
        out, pull = compiled.vjp(*qkv, seed=seed, offset=5)
        expected = pull(out)
        for held in (given, given.reshape(1, 1).astype(np.uint64), halves):
            again, pull = compiled.vjp(*qkv, seed=held, offset=5)
            np.testing.assert_array_equal(again, out)
            for one, other in zip(pull(out)[1:], expected[1:], strict=True):
                np.testing.assert_array_equal(one, other)
        assert (out != compiled(*qkv, seed=given, offset=6)).any()


def test_the_spec_of_the_readme(right: Any) -> None:
    slopes = fg.Tensor("slopes", dtype="float32", ndim=1)
    spec = fg.AttentionSpec(
        head_dim=64,
        mask=fg.causal() & (lambda b, h, q, k: (abs(q - k) <= 128) | (k < 4)),
        score=lambda s, b, h, q, k: s + slopes[h] * (k - q),
        dropout=0.1,
    )
    inputs = random_inputs(spec, Shape(300, 300, 1, 2, 1))
    compiled = attention.compile(spec, emulate=True)
    out, lse = compiled(inputs.q, inputs.k, inputs.v, seed=7, return_lse=True, **inputs.captures)
    right(spec, inputs, out, lse, seed=7)
    assert "attention_forward" in compiled.source and compiled.plan.threads >= 32
    assert str(compiled).startswith("<flashgen.Attention ")
