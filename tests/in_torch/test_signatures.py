"""torch's, FlexAttention's and flash-attn's signatures give their results."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="flashgen.torch needs torch: pip install 'flashgen[torch]'")

import torch
from torch.nn import functional
from torch.nn.attention import flex_attention as torchs

import flashgen.torch as ours
import flex_functions as functions
import plain
from flashgen.errors import ArgumentError, SpecError

SDPA: dict[str, Any] = {
    "nothing": {},
    "is_causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "booleans": {"attn_mask": torch.arange(40)[:, None] >= torch.arange(56) - 8},
    "booleans of a batch": {"attn_mask": (torch.arange(56) < torch.tensor([[30], [56]]))[:, None, None]},
    "numbers": {"attn_mask": torch.linspace(-2, 2, 40 * 56).view(40, 56)},
    "numbers of heads": {"attn_mask": torch.linspace(-2, 2, 4 * 40).view(4, 40, 1).to(torch.bfloat16)},
}


@pytest.mark.parametrize("name", SDPA)
def test_scaled_dot_product_attention(name: str) -> None:
    q, k, v = (torch.randn(2, 4, length, 32, dtype=torch.bfloat16, requires_grad=True) for length in (40, 56, 56))
    given = dict(SDPA[name])
    wanted = {
        key: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for key, x in given.items()
    }
    out = ours.scaled_dot_product_attention(q, k, v, **given)
    expected = functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), **wanted)
    plain.assert_close(out, expected)
    plain.assert_gradients(out, expected, [q, k, v])


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3)])
def test_any_leading_dimensions(leading: Any) -> None:
    q, k, v = (torch.randn(*leading, 24, 32, dtype=torch.bfloat16) for _ in range(3))
    mask = torch.rand(*leading, 24, 24) > 0.3
    mask[..., 0] = True
    out = ours.scaled_dot_product_attention(q, k, v, mask)
    assert out.shape == q.shape
    plain.assert_close(out, functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask))


def test_grouped_heads_and_a_learned_mask() -> None:
    q, k, v = (torch.randn(2, heads, 24, 32, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2))
    mask = torch.zeros(24, 24, requires_grad=True)
    out = ours.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    expected, _ = plain.attention(q, k, v, score=lambda s, b, h, i, j: s + mask[i, j])
    plain.assert_gradients(out, expected, [q, k, v, mask])
    torch.manual_seed(1)
    dropped = ours.scaled_dot_product_attention(q, k, v, dropout_p=0.5, enable_gqa=True)
    assert not torch.equal(dropped, ours.scaled_dot_product_attention(q, k, v, enable_gqa=True))


def test_refusals_of_sdpa() -> None:
    q, k = torch.zeros(2, 4, 24, 32, dtype=torch.bfloat16), torch.zeros(2, 2, 24, 32, dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match="enable_gqa=True"):
        ours.scaled_dot_product_attention(q, k, k)
    with pytest.raises(ArgumentError, match="both given"):
        ours.scaled_dot_product_attention(q, q, q, torch.ones(24, 24, dtype=torch.bool), is_causal=True)
    for wrong in (torch.ones(24, 24, dtype=torch.int64), torch.zeros(24, 24, dtype=torch.float64)):
        with pytest.raises(ArgumentError, match=r"attn_mask is (int|float)64: give booleans, attn_mask\.bool\(\)"):
            ours.scaled_dot_product_attention(q, q, q, attn_mask=wrong)  # neither 1 nor 0 is added to scores
    with pytest.raises(ArgumentError, match=r"attn_mask has shape \(5, 24\), which does not broadcast"):
        ours.scaled_dot_product_attention(q, q, q, torch.ones(5, 24, dtype=torch.bool))
    with pytest.raises(ArgumentError, match="query is float32"):
        ours.scaled_dot_product_attention(q.float(), q.float(), q.float())


@pytest.mark.rotated(9)
@pytest.mark.parametrize("name", functions.every_function("cpu"))
def test_flex_attention(name: str) -> None:
    """Compared with FlexAttention itself; only the import differs."""
    score_mod, mask_mod = functions.every_function("cpu")[name]
    shape = (functions.BATCH, functions.HEADS, functions.LENGTH, 32)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    results = []
    for module, inputs in ((ours, (q, k, v)), (torchs, tuple(x.detach().double() for x in (q, k, v)))):
        sizes = (functions.BATCH, functions.HEADS, functions.LENGTH, functions.LENGTH, "cpu")
        block_mask = module.create_block_mask(mask_mod, *sizes) if mask_mod else None
        results.append(module.flex_attention(*inputs, score_mod=score_mod, block_mask=block_mask))
    plain.assert_close(*results)
    out, lse = ours.flex_attention(
        q, k, v, score_mod, mask_mod and ours.create_block_mask(mask_mod, None, None, *shape[2:3] * 2), return_lse=True
    )
    expected, expected_lse = plain.attention(q, k, v, mask=mask_mod, score=score_mod)
    plain.assert_close(lse, expected_lse)
    plain.assert_gradients(out, expected, [q, k, v])


@pytest.mark.gpu
@pytest.mark.parametrize("name", functions.every_function("cpu"))
def test_flex_attention_on_a_gpu(name: str) -> None:
    """Compared with compiled FlexAttention: outputs and gradients."""
    score_mod, mask_mod = functions.every_function("cuda")[name]
    shape = (functions.BATCH, functions.HEADS, functions.LENGTH, 64)
    qkv = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    d_out, results = torch.randn(shape, device="cuda", dtype=torch.bfloat16), []
    torch.compiler.reset()
    with ours.emulated(False):
        for module, call in ((ours, ours.flex_attention), (torchs, torch.compile(torchs.flex_attention))):
            sizes = (functions.BATCH, functions.HEADS, functions.LENGTH, functions.LENGTH, "cuda")
            block_mask = module.create_block_mask(mask_mod, *sizes) if mask_mod else None
            out = call(*qkv, score_mod=score_mod, block_mask=block_mask)
            results.append((out, *torch.autograd.grad(out, qkv, d_out)))
    for got, wanted in zip(*results, strict=True):
        plain.assert_close(got, wanted.double())


def causal_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def test_a_function_that_changed_is_traced_again() -> None:
    q = torch.randn(1, 1, 16, 32, dtype=torch.bfloat16)
    add, table = 1.0, torch.zeros(16)

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + add * j + table[j]

    first = ours.flex_attention(q, q, q, score)
    assert torch.equal(ours.flex_attention(q, q, q, score), first)
    add = 0.0
    second = ours.flex_attention(q, q, q, score)
    table[3] = 5
    third = ours.flex_attention(q, q, q, score)
    table = torch.ones(16).cumsum(0)
    assert not torch.equal(first, second) and not torch.equal(second, third)
    assert not torch.equal(ours.flex_attention(q, q, q, score), third)


@pytest.mark.parametrize("scale", [0.5, np.float32(0.5), np.array(0.5), torch.tensor(0.5)], ids=repr)
def test_scales_of_any_library(scale: Any) -> None:
    q, k, v = (torch.randn(1, 2, 24, 32, dtype=torch.bfloat16) for _ in range(3))
    expected, _ = plain.attention(q, k, v, scale=0.5)
    plain.assert_close(ours.flex_attention(q, k, v, scale=scale), expected)


@pytest.mark.parametrize("columns", [1, 5, 8])
def test_products_of_rows(columns: int) -> None:
    """As rotary parts are added, with their gradients."""
    parts = torch.randn(2, 1, 24, columns, requires_grad=True)
    q, k, v = (torch.randn(2, 2, 24, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    product = parts[:, 0] @ parts[:, 0].mT
    expected, _ = plain.attention(q, k, v, score=lambda s, b, h, i, j: s + product.double()[b, i, j])
    for dot in (torch.dot, lambda a, b: a @ b):
        out = ours.flex_attention(q, k, v, lambda s, b, h, i, j, dot=dot: s + dot(parts[b, 0, i], parts[b, 0, j]))
        plain.assert_close(out, expected)
        plain.assert_gradients(out, expected, [q, k, v, parts])


def test_rows_of_arrays_are_no_elements() -> None:
    q, parts, long = torch.zeros(1, 1, 16, 32, dtype=torch.bfloat16), torch.zeros(1, 1, 16, 8), torch.zeros(16, 64)
    with pytest.raises(SpecError, match="a computation on rows of 64: give 1 to 16 columns, or append them to q and k"):
        ours.flex_attention(q, q, q, lambda s, b, h, i, j: s + torch.dot(parts[b, h, i], long[j]))
    with pytest.raises(SpecError, match="a computation on rows of 64: give 1 to 16 columns, or append them to q and k"):
        ours.flex_attention(q, q, q, lambda s, b, h, i, j: s + torch.dot(long[i], long[j]))
    with pytest.raises(SpecError, match="is a row"):
        ours.flex_attention(q, q, q, lambda s, b, h, i, j: s + (parts[b] * 2)[h, i])


def test_refusals_of_flex_attention() -> None:
    q = torch.zeros(1, 2, 24, 32, dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match=r"make it by flashgen\.torch\.create_block_mask"):
        ours.flex_attention(q, q, q, block_mask=torchs.create_block_mask(causal_mask, 1, 1, 24, 24, "cpu"))
    with pytest.raises(ArgumentError, match="block_mask is for 16 queries"):
        ours.flex_attention(q, q, q, block_mask=ours.create_block_mask(causal_mask, 1, 1, 16, 24))
    with pytest.raises(ArgumentError, match="created for H=3"):
        ours.flex_attention(q, q, q, block_mask=ours.create_block_mask(causal_mask, 1, 3, 24, 24))
    with pytest.raises(ArgumentError, match="enable_gqa"):
        ours.flex_attention(q, q[:, :1], q[:, :1])
    with pytest.raises(ArgumentError, match=r"return_aux=True: give torch's AuxRequest"):
        ours.flex_attention(q, q, q, return_aux=True)


@pytest.mark.rotated(9)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (5, 0), (3, 4)])
@pytest.mark.parametrize("alike", [True, False])
def test_varlen_attention(causal: bool, window: Any, alike: bool) -> None:
    """Compared with each sequence alone, including sequences without tokens, and tokens behind the last one."""
    ends_q, ends_k = torch.tensor([0, 13, 13, 40]), torch.tensor([0, 13, 13, 40] if alike else [0, 20, 26, 50])
    q, k, v = (torch.randn(size, 2, 32, dtype=torch.bfloat16, requires_grad=True) for size in (44, 54, 54))
    slopes = torch.tensor([0.1, 0.2], requires_grad=True)
    out, lse = ours.varlen_attention(
        q, k, v, ends_q.int(), ends_k.int(), causal=causal, window_size=window, softcap=9.0, alibi_slopes=slopes,
        return_lse=True,
    )  # fmt: skip
    left, right = (math.inf if side < 0 else side for side in window)
    right = 0 if causal else right
    expected = torch.zeros(44, 2, 32, dtype=torch.float64)
    for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        shift = (d - c) - (b - a)
        rows, _ = plain.attention(
            *(x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d])),
            mask=lambda _b, _h, i, j, shift=shift: (j <= i + shift + right) & (j >= i + shift - left),
            score=lambda s, _b, h, i, j, shift=shift: torch.tanh(s / 9) * 9 - slopes[h] * (j - i - shift).abs(),
        )
        expected[a:b] = rows[0].transpose(0, 1)
    plain.assert_close(out, expected)
    assert lse.shape == (2, 44) and lse[:, 40:].isinf().all()
    plain.assert_gradients(out, expected, [q, k, v, slopes])


def test_refusals_of_varlen_attention() -> None:
    q, cu = torch.zeros(24, 2, 32, dtype=torch.bfloat16), torch.tensor([0, 24])
    with pytest.raises(ArgumentError, match="packed tokens are"):
        ours.varlen_attention(q[None], q, q, cu, cu)
    with pytest.raises(ArgumentError, match=r"q is float32; flashgen computes .* under torch\.autocast"):
        ours.varlen_attention(q.float(), q.float(), q.float(), cu, cu)
    with pytest.raises(ArgumentError, match=r"window_size=5 must be \(left, right\)"):
        ours.varlen_attention(q, q, q, cu, cu, window_size=5)
    with pytest.raises(ArgumentError, match="cu_seqlens_q has shape"):
        ours.varlen_attention(q, q, q, cu, torch.tensor([0, 12, 24]))
