"""Unusual arguments of varlen_attention: used lengths, scales, dims, dropout."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("torch", reason="flashgen.torch needs torch: pip install 'flashgen[torch]'")

import torch

import plain
from flashgen.errors import ArgumentError
from flashgen.torch import varlen_attention

ENDS_Q, ENDS_K = torch.tensor([0, 13, 13, 40], dtype=torch.int32), torch.tensor([0, 20, 26, 50], dtype=torch.int32)


def rows(dim: int = 32, value_dim: int = 32) -> list[Any]:
    return [torch.randn(n, 2, size).half().requires_grad_() for n, size in ((40, dim), (50, dim), (50, value_dim))]


def expected(
    inputs: Any, scale: Any = None, used_q: Any = None, used_k: Any = None, bounds: Any = (-math.inf, math.inf)
) -> Any:
    """Each sequence by itself, its queries aligned to its last key."""
    q, k, v = (x.double() for x in inputs)
    out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=torch.float64)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    for n in range(3):
        first_q, first_k = int(ENDS_Q[n]), int(ENDS_K[n])
        len_q = int(ENDS_Q[n + 1]) - first_q if used_q is None else int(used_q[n])
        len_k = int(ENDS_K[n + 1]) - first_k if used_k is None else int(used_k[n])
        own_q, own_k = slice(first_q, first_q + len_q), slice(first_k, first_k + len_k)
        scores = torch.einsum("qhd,khd->hqk", q[own_q], k[own_k]) * factor
        distance = torch.arange(len_k) - (torch.arange(len_q)[:, None] + len_k - len_q)
        scores = scores.masked_fill((distance < bounds[0]) | (distance > bounds[1]), -math.inf)
        out[own_q] = torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(), v[own_k])
    return out


@pytest.mark.parametrize(
    ("options", "bounds"),
    [
        ({}, (-math.inf, math.inf)),
        ({"causal": True}, (-math.inf, 0)),
        ({"window_size": (4, 2)}, (-4, 2)),
        ({"window_size": (4, -1)}, (-4, math.inf)),
        ({"window_size": (-1, 3)}, (-math.inf, 3)),
    ],
)
def test_used_queries(options: Any, bounds: Any) -> None:
    """The last used query is aligned with the last key; those behind it have outputs and gradients of 0."""
    inputs, used = rows(), torch.tensor([9, 0, 27])
    used_k = torch.tensor([15, 6, 24], dtype=torch.int32)
    out, lse = varlen_attention(*inputs, ENDS_Q, ENDS_K, seqused_q=used, seqused_k=used_k, return_lse=True, **options)
    want = expected(inputs, used_q=used, used_k=used_k, bounds=bounds)
    plain.assert_close(out, want)
    plain.assert_gradients(out, want, inputs)
    assert not out[9:13].any() and lse[:, 9:13].isneginf().all()


def test_slopes_follow_the_used_queries() -> None:
    (q, k, v), used, slopes = rows(), torch.tensor([9, 0, 27]), torch.tensor([0.1, 0.4])
    own = [x.detach() for x in (q[:9], k[:20], v[:20])]
    ends_q, ends_k = torch.tensor([0, 9], dtype=torch.int32), torch.tensor([0, 20], dtype=torch.int32)
    alone = varlen_attention(*own, ends_q, ends_k, alibi_slopes=slopes)
    assert torch.equal(varlen_attention(q, k, v, ENDS_Q, ENDS_K, alibi_slopes=slopes, seqused_q=used)[:9], alone)


def test_invalid_used_queries() -> None:
    with pytest.raises(ArgumentError, match=r"seqused_q is float32 of shape \(3,\): give integers \(sequences,\)"):
        varlen_attention(*rows(), ENDS_Q, ENDS_K, seqused_q=torch.ones(3))


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_scales_that_are_not_positive(scale: float) -> None:
    inputs = rows()
    out, want = varlen_attention(*inputs, ENDS_Q, ENDS_K, softmax_scale=scale), expected(inputs, scale)
    plain.assert_close(out, want)
    plain.assert_gradients(out, want, inputs)


def test_a_scale_tensor_is_learned() -> None:
    inputs, scale = rows(), torch.tensor(-0.4, requires_grad=True)
    out, want = varlen_attention(*inputs, ENDS_Q, ENDS_K, softmax_scale=scale), expected(inputs, scale.double())
    plain.assert_close(out, want)
    plain.assert_gradients(out, want, [*inputs, scale])
    capped = varlen_attention(*inputs, ENDS_Q, ENDS_K, softmax_scale=scale, softcap=2.0)
    assert torch.equal(capped, varlen_attention(*inputs, ENDS_Q, ENDS_K, softmax_scale=-0.4, softcap=2.0))


def test_dims_that_are_no_multiple_of_8() -> None:
    inputs = rows(30, 21)
    out, lse = varlen_attention(*inputs, ENDS_Q, ENDS_K, return_lse=True)
    want = expected(inputs)
    plain.assert_close(out, want)
    plain.assert_gradients(out, want, inputs)
    assert lse.shape == (2, 40)


def test_dropping_everything_gives_zeros_and_keeps_the_lse() -> None:
    inputs = rows()
    out, lse = varlen_attention(*inputs, ENDS_Q, ENDS_K, dropout_p=1.0, return_lse=True)
    assert not out.any() and not any(x.any() for x in torch.autograd.grad(out.sum(), inputs, retain_graph=True))
    _, whole = varlen_attention(*inputs, ENDS_Q, ENDS_K, return_lse=True)
    torch.testing.assert_close(lse, whole)
    for probability in (0.001, 0.999, 2):
        with pytest.raises(ArgumentError, match=f"dropout_p={probability}"):
            varlen_attention(*inputs, ENDS_Q, ENDS_K, dropout_p=probability)
    pages, table = torch.zeros(4, 16, 2, 32).half(), torch.zeros(3, 1, dtype=torch.int32)
    used = torch.ones(3, dtype=torch.int32)
    with pytest.raises(ArgumentError, match="dropout_p=1 is not supported with block_table"):
        varlen_attention(inputs[0], pages, pages, ENDS_Q, None, dropout_p=1, block_table=table, seqused_k=used)
