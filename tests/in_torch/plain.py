"""Attention in plain torch, in float64 and differentiable by autograd, and comparisons with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_LEAST = 2e-3


def attention(
    q: Any,
    k: Any,
    v: Any,
    mask: Callable[..., Any] | None = None,
    score: Callable[..., Any] | None = None,
    scale: float | None = None,
) -> tuple[Any, Any]:
    """Returns output and LSE of (batch, heads, length, dim); mask and score are FlexAttention's functions."""
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q.double() @ k.mT * (scale or q.shape[-1] ** -0.5)
    b, h, i, j = torch.meshgrid(*(torch.arange(size) for size in scores.shape), indexing="ij")
    if score is not None:
        scores = score(scores, b, h, i, j)
    if mask is not None:
        scores = torch.where(mask(b, h, i, j), scores, float("-inf"))
    lse = scores.logsumexp(-1)
    weights = torch.where(lse[..., None].isinf(), 0.0, (scores - lse[..., None]).exp())
    return weights @ v, lse


def assert_close(got: Any, wanted: Any, what: str = "") -> None:
    """Asserts that values agree up to the rounding of bfloat16."""
    error = (got.detach().double() - wanted.detach()).abs().max().item()
    most = 2e-2 * max(wanted.detach().abs().max().item(), 0.1) + _LEAST
    assert error <= most, f"{what} is off by {error:.2e}, at most {most:.2e}"


def gradients(result: Any, by: Any, inputs: Sequence[Any]) -> Any:
    return torch.autograd.grad(result, inputs, by, retain_graph=True)


def assert_gradients(got: Any, wanted: Any, inputs: Sequence[Any]) -> None:
    """Returns the gradients of both, for one random gradient of the output."""
    d_out = torch.randn(wanted.shape, dtype=torch.float64)
    ours, theirs = gradients(got, d_out.to(got.dtype), inputs), gradients(wanted, d_out, inputs)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert_close(one, other.double(), f"gradient {number}")
