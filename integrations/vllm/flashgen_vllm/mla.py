"""The backend "FLASHGEN_MLA": decode steps of latent attention over the cache of latent vectors.

vLLM's own classes prepare the batch, and compute prompts by the prefill backend that is selected there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch

import flashgen as fg
from flashgen_vllm.versions import check_version

check_version()

from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf

from flashgen_vllm.backend import PAGE_SIZES, problem_of_dtypes, supports_capability
from flashgen_vllm.launches import Launcher, launcher
from flashgen_vllm.variants import base_mask, name_of


class FlashgenMLABackend(MLACommonBackend):
    """Says what the backend supports, by which vLLM accepts or refuses it for a model."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "FLASHGEN_MLA"

    @staticmethod
    def get_impl_cls() -> type[FlashgenMLAImpl]:
        return FlashgenMLAImpl

    @staticmethod
    def get_builder_cls() -> type[FlashgenMLAMetadataBuilder]:
        return FlashgenMLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [*PAGE_SIZES]

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return supports_capability(capability)

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: Any, *args: Any, **named: Any
    ) -> str | None:
        return problem_of_dtypes(head_size, dtype, kv_cache_dtype)


@dataclass
class FlashgenMLADecodeMetadata(MLACommonDecodeMetadata):
    """The decode part of a batch, with `query_start_loc`, int32 (requests + 1,), and the bound of its differences."""

    query_start_loc: torch.Tensor
    max_query_len: int


class FlashgenMLAMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata[FlashgenMLADecodeMetadata]]):
    """vLLM's builder for latent attention; requests of a decode step may differ in their numbers of tokens."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH  # prompts are not captured
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    supports_non_causal_multi_token_decode: ClassVar[bool] = True

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
    ) -> FlashgenMLADecodeMetadata:
        shared = (block_table_tensor, seq_lens_device, dcp_tot_seq_lens_device)
        return FlashgenMLADecodeMetadata(*shared, query_start_loc_device, max_query_len)


class FlashgenMLAImpl(MLACommonImpl[MLACommonMetadata[FlashgenMLADecodeMetadata]]):
    """The attention of one layer."""

    supports_pcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        if alibi_slopes or sliding_window or logits_soft_cap or attn_type != AttentionType.DECODER:
            raise NotImplementedError("FLASHGEN_MLA has no ALiBi slopes, windows or softcaps, and only decoders")
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        self._launchers: dict[Any, Launcher] = {}

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata[FlashgenMLADecodeMetadata],
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the attention of queries over latent vectors, (tokens, heads, kv_lora_rank), and no LSE.

        Args:
            q: (tokens, heads, dim) of the cache's vectors, or its two parts without and with positions.
            kv_c_and_k_pe_cache: (blocks, block_size, dim). V is its first kv_lora_rank columns.
            attn_metadata: the batch, of which this reads the decode part.
            layer: not used.
        """
        decode = attn_metadata.decode
        assert decode is not None, "vLLM calls forward_mqa for batches with a decode part"
        q = torch.cat(q, -1) if isinstance(q, tuple) else q
        out = q.new_empty(*q.shape[:2], self.kv_lora_rank)
        is_single = decode.max_query_len <= 1 and len(q) == len(decode.seq_lens)
        is_short = decode.max_query_len <= fg.MAX_DECODE_QUERIES
        launch = self._launcher(q, kv_c_and_k_pe_cache.shape[1], is_single, attn_metadata.causal)
        sources = [q, kv_c_and_k_pe_cache, out, decode.block_table, decode.seq_lens]
        if not is_single:
            sources.append(decode.query_start_loc)
        if launch.repeat(is_short, sources):  # the launcher belongs to all else that the arguments depend on
            return out, None
        roles = {"q": 0, "k": 1, "out": 2, "page_table": 3, "seqused_k": 4, "cu_seqlens_q": 5}
        arrays: dict[str, Any] = {"page_table": decode.block_table, "seqused_k": decode.seq_lens}
        if not is_single:
            arrays["cu_seqlens_q"] = decode.query_start_loc
            if is_short:
                arrays["max_seqlen_q"] = fg.MAX_DECODE_QUERIES
        rows = (q[:, None], out[:, None]) if is_single else (q, out)
        launch.run(is_short, sources, roles, rows[0], kv_c_and_k_pe_cache[:, :, None], None, rows[1], **arrays)
        return out, None

    def _launcher(self, q: torch.Tensor, page_size: int, is_single: bool, causal: bool) -> Launcher:
        """Returns the launcher of a batch, which is looked up once for each kind of batch."""
        kind = (q.dtype, page_size, is_single, causal)
        found = self._launchers.get(kind)
        if found is None:
            layout = "bshd" if is_single else "thd"
            sizes = (q.shape[-1], self.kv_lora_rank, self.scale)
            spec = _spec_of(*sizes, name_of(q.dtype), page_size, layout, causal)
            found = self._launchers[kind] = launcher(spec, q.device)
        return found


@lru_cache(maxsize=64)
def _spec_of(
    dim: int, value_dim: int, scale: float, dtype: str, page_size: int, layout: str, causal: bool
) -> fg.AttentionSpec:
    mask = base_mask(None, causal)
    return fg.AttentionSpec(dim, dtype, value_dim, scale, layout, mask=mask, page_size=page_size, shared_kv=True)
