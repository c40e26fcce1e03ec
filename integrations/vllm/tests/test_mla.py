"""Decode steps of latent attention: vLLM's builder, then `forward_mqa`, compared with SDPA of each request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

pytest.importorskip(
    "vllm.model_executor.layers.attention.mla_attention",
    reason="vLLM's classes of latent attention need more packages, and on a GPU its FlashAttention",
    exc_type=ImportError,
)

from batches import Setup, make
from flashgen_vllm.mla import FlashgenMLABackend

HEADS, RANK, ROPE, BLOCK = 3, 64, 8, 16
SIZES = {"q_lora_rank": None, "kv_lora_rank": RANK, "qk_nope_head_dim": 16, "qk_rope_head_dim": ROPE, "v_head_dim": 16}


def builder(device: torch.device, causal: bool) -> Any:
    """Returns a builder of metadata, with the parts of vLLM's configuration that it reads."""
    prefill = SimpleNamespace(clone=lambda: None)
    layer = SimpleNamespace(**SIZES, prefill_backend=prefill, non_causal_multi_token_decode=not causal)
    parallel = {"prefill_context_parallel_size": 1, "decode_context_parallel_size": 1, "cp_kv_cache_interleave_size": 1}
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            dtype=torch.bfloat16,
            max_model_len=128,
            get_num_attention_heads=lambda parallel: HEADS,
            get_head_size=lambda: 576,  # metadata accept the sizes of published models only
        ),
        parallel_config=SimpleNamespace(**parallel),
        compilation_config=SimpleNamespace(static_forward_context={"layer": layer}),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=BLOCK),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        speculative_config=SimpleNamespace(num_speculative_tokens=3, parallel_drafting=False),
        attention_config=SimpleNamespace(use_prefill_query_quantization=False),
        use_v2_model_runner=True,
    )
    builder_cls = FlashgenMLABackend.get_builder_cls()
    return builder_cls(SimpleNamespace(block_size=BLOCK), ["layer"], config, device)


def implementation(device: torch.device) -> Any:
    """Returns an implementation of a layer."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

    fixed: list[Any] = [None, None, "auto", None, "decoder", None]
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device=device.type))):
        impl_cls = FlashgenMLABackend.get_impl_cls()
        return impl_cls(HEADS, RANK + ROPE, 0.2, 1, *fixed, **SIZES, qk_head_dim=16 + ROPE, kv_b_proj=None)


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
    common = make(Setup(queries, keys, causal=causal), device).common
    metadata = builder(device, causal).build(0, common.replace(seq_lens_cpu_upper_bound=torch.tensor(keys)))
    assert (metadata.num_decodes, metadata.num_prefills, metadata.causal) == (len(queries), 0, causal)
    cached = [torch.randn(length, RANK + ROPE, **options) for length in keys]
    cache = torch.full((int(common.block_table_tensor.max()) + 1, BLOCK, RANK + ROPE), torch.nan, **options)
    for blocks, rows in zip(common.block_table_tensor.long(), cached, strict=True):
        position = torch.arange(len(rows), device=device)
        cache[blocks[position // BLOCK], position % BLOCK] = rows
    q = torch.randn(sum(queries), HEADS, RANK + ROPE, **options)
    out, lse = implementation(device).forward_mqa(q.split([RANK, ROPE], -1) if in_parts else q, cache, metadata, None)
    assert lse is None and out.shape == (sum(queries), HEADS, RANK)
    for own, rows, k in zip(out.split(queries), q.split(queries), cached, strict=True):
        torch.testing.assert_close(own.double(), expected(rows, k, causal), atol=3e-2, rtol=3e-2)


def expected(q: torch.Tensor, k: torch.Tensor, causal: bool) -> torch.Tensor:
    """Returns the attention of one request's queries, whose keys are the last ones, over its latent vectors."""
    kept = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device)
    wide = k.double().expand(HEADS, -1, -1)
    rows = (q.double().transpose(0, 1), wide, wide[..., :RANK], kept.tril(len(k) - len(q)) if causal else kept)
    return functional.scaled_dot_product_attention(*rows, scale=0.2).transpose(0, 1)
