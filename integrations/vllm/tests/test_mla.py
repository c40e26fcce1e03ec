"""Decode steps of latent attention through `forward_mqa`, compared with SDPA of each request."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

pytest.importorskip(
    "vllm.model_executor.layers.attention.mla_attention",
    reason="vLLM's classes of latent attention need more packages, and on a GPU its FlashAttention",
    exc_type=ImportError,
)

from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata

from flashgen_vllm.mla import FlashgenMLABackend

HEADS, RANK, ROPE, BLOCK = 3, 64, 8, 16


def implementation(device: torch.device) -> Any:
    """Returns an implementation of a layer, made by vLLM's constructor."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

    sizes = {"q_lora_rank": None, "kv_lora_rank": RANK, "qk_nope_head_dim": 16, "qk_rope_head_dim": ROPE}
    sizes |= {"qk_head_dim": 16 + ROPE, "v_head_dim": 16}
    fixed: list[Any] = [None, None, "auto", None, "decoder", None]
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device=device.type))):
        impl_cls = FlashgenMLABackend.get_impl_cls()
        return impl_cls(HEADS, RANK + ROPE, 0.2, 1, *fixed, **sizes, kv_b_proj=None)


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "causal"),
    [
        ([1, 1, 1], [20, 1, 70], True),
        ([3, 3], [20, 40], True),
        ([2, 4, 1], [30, 4, 18], True),
        ([3, 3], [20, 9], False),
    ],
    ids=["decode", "speculative", "different lengths", "not causal"],
)
def test_forward_mqa(queries: list[int], keys: list[int], causal: bool, in_parts: bool, device: torch.device) -> None:
    options: Any = {"dtype": torch.bfloat16, "device": device}
    cached = [torch.randn(length, RANK + ROPE, **options) for length in keys]
    used = [-(-length // BLOCK) for length in keys]
    cache = torch.full((sum(used), BLOCK, RANK + ROPE), torch.nan, **options)
    table = torch.zeros(len(keys), max(used), dtype=torch.int32, device=device)
    blocks = iter(torch.randperm(sum(used)).tolist())
    for b, rows in enumerate(cached):
        for i in range(used[b]):
            table[b, i] = block = next(blocks)
            part = rows[i * BLOCK : (i + 1) * BLOCK]
            cache[block, : len(part)] = part
    starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0).int()
    decode = build_decode(table, torch.tensor(keys, dtype=torch.int32, device=device), starts, max(queries))
    q = torch.randn(sum(queries), HEADS, RANK + ROPE, **options)
    given = q.split([RANK, ROPE], -1) if in_parts else q
    counts = (len(keys), max(queries), max(keys), sum(queries))
    parts = (len(keys), sum(queries), 0)  # decodes, their tokens, and prompts
    slots = torch.zeros(sum(queries), dtype=torch.int64, device=device)
    metadata = MLACommonMetadata(*counts, decode.query_start_loc, slots, *parts, causal=causal, decode=decode)
    out, lse = implementation(device).forward_mqa(given, cache, metadata, None)
    assert lse is None and out.shape == (sum(queries), HEADS, RANK)
    for own, rows, k in zip(out.split(queries), q.split(queries), cached, strict=True):
        kept = torch.ones(len(rows), len(k), dtype=torch.bool, device=device)
        kept = kept.tril(len(k) - len(rows)) if causal else kept
        wide = k.double().expand(HEADS, -1, -1)
        wanted = functional.scaled_dot_product_attention(
            rows.double().transpose(0, 1), wide, wide[..., :RANK], kept, scale=0.2
        )
        torch.testing.assert_close(own.double(), wanted.transpose(0, 1), atol=3e-2, rtol=3e-2)


def build_decode(table: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor, longest: int) -> Any:
    """Returns the decode part of a batch as the builder makes it. vLLM's constructor of the builder needs a model."""
    builder_cls = FlashgenMLABackend.get_builder_cls()
    builder = builder_cls.__new__(builder_cls)
    given = (table, lengths, 70, starts, starts.to(table.device), int(starts[-1]), longest, None)
    return builder._build_decode(*given)
