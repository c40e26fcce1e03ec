"""Valid backward calls on the emulator: lengths of 0, strides, layouts, heads, dims, outputs of the caller."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen.language as fg
from flashgen import attention
from flashgen.attention import Gradients
from flashgen.runtime.arrays import nesting
from flashgen.verify import Inputs, Shape, random_gradients, random_inputs

RAGGED = Shape(37, 70, 2, 4, 2)
CAUSAL = fg.AttentionSpec(32, mask=fg.causal())
BIAS = fg.AttentionSpec(
    16,
    value_dim=24,
    layout="bshd",
    score=lambda s, b, h, q, k: s + fg.Tensor("bias", "float16", 2, grad=True)[h, k] * fg.Tensor("plain")[h],
)
LISTS = fg.AttentionSpec(16, mask=fg.document("ids"))
MODES = pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])


def called(spec: fg.AttentionSpec, shape: Shape, deterministic: bool = False, **options: Any) -> tuple[Any, ...]:
    """Returns inputs, the gradient of the output, and the gradients of a call at a shape."""
    compiled = attention.compile(spec, emulate=True, deterministic=deterministic)
    inputs, (d_out, _) = random_inputs(spec, shape), random_gradients(spec, shape)
    out, lse = compiled(inputs.q, inputs.k, inputs.v, return_lse=True, **inputs.captures)
    gradients = compiled.backward(d_out, inputs.q, inputs.k, inputs.v, out, lse, **inputs.captures, **options)
    return inputs, d_out, gradients


EMPTY = [(0, 2, 5, 7), (1, 0, 5, 7), (1, 2, 0, 7), (1, 2, 5, 0), (0, 0, 0, 0)]


@MODES
@pytest.mark.parametrize("sizes", EMPTY, ids=str)
@pytest.mark.parametrize("spec", [CAUSAL, BIAS, LISTS], ids=["causal", "bias", "lists"])
@pytest.mark.covering(6)
def test_length_0_gives_zeros(spec: fg.AttentionSpec, sizes: tuple[int, ...], deterministic: bool) -> None:
    batch, heads, len_q, len_k = sizes
    shape = Shape(len_q, len_k, batch, heads, heads)
    inputs, _, gradients = called(spec, shape, deterministic)
    wanted = [inputs.q, inputs.k, inputs.v, *(inputs.captures[c.name] for c in spec.captures if c.grad)]
    given = tuple(np.full_like(array, np.nan) for array in wanted)
    _, _, again = called(spec, shape, deterministic, into=given)
    for gradient, into, like in zip(gradients, again, wanted, strict=True):
        assert gradient.shape == like.shape and gradient.dtype == like.dtype
        assert (gradient == 0).all() and (into == 0).all()
    assert all(one is other for one, other in zip(again, given, strict=True))


@MODES
def test_grouped_heads_and_lengths(deterministic: bool, gradients_agree: Any) -> None:
    shapes = (RAGGED, Shape(1, 1, 1, 1, 1), Shape(130, 20, 1, 6, 1), Shape(64, 128, 1, 2, 2), Shape(3, 200, 1, 6, 3))
    gradients_agree(CAUSAL, *shapes, deterministic=deterministic)
    gradients_agree(CAUSAL, RAGGED, deterministic=deterministic, of_lse=True)


@MODES
def test_tile_lists(deterministic: bool, gradients_agree: Any) -> None:
    gradients_agree(LISTS, Shape(150, 150, 2, 4, 2), Shape(37, 90, 1, 2, 1), deterministic=deterministic)


@pytest.mark.parametrize(("dim", "value_dim"), [(8, 40), (128, 64), (40, 8)])
def test_head_dims(dim: int, value_dim: int, gradients_agree: Any) -> None:
    gradients_agree(fg.AttentionSpec(dim, "bfloat16", value_dim=value_dim), Shape(33, 50, 1, 2, 1))


def strided(array: np.ndarray[Any, Any], how: str) -> np.ndarray[Any, Any]:
    """Returns an equal array with another memory layout, with NaN in the gaps."""
    first, second, third, dim = array.shape
    if how == "transposed":
        return np.ascontiguousarray(array.transpose(2, 1, 0, 3)).transpose(2, 1, 0, 3)
    if how == "rows of a wider array":
        wide = np.full((first, second, third, 3 * dim), np.nan, array.dtype)
        wide[..., dim : 2 * dim] = array
        return wide[..., dim : 2 * dim]
    assert how == "backwards"
    return np.ascontiguousarray(array[::-1, ::-1, ::-1])[::-1, ::-1, ::-1]


@pytest.mark.parametrize("how", ["transposed", "rows of a wider array", "backwards"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.covering(4)
def test_any_input_and_output_strides(how: str, layout: str, gradients_right: Any) -> None:
    """Runs under AddressSanitizer, with NaN between the used rows, which must stay unchanged."""
    spec = fg.AttentionSpec(24, layout=layout, mask=fg.causal())
    compiled = attention.compile(spec, emulate=True, sanitize="address")
    inputs, (d_out, _) = random_inputs(spec, RAGGED), random_gradients(spec, RAGGED)
    q, k, v = (strided(array, how) for array in (inputs.q, inputs.k, inputs.v))
    out, lse = compiled(q, k, v, return_lse=True)
    into = tuple(strided(np.full_like(array, np.nan), how) for array in (inputs.q, inputs.k, inputs.v))
    given = compiled.backward(strided(d_out, how), q, k, v, strided(out, how), lse, into=into)
    gradients_right(spec, inputs, d_out, given)
    for array in into:
        if array.base is not None and array.base.size > array.size:
            assert np.isnan(array.base).sum() == array.base.size - array.size
    new = compiled.backward(d_out, q, k, v, out, lse)
    for array, like in zip(new, (q, k, v), strict=True):
        assert array.transpose(nesting(like.strides)).flags.c_contiguous, (
            "gradients have the memory order of q, k and v"
        )
    gradients_right(spec, inputs, d_out, new)


def test_keys_and_gradients_that_are_broadcast(gradients_right: Any) -> None:
    """A gradient of ones that is broadcast over heads and rows, as from `out.sum()`, and one key for all heads."""
    inputs = random_inputs(CAUSAL, RAGGED)
    k, v = (np.broadcast_to(array[:, :1], array.shape) for array in (inputs.k, inputs.v))
    d_out = np.broadcast_to(np.ones(32, np.float16), inputs.q.shape)
    _, pullback = attention.compile(CAUSAL, emulate=True).vjp(inputs.q, k, v)
    gradients_right(CAUSAL, Inputs(inputs.q, k, v), d_out, pullback(d_out))


def test_return_values() -> None:
    inputs, _, gradients = called(BIAS, RAGGED)
    dq, dk, dv, bias = gradients
    assert isinstance(gradients, Gradients) and isinstance(gradients, tuple)
    assert gradients.dq is dq and gradients.dk is dk and gradients.dv is dv
    assert list(gradients.captures) == ["bias"] and gradients.captures["bias"] is bias
    shapes = [inputs.q.shape, inputs.k.shape, inputs.v.shape, inputs.captures["bias"].shape]
    assert [gradient.shape for gradient in gradients] == shapes
    assert {gradient.dtype.name for gradient in gradients} == {"float16"}
    assert "Gradients(dq=" in repr(gradients) and "captures={'bias'" in repr(gradients)


def test_vjp(gradients_right: Any) -> None:
    spec = fg.AttentionSpec(16, dropout=0.3, mask=fg.causal())
    compiled = attention.compile(spec, emulate=True)
    inputs, (d_out, d_lse) = random_inputs(spec, RAGGED), random_gradients(spec, RAGGED, of_lse=True)
    out, pullback = compiled.vjp(inputs.q, inputs.k, inputs.v, seed=7, offset=3)
    np.testing.assert_array_equal(out, compiled(inputs.q, inputs.k, inputs.v, seed=7, offset=3))
    gradients_right(spec, inputs, d_out, pullback(d_out), seed=7, offset=3)
    gradients_right(spec, inputs, d_out, pullback(d_out, d_lse), d_lse=d_lse, seed=7, offset=3)
    (again, lse), pullback = compiled.vjp(inputs.q, inputs.k, inputs.v, seed=7, offset=3, return_lse=True)
    np.testing.assert_array_equal(again, out)
    assert lse.shape == (2, 4, 37) and lse.dtype == np.float32
    into = tuple(np.full_like(array, np.nan) for array in (inputs.q, inputs.k, inputs.v))
    assert pullback(d_out, into=into).dk is into[1]
    gradients_right(spec, inputs, d_out, Gradients(*into), seed=7, offset=3)


def test_rows_and_keys_without_attention_have_zero_gradients() -> None:
    _, _, gradients = called(CAUSAL, Shape(70, 37, 1, 2, 2))  # the first 33 rows attend to no key
    assert (gradients.dq[:, :, :33] == 0).all() and np.isfinite(gradients.dq).all() and (gradients.dq != 0).any()
    late = fg.AttentionSpec(32, mask=fg.causal(align="top_left"))
    _, _, gradients = called(late, Shape(37, 70, 1, 2, 2))
    for gradient in (gradients.dk, gradients.dv):
        assert (gradient[:, :, 37:] == 0).all() and (gradient[:, :, :37] != 0).any()


@MODES
def test_tile_lists_of_the_caller_give_the_same_gradients(deterministic: bool) -> None:
    compiled = attention.compile(LISTS, emulate=True, deterministic=deterministic)
    ids = np.repeat(np.arange(3), 50).astype(np.int32)
    lists = compiled.backward_tile_lists(150, ids=ids)
    assert lists.keys is not None and lists.keys.direction == "queries" and lists.bytes > 0
    assert (lists.queries is not None) == deterministic
    inputs, (d_out, _) = random_inputs(LISTS, Shape(150, 150)), random_gradients(LISTS, Shape(150, 150))
    _, pullback = compiled.vjp(inputs.q, inputs.k, inputs.v, ids=ids)
    for one, other in zip(pullback(d_out, tile_lists=lists), pullback(d_out), strict=True):
        np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), atol=1e-3)


def test_block_layouts() -> None:
    spec = fg.AttentionSpec(16, mask=fg.block_sparse("layout", 32, 32))
    blocks = np.tril(np.ones((3, 3), bool))
    compiled = attention.compile(spec, emulate=True)
    inputs, (d_out, _) = random_inputs(spec, Shape(96, 96)), random_gradients(spec, Shape(96, 96))
    given = [
        compiled.vjp(inputs.q, inputs.k, inputs.v, layout=layout)[1](d_out).dv
        for layout in (blocks, fg.BlockLayout.from_dense(blocks))
    ]
    np.testing.assert_array_equal(*given)


def test_deterministic_compiles_another_callable() -> None:
    plain = attention.compile(CAUSAL, emulate=True)
    exact = attention.compile(CAUSAL, emulate=True, deterministic=True)
    assert plain is not exact and plain is attention.compile(CAUSAL, emulate=True, deterministic=False)
    assert not plain.deterministic and exact.deterministic
    assert "dq" not in plain.backward_kernels and "dq" in exact.backward_kernels
    assert plain.backward_plan == plain.backward_kernels["dkdv"].plan
    assert set(plain.backward_sources.values()) == {kernel.source for kernel in plain.backward_kernels.values()}


def hides_some_rows(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return fg.where(q % 5 == 0, -float("inf"), s)


@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_with_scores_of_minus_infinity_have_zero_gradients(deterministic: bool, gradients_agree: Any) -> None:
    """The score function makes them -inf, so no mask keeps their LSE of -inf away from the probabilities."""
    spec = fg.AttentionSpec(16, score=fg.trace_score(hides_some_rows, "hides_some_rows"))
    gradients_agree(spec, Shape(70, 100, 1, 2, 1), of_lse=True, deterministic=deterministic)
