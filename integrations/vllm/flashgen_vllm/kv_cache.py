"""The KV cache of a layer: its views as pages of flashgen, and the writes of new keys and values."""

from __future__ import annotations

from typing import Any

import torch

FLOAT8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}
"""The float8 types among vLLM's names of cache types."""


def pages_of(kv_cache: torch.Tensor, float8: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns K and V as views (pages, page_size, heads_kv, head_dim) with the strides of the cache.

    Args:
        kv_cache: vLLM's logical view, (blocks, heads_kv, block_size, 2 * head_dim), with the value of a token behind
            its key; its memory may have another order.
        float8: the type of the elements where vLLM stores them as bytes; None for the type of the tensor.
    """
    if float8 is not None and kv_cache.dtype != float8:
        kv_cache = kv_cache.view(float8)
    k, v = kv_cache.transpose(1, 2).chunk(2, -1)
    return k, v


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    cache_dtype: str,
    layer: Any,
) -> None:
    """Writes keys and values of tokens, (tokens, heads_kv, head_dim), into their slots of the pages, in place.

    On a GPU this is vLLM's own operator, which all its backends share. It has no version for CPU tensors.

    Args:
        key, value: of at least as many tokens as `slots` has elements.
        k, v: the pages, as `pages_of` returns them.
        slots: page * page_size + row for each token, negative for a token that is not written.
        cache_dtype: vLLM's name of the type of the cache.
        layer: has the scales `_k_scale` and `_v_scale`, by which elements are divided if the cache is float8.
    """
    if k.is_cuda:
        from vllm._custom_ops import reshape_and_cache_flash

        reshape_and_cache_flash(key, value, k, v, slots, cache_dtype, layer._k_scale, layer._v_scale)
        return
    used = slots >= 0
    size = k.shape[1]
    page, row = slots[used] // size, slots[used] % size
    for new, pages, scale in ((key, k, layer._k_scale), (value, v, layer._v_scale)):
        rows = new[: len(slots)][used]
        if cache_dtype in FLOAT8:
            limit = torch.finfo(FLOAT8[cache_dtype]).max
            rows = (rows.float() / scale.reshape(-1, 1)).clamp(-limit, limit).to(FLOAT8[cache_dtype]).view(torch.uint8)
            pages = pages.view(torch.uint8)
        pages[page, row] = rows
