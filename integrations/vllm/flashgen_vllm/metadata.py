"""What the layers of a step share: vLLM's arrays of the batch, which stay on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    max_decode_query_len,
)

from flashgen import MAX_DECODE_QUERIES

_NO_RANGE = (2**31 - 1, -1)


@dataclass
class FlashgenMetadata(AttentionMetadata):
    """The batch of a step.

    Attributes:
        num_actual_tokens: tokens of the batch, with those that a CUDA graph adds.
        query_start_loc: int32 (requests + 1,), where the tokens of each request begin.
        seq_lens: int32 (requests,), the numbers of keys.
        block_table: int32 (requests, blocks), the pages of each request.
        slot_mapping: int64 (tokens,), where the key and value of each token are written.
        causal: whether a query attends to keys up to its own position only.
        is_single: whether token i is the only one of request i.
        is_short: whether no request has more than `flashgen.MAX_DECODE_QUERIES` tokens.
        ranges: for each token, the first and the last key of the range that it attends to in both directions; None if
            the model has no such ranges, or no request has more than one token.
    """

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool
    is_single: bool
    is_short: bool
    ranges: tuple[torch.Tensor, torch.Tensor] | None = None


class FlashgenMetadataBuilder(AttentionMetadataBuilder[FlashgenMetadata]):
    """Builds the metadata of a step without reading the device, and without lengths of keys on the host.

    All arrays are those that vLLM keeps from step to step, so a captured graph replays any batch with as many tokens
    and requests.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    supports_update_block_table = True
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        model = vllm_config.model_config
        self._decode_length = max_decode_query_len(vllm_config)
        self._ranges: torch.Tensor | None = None
        if model is not None and model.is_mm_prefix_lm:
            tokens = vllm_config.scheduler_config.max_num_batched_tokens
            self._ranges = torch.empty(2, tokens, dtype=torch.int32, device=device)
            self.supports_draft_decode_metadata_update = False  # the ranges of tokens are written by `build`

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashgenMetadata:
        batch = common_attn_metadata
        if isinstance(batch.causal, torch.Tensor):
            raise NotImplementedError("FLASHGEN: batches that mix causal and other requests: select FLASH_ATTN")
        # The bound holds for all batches that a graph replays, if vLLM captures one with this batch.
        # Where drafts are verified, vLLM may change the lengths of queries on the device, up to those of a decode step.
        longest = max(batch.max_query_len, self._decode_length)
        # In each step, because one of single tokens may replay a graph that was captured with ranges.
        ranges = None if self._ranges is None else self._update_ranges(batch)
        return FlashgenMetadata(
            num_actual_tokens=batch.num_actual_tokens,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table_tensor,
            slot_mapping=batch.slot_mapping,
            causal=batch.causal,
            is_single=longest == 1 and batch.num_actual_tokens == batch.num_reqs,
            is_short=longest <= MAX_DECODE_QUERIES,
            ranges=ranges if longest > 1 else None,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> FlashgenMetadata:
        # Launches do not depend on lengths. vLLM gives the longest here, which would only take time.
        common_attn_metadata.seq_lens.fill_(1)
        return self.build(0, common_attn_metadata)

    def update_block_table(
        self, metadata: FlashgenMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> FlashgenMetadata:
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)

    def update_draft_decode_metadata(self, metadata: FlashgenMetadata) -> None:
        """Does nothing: the metadata refers to arrays that vLLM updates."""

    def _update_ranges(self, batch: CommonAttentionMetadata) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the range of each token of the batch into the arrays of the builder, and returns these.

        vLLM gives ranges as positions of the first and the last token, both included, counted from the first token of
        the request; they do not overlap. Positions of queries follow from lengths on the device.
        """
        assert self._ranges is not None
        first, last = self._ranges[:, : batch.num_actual_tokens]
        first.fill_(_NO_RANGE[0])
        last.fill_(_NO_RANGE[1])
        ranges = {b: found for b, found in (batch.mm_req_doc_ranges or {}).items() if b < batch.num_reqs and found}
        if ranges:
            device = self._ranges.device
            table = _padded(ranges, batch.num_reqs).to(device, non_blocking=True)
            tokens = torch.arange(len(first), device=device, dtype=torch.int32)
            ends = batch.query_start_loc[1 : batch.num_reqs + 1]
            request = torch.searchsorted(ends, tokens, right=True).clamp_(max=batch.num_reqs - 1)
            position = tokens + (batch.seq_lens[: batch.num_reqs] - ends)[request]
            begin, end = table[request].unbind(-1)
            inside = (begin <= position[:, None]) & (position[:, None] <= end)
            torch.amin(begin.where(inside, _NO_RANGE[0]), 1, out=first)
            torch.amax(end.where(inside, _NO_RANGE[1]), 1, out=last)
        return first, last


def _padded(ranges: dict[int, list[tuple[int, int]]], requests: int) -> torch.Tensor:
    """Returns the ranges of each request as int32 (requests, most ranges, 2), filled up with ranges of nothing."""
    most = max(map(len, ranges.values()))
    table = torch.tensor(_NO_RANGE, dtype=torch.int32).repeat(requests, most, 1)
    for request, found in ranges.items():
        table[request, : len(found)] = torch.tensor(found, dtype=torch.int32)
    return table.pin_memory() if torch.cuda.is_available() else table
