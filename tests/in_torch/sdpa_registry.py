"""flashgen as torch's flash operators on CPU tensors, where torch has none: plain attention stands for torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from flashgen.torch.flash_operators import OPERATORS
from flashgen.torch.sdpa_registry import Activation, sdpa_calls
from in_torch import plain

aten = torch.ops.aten


@contextmanager
def activated() -> Iterator[None]:
    """Activates flashgen for CPU tensors. The emulator runs its kernels."""
    own = torch.library.Library("aten", "IMPL")
    for name in OPERATORS:
        own.impl(name, _OWN.get(name, _not_here(name)), "CPU")
    activation = Activation("CPU")
    sdpa_calls(reset=True)
    try:
        yield
    finally:
        activation.remove()
        own._destroy()


def sdpa(
    q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, **how: Any
) -> Any:
    """Computes what torch's scaled_dot_product_attention computes on a GPU if it chooses its flash operator."""
    assert attn_mask is None
    how.pop("enable_gqa", None)
    return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, **how)[0]


def _own_forward(
    q: Any, k: Any, v: Any, dropout_p: Any = 0, is_causal: Any = False, _mask: Any = False, *, scale: Any = None
) -> Any:
    out, lse = plain.attention(q, k, v, _causal(q, k) if is_causal else None, scale=scale)
    state, unused = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return out.to(q.dtype), lse.float(), None, None, q.shape[2], k.shape[2], state, unused, q.new_empty(0)


def _own_backward(d_out: Any, q: Any, k: Any, v: Any, *rest: Any, scale: Any = None) -> Any:
    def gradients() -> Any:
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out, _ = plain.attention(*inputs, _causal(q, k) if rest[7] else None, scale=scale)
        return torch.autograd.grad(out, inputs, d_out.to(out.dtype))

    with ThreadPoolExecutor(1) as pool:  # in the thread of the operator, torch skips autograd
        return pool.submit(gradients).result()


def _causal(q: Any, k: Any) -> Callable[..., Any]:
    return lambda b, h, i, j: i + k.shape[2] - q.shape[2] >= j


def _not_here(name: str) -> Callable[..., Any]:
    def own(*_given: Any, **_named: Any) -> Any:
        raise RuntimeError(f"torch's own {name}")

    return own


_OWN: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": _own_forward,
    "_scaled_dot_product_flash_attention_backward": _own_backward,
}
