"""The backend "FLASHGEN": decoder attention over a paged KV cache."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from flashgen import MAX_DECODE_QUERIES
from flashgen_vllm.versions import check_version

check_version()

from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType, MultipleOf

from flashgen_vllm.kv_cache import FLOAT8, pages_of, write
from flashgen_vllm.launches import Launcher, launcher
from flashgen_vllm.metadata import FlashgenMetadata, FlashgenMetadataBuilder
from flashgen_vllm.variants import Variant, name_of, spec_of

PAGE_SIZES = (16, 32, 64, 128, 256)
_LARGEST_HEAD = 512


class FlashgenBackend(AttentionBackend):
    """Says what the backend supports, by which vLLM accepts or refuses it for a model."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *FLOAT8]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "FLASHGEN"

    @staticmethod
    def get_impl_cls() -> type[FlashgenImpl]:
        return FlashgenImpl

    @staticmethod
    def get_builder_cls() -> type[FlashgenMetadataBuilder]:
        return FlashgenMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [*PAGE_SIZES]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and 8 <= head_size <= _LARGEST_HEAD

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

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


def supports_capability(capability: Any) -> bool:
    """Whether flashgen has kernels for float16 and bfloat16 on GPUs of a compute capability."""
    return bool(capability >= (8, 0))


def problem_of_dtypes(head_size: int, dtype: torch.dtype, kv_cache_dtype: Any) -> str | None:
    """Returns why the types of the model and of its cache do not work together; None if they do."""
    if kv_cache_dtype in FLOAT8 and head_size % 32:
        return f"a float8 KV cache needs a head size that is a multiple of 32, and this one is {head_size}"
    if kv_cache_dtype in ("float16", "bfloat16") and dtype != getattr(torch, kv_cache_dtype):
        return f"the KV cache is {kv_cache_dtype} and the model {dtype}: use a KV cache of the model's type"
    return None


class FlashgenImpl(AttentionImpl[FlashgenMetadata]):
    """The attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"FLASHGEN: attention of type {attn_type!r}: select FLASH_ATTN")
        if alibi_slopes is not None and logits_soft_cap:
            raise NotImplementedError("FLASHGEN: ALiBi slopes together with a softcap: select TRITON_ATTN")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window, self.logits_soft_cap = sliding_window, float(logits_soft_cap or 0)
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self._slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self._float8 = FLOAT8.get(kv_cache_dtype)
        self._launchers: dict[Any, Launcher] = {}

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Writes the keys and values of new tokens. vLLM calls it before `forward`."""
        k, v = pages_of(kv_cache)
        write(key, value, k, v, slot_mapping, self.kv_cache_dtype, layer)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashgenMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes the attention of queries (tokens, heads, dim) to `output`, which it returns.

        The keys and values of these tokens are in the cache already. Without metadata, as while vLLM measures memory,
        the output is 0.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("FLASHGEN does not quantize outputs: disable the fusion of attention and quant")
        if attn_metadata is None:
            return output.fill_(0)
        batch, launch = attn_metadata, self._launcher(layer, attn_metadata, query, kv_cache.shape[2])
        tokens = batch.num_actual_tokens
        sources = [query, kv_cache, output, batch.block_table, batch.seq_lens]
        if not batch.is_single:
            sources.append(batch.query_start_loc)
        if self._float8 is not None:
            sources += (layer._k_scale, layer._v_scale)
        if self.sinks is not None:
            sources.append(self.sinks)
        if self._slopes is not None:
            if self._slopes.device != query.device:
                self._slopes = self._slopes.to(query.device)
            sources.append(self._slopes)
        key = (tokens, batch.is_short)  # the launcher belongs to all else that the arguments depend on
        if batch.ranges is None and launch.repeat(key, sources):
            return output
        q, out = (query[:tokens, None], output[:tokens, None]) if batch.is_single else (query[:tokens], output[:tokens])
        k, v = pages_of(kv_cache, self._float8)
        names = self._names(batch)
        arrays = dict(zip(names, sources[3:], strict=True))
        roles = {"q": 0, "k": 1, "v": 1, "out": 2, **{name: number for number, name in enumerate(names, 3)}}
        if self._float8 is not None:
            arrays |= {name: arrays[name].reshape(-1) for name in ("k_scale", "v_scale")}
        if batch.ranges is not None:
            arrays["query_starts"] = batch.query_start_loc
            arrays["first_keys"], arrays["last_keys"] = batch.ranges
        bounds = {"max_seqlen_q": MAX_DECODE_QUERIES} if batch.is_short and not batch.is_single else {}
        launch.run(key, sources, roles, q, k, v, out, **arrays, **bounds)
        return output

    def _names(self, batch: FlashgenMetadata) -> list[str]:
        """Returns the names of the arguments that are given as `forward` has them, after q, k, v and the output."""
        names = ["page_table", "seqused_k"]
        names += [] if batch.is_single else ["cu_seqlens_q"]
        names += [] if self._float8 is None else ["k_scale", "v_scale"]
        names += [] if self.sinks is None else ["sinks"]
        return names if self._slopes is None else [*names, "slopes"]

    def _launcher(self, layer: Any, batch: FlashgenMetadata, q: torch.Tensor, page_size: int) -> Launcher:
        """Returns the launcher of a batch, which is looked up once for each kind of batch."""
        kind = (q.dtype, page_size, batch.is_single, batch.causal, batch.ranges is not None)
        found = self._launchers.get(kind)
        if found is None:
            variant = Variant(
                self.head_size,
                name_of(q.dtype),
                self.scale,
                self.sliding_window,
                self.logits_soft_cap,
                self._slopes is not None,
                None if self.sinks is None else name_of(self.sinks.dtype),
                None if self._float8 is None else name_of(self._float8),
                bool(getattr(layer, "mm_prefix_clamp_sliding_window", False)),
            )
            spec = spec_of(variant, page_size, "bshd" if batch.is_single else "thd", *kind[3:])
            found = self._launchers[kind] = launcher(spec, q.device)
        return found
