"""The attention of a step: flashgen over pages, and torch's SDPA over a slot for each sequence."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

import flashgen as fg
import flashgen.torch
from serving.llama import Llama
from serving.state import Chunk, Mixture, State


class Attention(Protocol):
    """The interface of the loop: q (tokens, heads, dim), k and v (tokens, heads_kv, dim). Calls cache k and v."""

    def decode(self, layer: int, q: Any, k: Any, v: Any, state: State, reach: int) -> Any:
        """Attends for one token of every slot, including idle ones."""

    def prefill(self, layer: int, q: Any, k: Any, v: Any, chunk: Chunk) -> Any:
        """Attends for consecutive tokens of one prompt."""

    def mixed(self, layer: int, q: Any, k: Any, v: Any, state: State, chunk: Chunk, step: Mixture, reach: int) -> Any:
        """Attends for one token of every slot, followed by tokens of a prompt."""

    def reach(self, longest: int) -> int:
        """Returns the number of keys that a decode step covers; one step is captured for each value."""

    def share(self, count: int, source: int, slot: int) -> None:
        """Lets the sequence in `slot` begin with the first `count` tokens of slot `source`."""


class Paged:
    """flashgen over pages; the kernels read tables and lengths on the device."""

    def __init__(self, model: Llama, pages: int, page_size: int, emulate: bool) -> None:
        size = model.size
        shape = (size.layers, pages, 2, page_size, size.heads_kv, size.dim)
        self._cache = torch.zeros(shape, dtype=model.dtype, device=model.device)
        dtype = str(model.dtype).removeprefix("torch.")
        self._spec = fg.AttentionSpec(size.dim, dtype, layout="bshd", mask=fg.causal(), page_size=page_size)
        self._packed = fg.AttentionSpec(size.dim, dtype, layout="thd", mask=fg.causal(), page_size=page_size)
        self._emulate = emulate

    def decode(self, layer: int, q: Any, k: Any, v: Any, state: State, reach: int) -> Any:
        return self._attend(layer, q[:, None], k[:, None], v[:, None], state.table, state.lengths, state.after)[:, 0]

    def prefill(self, layer: int, q: Any, k: Any, v: Any, chunk: Chunk) -> Any:
        return self._attend(layer, q[None], k[None], v[None], chunk.table, chunk.before, chunk.after)[0]

    def mixed(self, layer: int, q: Any, k: Any, v: Any, state: State, chunk: Chunk, step: Mixture, reach: int) -> Any:
        keys, values = self._cache[layer, :, 0], self._cache[layer, :, 1]
        slots = {"page_table": step.tables, "seqused_k": step.positions, "emulate": self._emulate}
        flashgen.torch.append_kv(k[:, None], v[:, None], keys, values, **slots)
        pages = {"cu_seqlens_q": step.begins, "page_table": step.table, "seqused_k": step.after}
        return flashgen.torch.attention(self._packed, q, keys, values, emulate=self._emulate, **pages)

    def _attend(self, layer: int, q: Any, k_new: Any, v_new: Any, table: Any, before: Any, after: Any) -> Any:
        k, v = self._cache[layer, :, 0], self._cache[layer, :, 1]
        options = {"page_table": table, "emulate": self._emulate}
        flashgen.torch.append_kv(k_new, v_new, k, v, seqused_k=before, **options)
        return flashgen.torch.attention(self._spec, q, k, v, seqused_k=after, **options)

    def reach(self, longest: int) -> int:
        return 0  # one captured step serves all lengths, which it reads on the device

    def share(self, count: int, source: int, slot: int) -> None:
        pass  # the page table already refers to the shared pages


class Dense:
    """torch's SDPA over keys (slots, heads_kv, length, dim) with a mask of lengths; query heads of a group are rows."""

    def __init__(self, model: Llama, slots: int, longest: int) -> None:
        size = model.size
        self._longest, self._group = longest, size.heads // size.heads_kv
        shape = (size.layers, 2, slots, size.heads_kv, longest + 8, size.dim)  # idle slots write to the last rows
        self._cache = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self._slots = torch.arange(slots, device=model.device)
        self._positions = torch.arange(longest, device=model.device)

    def decode(self, layer: int, q: Any, k: Any, v: Any, state: State, reach: int) -> Any:
        keys, values = self._cache[layer]
        row = torch.where(state.active > 0, state.lengths, self._longest)
        keys[self._slots, :, row], values[self._slots, :, row] = k, v
        visible = (self._positions[:reach] < state.after[:, None])[:, None, None]
        rows = q.view(q.shape[0], keys.shape[1], self._group, -1)
        mask = visible.expand(-1, 1, self._group, -1)
        out = functional.scaled_dot_product_attention(rows, keys[:, :, :reach], values[:, :, :reach], mask)
        return out.reshape(q.shape)

    def prefill(self, layer: int, q: Any, k: Any, v: Any, chunk: Chunk) -> Any:
        keys, values = (cache[chunk.slot] for cache in self._cache[layer])
        keys[:, chunk.begin : chunk.end], values[:, chunk.begin : chunk.end] = k.transpose(0, 1), v.transpose(0, 1)
        mask = causal_lower_right(chunk.end - chunk.begin, chunk.end)
        rows = (q.transpose(0, 1)[None], keys[None, :, : chunk.end], values[None, :, : chunk.end])
        return functional.scaled_dot_product_attention(*rows, mask, enable_gqa=True)[0].transpose(0, 1)

    def mixed(self, layer: int, q: Any, k: Any, v: Any, state: State, chunk: Chunk, step: Mixture, reach: int) -> Any:
        slots = len(self._slots)
        decoded = self.decode(layer, q[:slots], k[:slots], v[:slots], state, reach)
        return torch.cat((decoded, self.prefill(layer, q[slots:], k[slots:], v[slots:], chunk)))

    def reach(self, longest: int) -> int:
        return min(max(256, 1 << (longest - 1).bit_length()), self._longest)

    def share(self, count: int, source: int, slot: int) -> None:
        self._cache[:, :, slot, :, :count] = self._cache[:, :, source, :, :count]


def plain(layer: int, q: Any, k: Any, v: Any) -> Any:
    """Causal attention over the given tokens, without a cache."""
    heads = (x.transpose(0, 1)[None] for x in (q, k, v))
    return functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
