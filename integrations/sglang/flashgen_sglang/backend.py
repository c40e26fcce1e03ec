"""`FlashgenAttentionBackend`: SGLang's interface of attention backends, over pages of its pool of tokens."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

import flashgen as fg
from flashgen.errors import SpecError
from flashgen_sglang.layers import FLOAT8, LayerSpecs, refuse
from flashgen_sglang.metadata import MetadataBuilder, StepMetadata, rows_of


class FlashgenAttentionBackend(AttentionBackend):
    """Attention of dense models: extend, decode and both together, over a pool of keys and values in pages.

    Kernels read page tables and lengths on the device. The host reads neither, so a captured decode step serves all
    lengths.
    """

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        check_runner(model_runner)
        self.device = model_runner.device
        self.page_size = model_runner.page_size
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = pool = model_runner.token_to_kv_pool
        self.data_type = self.kv_cache_dtype = model_runner.kv_cache_dtype
        self.forward_metadata: StepMetadata | None = None
        is_split = isinstance(pool, SWAKVPool) and pool.swa_layer_nums > 0
        self._window_pool = pool if is_split else None
        self._builder = MetadataBuilder(
            model_runner.req_to_token_pool.req_to_token,
            self.page_size,
            model_runner.model_config.context_len,
            pool.translate_loc_from_full_to_swa if is_split else None,
        )
        self._buffers: StepMetadata | None = None
        self._ones = [torch.ones(1, dtype=torch.float32, device=self.device) for _ in range(2)]
        self._layers: WeakKeyDictionary[Any, LayerSpecs] = WeakKeyDictionary()

    # Metadata: of a step without a graph; or outside, then inside of a captured one.

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Computes the metadata of a step that runs without a CUDA graph."""
        mode = forward_batch.forward_mode
        if not (mode.is_decode_or_idle() or mode.is_extend()) or mode.is_target_verify() or mode.is_dllm_extend():
            refuse(f"the forward mode is {mode.name}; the backend runs EXTEND, DECODE and MIXED")
        self.forward_metadata = self._builder.build(forward_batch, not mode.is_decode_or_idle())

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocates the page table and the lengths that captured decode steps share."""
        self._buffers = self._builder.allocate(max_bs)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Returns the number of keys of the sequences that pad a captured step."""
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Selects the memory that the metadata of a captured step uses. Nothing else is left to do outside of it."""
        mode = forward_batch.forward_mode
        if not mode.is_decode_or_idle():
            refuse(f"a CUDA graph of the forward mode {mode.name} is captured; the backend captures DECODE")
        if self._buffers is None:
            raise RuntimeError("init_cuda_graph_state must be called before a CUDA graph is captured")
        self.forward_metadata = rows_of(self._buffers, forward_batch.batch_size)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Computes the metadata of a captured step. The graph records it, so each replay computes it again."""
        if self.forward_metadata is None:
            raise RuntimeError("init_forward_metadata_out_graph must be called before init_forward_metadata_in_graph")
        self._builder.fill(self.forward_metadata, forward_batch)

    # Layers

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **options: Any
    ) -> torch.Tensor:
        """Attends for one query of each sequence, after its key and value were written."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, **options)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **options: Any
    ) -> torch.Tensor:
        """Attends for the new tokens of each sequence, after their keys and values were written."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, **options)

    def _forward(
        self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save: bool, sinks: Any = None, **options: Any
    ) -> torch.Tensor:
        for name, value in options.items():
            if value is not None and value is not False:
                refuse(f"layer {layer.layer_id} is called with {name}=..., which the backend does not know")
        step = self.forward_metadata
        if step is None:
            raise RuntimeError("init_forward_metadata must be called before a layer")
        if save and k is not None:
            where = KVWriteLoc.for_batch(batch, swa_loc=step.window_slots)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)
        keys, values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        given = self._where(step, layer)
        if keys.dtype == FLOAT8:
            given |= {"k_scale": self._scale(layer.k_scale, 0), "v_scale": self._scale(layer.v_scale, 1)}
        if sinks is not None:
            given["sinks"] = sinks
        out = self._attend(layer, step, q, keys, values, given)
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _attend(
        self, layer: Any, step: StepMetadata, q: Any, keys: Any, values: Any, given: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Returns the attention of queries as SGLang has them over keys and values as its pool has them."""
        layout = "bshd" if step.cu_seqlens_q is None else "thd"
        launch = self._specs(layer).launcher(layout, q.dtype, keys.dtype, given.get("sinks"), q.device)
        # The launcher belongs to all else that the arguments depend on.
        key, sources = (layer.tp_q_head_num, step.max_seqlen_q), (q, keys, values, *given.values())
        out = launch.repeat(key, sources)
        if out is not None:
            return out
        roles = {name: number for number, name in enumerate(("q", "k", "v", *given))}
        rows = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        pages = pages_of(keys, self.page_size), pages_of(values, self.page_size)
        bounds = {} if step.cu_seqlens_q is None else {"max_seqlen_q": step.max_seqlen_q}
        return launch.run(key, sources, roles, rows if layout == "thd" else rows[:, None], *pages, **given, **bounds)

    def _specs(self, layer: Any) -> LayerSpecs:
        found = self._layers.get(layer)
        if found is None:
            found = self._layers[layer] = LayerSpecs(layer, self.page_size)
        return found

    def _where(self, step: StepMetadata, layer: Any) -> dict[str, Any]:
        """Returns the arrays that say which keys the sequences have, and which queries."""
        pool = self._window_pool
        is_window = pool is not None and pool.layers_mapping[layer.layer_id][1]
        table = step.window_page_table if is_window else step.page_table
        where: dict[str, Any] = {"page_table": table, "seqused_k": step.cache_seqlens_int32}
        if step.cu_seqlens_q is not None:
            where["cu_seqlens_q"] = step.cu_seqlens_q
        return where

    def _scale(self, scale: torch.Tensor | None, which: int) -> torch.Tensor:
        """Returns the scale of 8-bit keys (0) or values (1) as a tensor (1,); without a scale it is 1."""
        if scale is None:
            return self._ones[which]
        return scale if scale.shape == (1,) and not scale.requires_grad else scale.detach().view(1)


def check_runner(runner: Any) -> None:
    """Raises an UnsupportedError for a model or a setting of the server that the backend does not run."""
    try:
        fg.AttentionSpec(64, page_size=runner.page_size)
    except SpecError as error:
        refuse(f"{error}: give --page-size 64")
    if runner.use_mla_backend:
        refuse("the model has latent attention (MLA); the backend runs dense models")
    if runner.spec_algorithm.is_speculative():
        refuse("--speculative-algorithm is set; the backend does not verify drafts")
    if runner.model_config.is_encoder_decoder:
        refuse("the model has an encoder and a decoder; the backend runs decoders")
    if runner.attention_chunk_size is not None:
        refuse("the model attends within chunks; the backend does not")
    if runner.dtype not in (torch.float16, torch.bfloat16):
        refuse(f"the model computes in {runner.dtype}; give --dtype bfloat16 or float16")
    if runner.kv_cache_dtype not in (runner.dtype, FLOAT8):
        refuse(f"the KV cache is {runner.kv_cache_dtype}; give --kv-cache-dtype auto or fp8_e4m3")
    if getattr(runner.token_to_kv_pool, "swa_req_ring_size", None) is not None:
        refuse("the keys of sliding windows are in a ring of each request, and the backend reads pages")
    if runner.kv_index_translator.is_translating:
        refuse("the pool is unified (--enable-unified-memory); its slots have two numbers")


def pages_of(buffer: torch.Tensor, page_size: int) -> torch.Tensor:
    """Returns keys or values of a pool as (pages, page_size, heads, dim), a view.

    buffer: (slots, heads, dim), or (pages, heads, page_size, dim) if the pool stores heads before tokens.
    """
    if buffer.ndim == 4:
        return buffer.transpose(1, 2)
    slots, heads, dim = buffer.shape
    row = buffer.stride(0)
    shape = (slots // page_size, page_size, heads, dim)
    return buffer.as_strided(shape, (row * page_size, row, *buffer.stride()[1:]))
