"""The peers that flashgen is compared with: the SDPA backends of torch, FlexAttention, FlashAttention-4, FFPA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.bench.cases import Arrays, Timed, has_heads_first
from flashgen.bench.ffpa import ffpa
from flashgen.bench.flash_attention4 import flash_attention4
from flashgen.bench.torch_expressions import mask_function, score_function
from flashgen.bench.torch_runs import differentiated
from flashgen.language.masks import causal
from flashgen.language.operations import BATCH, HEAD
from flashgen.language.spec import AttentionSpec
from flashgen.runtime.timing import Run

SDPA_BACKENDS = {"FA2": "FLASH_ATTENTION", "cuDNN": "CUDNN_ATTENTION"}
PEERS = (*SDPA_BACKENDS, "Flex", "FA4", "FFPA")


def peer(name: str, spec: AttentionSpec, timed: Timed, arrays: Arrays) -> Run | None:
    """Returns a run of a peer of PEERS; None if it is not installed or does not support the spec."""
    if spec.shared_kv:
        return None
    if name in SDPA_BACKENDS:
        return sdpa(spec, SDPA_BACKENDS[name], timed, arrays)
    return _PACKAGES[name](spec, timed, arrays)


def is_causal(spec: AttentionSpec, square: bool) -> bool:
    """Tests whether the mask equals torch's is_causal, which aligns to the top left; square scores fit both."""
    names = {causal().expression, causal("top_left").expression} if square else {causal("top_left").expression}
    return spec.mask.expression in names


def sdpa(spec: AttentionSpec, backend: str, timed: Timed, arrays: Arrays, dropout: float = 0.0) -> Run | None:
    """Returns a run of a backend of torch; None if torch is missing or the backend does not support the spec.

    `dropout` is the probability of torch's own dropout, which must equal that of the spec. Its bits differ.
    """
    q, k, v, d_out = arrays
    plain = spec.mask.expression == sympy.true
    supported = plain or is_causal(spec, q.shape[2] == k.shape[2])
    if spec.score or spec.sink or spec.dropout != dropout or not (has_heads_first(spec) and supported):
        return None
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        return None
    chosen, grouped = getattr(SDPBackend, backend), q.shape[1] != k.shape[1]
    options = {"is_causal": not plain, "scale": spec.scale, "dropout_p": dropout, "enable_gqa": grouped}

    def forward(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(chosen):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    return differentiated(forward, timed, (q, k, v), d_out)


@dataclass(frozen=True)
class Flex:
    """Runs of FlexAttention on a spec, and of the creation of its block mask (None if the spec needs none)."""

    run: Run
    make_block_mask: Run | None


def flex(
    spec: AttentionSpec,
    timed: Timed,
    arrays: Arrays,
    captures: Mapping[str, Any] | None = None,
    time_mask: bool = True,
) -> Flex | None:
    """Returns FlexAttention compiled for these shapes; None if torch is missing or fails.

    With `time_mask`, the creation of the block mask is compiled so that it can be timed, which takes minutes. Otherwise
    it is created by eager operations, which materialise the positions of all scores.
    """
    if spec.dropout or spec.sink or not has_heads_first(spec):
        return None
    try:
        import torch
        from torch.nn.attention.flex_attention import flex_attention
    except ImportError:
        return None
    torch._dynamo.reset()  # torch runs eagerly after too many recompilations, one for each shape
    q, k, v, d_out = arrays
    given = dict(captures or {})
    make = _block_mask(spec, q, k, given, time_mask)
    block_mask = make() if make else None
    learned = {c.name: given[c.name].detach().requires_grad_() for c in spec.captures if c.grad}
    compiled, grouped = torch.compile(flex_attention, dynamic=False), q.shape[1] != k.shape[1]

    def forward(q: Any, k: Any, v: Any, *leaves: Any) -> Any:
        read = given | dict(zip(learned, leaves, strict=True))
        score = score_function(spec, q.shape[2], k.shape[2], read) if spec.score else None
        return compiled(q, k, v, score_mod=score, block_mask=block_mask, scale=spec.scale, enable_gqa=grouped)

    run = differentiated(forward, timed, (q, k, v, *learned.values()), d_out)
    return Flex(run, make if time_mask else None) if run else None


def _flex_run(spec: AttentionSpec, timed: Timed, arrays: Arrays) -> Run | None:
    # Without compilation, torch would materialise the positions of all batches and heads.
    found = flex(spec, timed, arrays, time_mask=spec.mask.expression.has(BATCH, HEAD))
    return found.run if found else None


_PACKAGES: Mapping[str, Callable[[AttentionSpec, Timed, Arrays], Run | None]] = {
    "Flex": _flex_run,
    "FA4": flash_attention4,
    "FFPA": ffpa,
}


def _block_mask(spec: AttentionSpec, q: Any, k: Any, captures: Mapping[str, Any], compiled: bool = True) -> Run | None:
    if spec.mask.expression == sympy.true:
        return None
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    mask = mask_function(spec, q.shape[2], k.shape[2], captures)
    batch = q.shape[0] if spec.mask.expression.has(BATCH) else None
    heads = q.shape[1] if spec.mask.expression.has(HEAD) else None
    make = torch.compile(create_block_mask) if compiled else create_block_mask
    return lambda: make(mask, batch, heads, q.shape[2], k.shape[2], device="cuda")
