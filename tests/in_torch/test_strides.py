"""The output has the memory order of q, and each gradient that of its input, eagerly and under torch's compiler."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="flashgen.torch needs torch: pip install 'flashgen[torch]'")

import torch

import flashgen as fg
from flashgen.runtime.arrays import nesting, strides_like
from flashgen.torch import attention, flex_attention, register, scaled_dot_product_attention

BIAS = fg.Tensor("bias", "float32", 2, grad=True)
WITH_BIAS = fg.AttentionSpec(16, mask=fg.causal(), score=lambda s, b, h, q, k: s + BIAS[q, k])
PLAIN = fg.AttentionSpec(16, mask=fg.causal())
SIZES = (2, 3, 24, 16)  # batch, heads, length, dim: no two are equal


def laid_out(permutation: Any, sizes: Any = SIZES) -> Any:
    """Returns a tensor of these sizes whose axes lie in memory in the order of a permutation, the outermost first."""
    outermost_first = torch.randn([sizes[axis] for axis in permutation]).half()
    return outermost_first.permute([permutation.index(axis) for axis in range(len(sizes))])


@pytest.mark.parametrize("permutation", list(permutations(range(4))))
def test_every_order_of_axes(permutation: Any) -> None:
    q, k, v = (laid_out(permutation).requires_grad_() for _ in range(3))
    expected = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
    for call in (flex_attention, scaled_dot_product_attention, lambda *x: attention(PLAIN, *x)):
        out, plainly = call(q, k, v), call(*expected)
        assert nesting(out.stride()) == permutation, out.stride()
        assert torch.equal(out, plainly)
        d_out = torch.randn(SIZES).half()
        for got, want, of in zip(
            torch.autograd.grad(out, (q, k, v), d_out), torch.autograd.grad(plainly, expected, d_out), (q, k, v),
            strict=True,
        ):  # fmt: skip
            assert nesting(got.stride()) == nesting(of.stride())
            torch.testing.assert_close(got, want, atol=4e-3, rtol=4e-3)


def test_each_gradient_has_the_memory_order_of_its_input() -> None:
    q, k, v = (laid_out(order).requires_grad_() for order in ((2, 0, 1, 3), (0, 1, 3, 2), (1, 2, 0, 3)))
    bias = torch.randn(24, 24).mT.requires_grad_()
    out = attention(WITH_BIAS, q, k, v, bias=bias)
    assert nesting(out.stride()) == (2, 0, 1, 3)
    for gradient, of in zip(torch.autograd.grad(out.sum(), (q, k, v, bias)), (q, k, v, bias), strict=True):
        assert gradient.stride() == of.stride()


@pytest.mark.parametrize("permutation", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (3, 1, 0, 2), (0, 1, 3, 2)])
def test_fake_results_have_the_strides_of_real_ones(permutation: Any) -> None:
    """torch.compile plans memory by them."""
    q, k, v = (laid_out(permutation) for _ in range(3))
    bias = torch.randn(24, 24).mT
    forward = (q, k, v, [bias], register(WITH_BIAS), [], [], None)
    out, lse = torch.ops.flashgen.forward(*forward)
    backward = (torch.randn_like(out), None, q, k, v, out, lse, *forward[3:])
    gradients = torch.ops.flashgen.backward(*backward)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fake, fake_gradients = torch.ops.flashgen.forward(*forward), torch.ops.flashgen.backward(*backward)
    for real, planned in zip((out, lse, *gradients), (*fake, *fake_gradients), strict=True):
        assert (real.shape, real.stride(), real.dtype) == (planned.shape, planned.stride(), planned.dtype)


def test_compiled_graphs_keep_the_order() -> None:
    q, k, v = (laid_out((2, 0, 3, 1)).requires_grad_() for _ in range(3))
    compiled = torch.compile(lambda *x: attention(PLAIN, *x), fullgraph=True, backend="aot_eager")
    out = compiled(q, k, v)
    assert nesting(out.stride()) == (2, 0, 3, 1) and torch.equal(out, attention(PLAIN, q, k, v))
    assert all(nesting(x.stride()) == (2, 0, 3, 1) for x in torch.autograd.grad(out.sum(), (q, k, v)))


def test_packed_tokens_with_heads_outermost() -> None:
    spec = fg.AttentionSpec(16, layout="thd", mask=fg.causal())
    ends, q = torch.tensor([0, 10, 30], dtype=torch.int32), torch.randn(4, 30, 16).half().transpose(0, 1)
    out = attention(spec, q, q, q, cu_seqlens_q=ends)
    assert nesting(out.stride()) == (1, 0, 2)
    assert torch.equal(out, attention(spec, *[q.contiguous()] * 3, cu_seqlens_q=ends))


def test_broadcast_axes_are_ordered_as_in_a_contiguous_array() -> None:
    assert nesting((0, 8, 64, 1)) == (0, 2, 1, 3) and nesting((8, 0, 64, 1)) == (2, 1, 0, 3)
    assert strides_like((2, 3, 5, 8), (0, 8, 64, 1)) == (120, 8, 24, 1)
    q = torch.randn(1, 3, 24, 16).half().expand(2, -1, -1, -1)
    assert attention(PLAIN, q, q, q).stride() == (1152, 384, 16, 1)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("order", [(1, 0, 2, 3), (2, 0, 1, 3), (2, 1, 0, 3)])
def test_arrays_of_numpy_in_any_order(target: str, order: Any) -> None:
    compiled = fg.compile(PLAIN, target=target, emulate=True)
    q = laid_out(order).numpy()
    plainly = np.ascontiguousarray(q)
    (out, pull), (expected, pull_plainly) = compiled.vjp(q, q, q), compiled.vjp(plainly, plainly, plainly)
    assert nesting(out.strides) == order
    np.testing.assert_array_equal(out, expected)
    for got, want in zip(pull(np.ones_like(out)), pull_plainly(np.ones_like(expected)), strict=True):
        assert nesting(got.strides) == order
        np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), atol=4e-3, rtol=4e-3)
