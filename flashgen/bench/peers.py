"""What flashgen is measured beside, where it is installed: torch's SDPA backends and FlexAttention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy

from flashgen.language.masks import causal
from flashgen.language.spec import AttentionSpec

Run = Callable[[], Any]

SDPA_BACKENDS = {"FA2": "FLASH_ATTENTION", "cuDNN": "CUDNN_ATTENTION"}


def _is_causal(spec: AttentionSpec, square: bool) -> bool:
    names = {causal().expression, causal("top_left").expression} if square else {causal("top_left").expression}
    return spec.mask.expression in names


def sdpa(spec: AttentionSpec, backend: str, q: Any, k: Any, v: Any) -> Run | None:
    """A run of one of torch's backends, or None where it cannot do the spec (or torch is missing)."""
    plain = spec.mask.expression == sympy.true
    if spec.score or spec.dropout or not (plain or _is_causal(spec, q.shape[2] == k.shape[2])):
        return None
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        return None
    chosen = getattr(SDPBackend, backend)

    def run() -> Any:
        with sdpa_kernel(chosen):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=not plain, scale=spec.scale)

    return _runs(run)


def flex(spec: AttentionSpec, q: Any, k: Any, v: Any) -> Run | None:
    """A run of FlexAttention for a plain or causal spec, its block mask made outside the timing."""
    plain = spec.mask.expression == sympy.true
    if spec.score or spec.dropout or not (plain or _is_causal(spec, q.shape[2] == k.shape[2])):
        return None
    try:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    except ImportError:
        return None
    block_mask = None
    if not plain:
        block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, q.shape[2], k.shape[2], device="cuda")
    torch._dynamo.reset()  # each shape compiles anew; past a limit torch would run it without compiling
    compiled = torch.compile(flex_attention, dynamic=False)
    return _runs(lambda: compiled(q, k, v, block_mask=block_mask, scale=spec.scale))


def _runs(run: Run) -> Run | None:
    """The run, if the peer can do it at all here."""
    try:
        run()
    except (RuntimeError, ValueError, AssertionError):
        return None
    return run
