"""Attention for PyTorch that works with autograd, torch.compile, checkpointing and torch.func.

    import flashgen as fg
    from flashgen.torch import attention, flex_attention, scaled_dot_product_attention

    out = attention(fg.AttentionSpec(64, "bfloat16", mask=fg.causal()), q, k, v)
    out = scaled_dot_product_attention(q, k, v, is_causal=True)         # torch's own signature
    out = flex_attention(q, k, v, score_mod, create_block_mask(mask_mod, None, None, 1024, 1024))

Tensors are on a GPU. CPU tensors run on the emulator with `emulate=True` or inside of `emulated()`.
`import flashgen` does not import this package and needs no torch.
"""

from flashgen.remedies import missing

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise missing("torch", error) from None

from flashgen.torch.block_mask import BlockMask, create_block_mask
from flashgen.torch.caches import append_kv, merge_states
from flashgen.torch.flex import flex_attention
from flashgen.torch.functional import attention
from flashgen.torch.mask_functions import and_masks, create_mask, noop_mask, or_masks
from flashgen.torch.module import Attention
from flashgen.torch.sdpa import scaled_dot_product_attention
from flashgen.torch.sdpa_registry import SdpaCalls, register_sdpa, sdpa_calls
from flashgen.torch.table import emulated, register
from flashgen.torch.varlen import varlen_attention

__all__ = [
    "Attention",
    "BlockMask",
    "SdpaCalls",
    "and_masks",
    "append_kv",
    "attention",
    "create_block_mask",
    "create_mask",
    "emulated",
    "flex_attention",
    "merge_states",
    "noop_mask",
    "or_masks",
    "register",
    "register_sdpa",
    "scaled_dot_product_attention",
    "sdpa_calls",
    "varlen_attention",
]
