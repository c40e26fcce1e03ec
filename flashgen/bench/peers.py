"""What flashgen is measured beside, where it is installed: torch's SDPA backends and FlexAttention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.bench.torch_expressions import mask_function, score_function
from flashgen.language.masks import causal
from flashgen.language.operations import BATCH, HEAD
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


@dataclass(frozen=True)
class Flex:
    """FlexAttention on a spec: a run of it, and one of making its block mask (None where the spec needs none)."""

    run: Run
    make_block_mask: Run | None


def flex(spec: AttentionSpec, q: Any, k: Any, v: Any, captures: Mapping[str, Any] | None = None) -> Flex | None:
    """FlexAttention, compiled for these shapes; None where torch is missing or fails."""
    if spec.dropout or spec.layout != "bhsd":
        return None
    try:
        import torch
        from torch.nn.attention.flex_attention import flex_attention
    except ImportError:
        return None
    torch._dynamo.reset()  # each shape compiles anew; past a limit torch would run it without compiling
    given = captures or {}
    make = _block_mask(spec, q, k, given)
    block_mask = make() if make else None
    score = score_function(spec, q.shape[2], k.shape[2], given) if spec.score else None
    compiled = torch.compile(flex_attention, dynamic=False)
    run = _runs(lambda: compiled(q, k, v, score_mod=score, block_mask=block_mask, scale=spec.scale))
    return Flex(run, make) if run else None


def _block_mask(spec: AttentionSpec, q: Any, k: Any, captures: Mapping[str, Any]) -> Run | None:
    if spec.mask.expression == sympy.true:
        return None
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    mask = mask_function(spec, q.shape[2], k.shape[2], captures)
    batch = q.shape[0] if spec.mask.expression.has(BATCH) else None
    heads = q.shape[1] if spec.mask.expression.has(HEAD) else None
    compiled = torch.compile(create_block_mask)
    return lambda: compiled(mask, batch, heads, q.shape[2], k.shape[2], device="cuda")


def _runs(run: Run) -> Run | None:
    """The run, if the peer can do it at all here."""
    try:
        run()
    except (RuntimeError, ValueError, AssertionError):
        return None
    return run
