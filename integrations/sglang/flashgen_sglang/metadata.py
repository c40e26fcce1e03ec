"""What all layers of a step share: the pages, lengths and offsets of its sequences, computed on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flashgen import MAX_DECODE_QUERIES


@dataclass
class StepMetadata:
    """The arguments of one step.

    Attributes:
        page_table: int32 (sequences, pages), the page of each page_size keys of each sequence.
        cache_seqlens_int32: the number of keys of each sequence, with those that the step adds.
        cu_seqlens_q: where the queries of each sequence begin, int32 (sequences + 1,). None if each sequence has one.
        max_seqlen_q: an upper bound for the queries of a sequence, or None if they may be many.
        window_page_table: as page_table, for layers whose keys are in the pool of the sliding windows.
        window_slots: where these layers write the keys of the step.
    """

    page_table: torch.Tensor
    cache_seqlens_int32: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    window_page_table: torch.Tensor | None = None
    window_slots: torch.Tensor | None = None


class MetadataBuilder:
    """Computes `StepMetadata` from a batch of SGLang, without synchronisation and with sizes that the host knows.

    Args:
        req_to_token: int32 (requests, longest context), the slot of each token of each request.
        page_size: slots of a page, a power of 2. The tokens of a page have consecutive slots.
        longest: the largest number of keys of a sequence.
        to_window: maps slots to those of the pool of the sliding windows. None if there is no such pool.
    """

    def __init__(
        self,
        req_to_token: torch.Tensor,
        page_size: int,
        longest: int,
        to_window: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._to_window = to_window
        self._first_slots = req_to_token[:, :longest:page_size]  # of each page
        self._device = req_to_token.device
        self._shift = page_size.bit_length() - 1

    def allocate(self, sequences: int) -> StepMetadata:
        """Returns metadata for this number of sequences of one query each, in memory that is not initialised."""
        pages = self._first_slots.shape[1]
        options: dict[str, Any] = {"dtype": torch.int32, "device": self._device}
        return StepMetadata(
            torch.empty(sequences, pages, **options),
            torch.empty(sequences, **options),
            window_page_table=None if self._to_window is None else torch.empty(sequences, pages, **options),
        )

    def fill(self, step: StepMetadata, batch: Any) -> None:
        """Writes the pages and lengths of a batch. A CUDA graph may contain it."""
        sequences = step.page_table.shape[0]
        torch.index_select(self._first_slots, 0, batch.req_pool_indices[:sequences], out=step.page_table)
        if step.window_page_table is not None and self._to_window is not None:
            step.window_page_table.copy_(self._to_window(step.page_table)).bitwise_right_shift_(self._shift)
            step.window_slots = None if batch.out_cache_loc is None else self._to_window(batch.out_cache_loc)
        if self._shift:
            step.page_table.bitwise_right_shift_(self._shift)
        step.cache_seqlens_int32.copy_(batch.seq_lens[:sequences])

    def build(self, batch: Any, extends: bool) -> StepMetadata:
        """Returns the metadata of a batch outside of CUDA graphs. extends: whether sequences have several queries."""
        step = self.allocate(batch.batch_size)
        self.fill(step, batch)
        if extends:
            step.cu_seqlens_q = torch.zeros(batch.batch_size + 1, dtype=torch.int32, device=self._device)
            torch.cumsum(batch.extend_seq_lens, 0, dtype=torch.int32, out=step.cu_seqlens_q[1:])
            counts = batch.extend_seq_lens_cpu
            if counts is not None and max(map(int, counts), default=0) <= MAX_DECODE_QUERIES:
                step.max_seqlen_q = MAX_DECODE_QUERIES
        return step


def rows_of(step: StepMetadata, sequences: int) -> StepMetadata:
    """Returns metadata of the first sequences of a larger one, in the same memory."""
    window = step.window_page_table
    return StepMetadata(
        step.page_table[:sequences],
        step.cache_seqlens_int32[:sequences],
        window_page_table=None if window is None else window[:sequences],
    )
