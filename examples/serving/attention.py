"""The attention of a step: over pages by flashgen, and over a slot for each sequence by torch's SDPA."""

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
    """What the loop asks: q (tokens, heads, dim), k, v (tokens, heads_kv, dim) of a layer; both calls keep k and v."""

    def decode(self, layer: int, q: Any, k: Any, v: Any, state: State, reach: int) -> Any:
        """One token of every slot, those of idle ones among them."""

    def prefill(self, layer: int, q: Any, k: Any, v: Any, chunk: Chunk) -> Any:
        """Consecutive tokens of one prompt."""

    def mixed(self, layer: int, q: Any, k: Any, v: Any, state: State, chunk: Chunk, step: Mixture, reach: int) -> Any:
        """Both: one token of every slot, and behind them those of the prompt."""

    def reach(self, longest: int) -> int:
        """How far a decode step looks where the longest sequence has so many keys: a captured step is kept for each."""

    def share(self, count: int, source: int, slot: int) -> None:
        """A sequence begins with so many tokens of the one in slot `source`."""


class Paged:
    """flashgen: keys in pages, of which the kernels read tables and lengths on the device."""

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
        places = {"page_table": step.tables, "seqused_k": step.places, "emulate": self._emulate}
        flashgen.torch.append_kv(k[:, None], v[:, None], keys, values, **places)
        where = {"cu_seqlens_q": step.begins, "page_table": step.table, "seqused_k": step.after}
        return flashgen.torch.attention(self._packed, q, keys, values, emulate=self._emulate, **where)

    def _attend(self, layer: int, q: Any, k_new: Any, v_new: Any, table: Any, before: Any, after: Any) -> Any:
        k, v = self._cache[layer, :, 0], self._cache[layer, :, 1]
        how = {"page_table": table, "emulate": self._emulate}
        flashgen.torch.append_kv(k_new, v_new, k, v, seqused_k=before, **how)
        return flashgen.torch.attention(self._spec, q, k, v, seqused_k=after, **how)

    def reach(self, longest: int) -> int:
        return 0  # one step for all lengths: they are read when it runs

    def share(self, count: int, source: int, slot: int) -> None:
        pass  # the table says it


class Dense:
    """torch's SDPA: keys (slots, heads_kv, length, dim), a mask of lengths; query heads of a group are its rows."""

    def __init__(self, model: Llama, slots: int, longest: int) -> None:
        size = model.size
        self._longest, self._group = longest, size.heads // size.heads_kv
        shape = (size.layers, 2, slots, size.heads_kv, longest + 8, size.dim)  # what idle slots write goes behind
        self._cache = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self._slots = torch.arange(slots, device=model.device)
        self._positions = torch.arange(longest, device=model.device)

    def decode(self, layer: int, q: Any, k: Any, v: Any, state: State, reach: int) -> Any:
        keys, values = self._cache[layer]
        place = torch.where(state.active > 0, state.lengths, self._longest)
        keys[self._slots, :, place], values[self._slots, :, place] = k, v
        seen = (self._positions[:reach] < state.after[:, None])[:, None, None]
        rows = q.view(q.shape[0], keys.shape[1], self._group, -1)
        masked = seen.expand(-1, 1, self._group, -1)
        out = functional.scaled_dot_product_attention(rows, keys[:, :, :reach], values[:, :, :reach], masked)
        return out.reshape(q.shape)

    def prefill(self, layer: int, q: Any, k: Any, v: Any, chunk: Chunk) -> Any:
        keys, values = (cache[chunk.slot] for cache in self._cache[layer])
        keys[:, chunk.begin : chunk.end], values[:, chunk.begin : chunk.end] = k.transpose(0, 1), v.transpose(0, 1)
        ends_meet = causal_lower_right(chunk.end - chunk.begin, chunk.end)
        rows = (q.transpose(0, 1)[None], keys[None, :, : chunk.end], values[None, :, : chunk.end])
        return functional.scaled_dot_product_attention(*rows, ends_meet, enable_gqa=True)[0].transpose(0, 1)

    def mixed(self, layer: int, q: Any, k: Any, v: Any, state: State, chunk: Chunk, step: Mixture, reach: int) -> Any:
        own = len(self._slots)
        made = self.decode(layer, q[:own], k[:own], v[:own], state, reach)
        return torch.cat((made, self.prefill(layer, q[own:], k[own:], v[own:], chunk)))

    def reach(self, longest: int) -> int:
        return min(max(256, 1 << (longest - 1).bit_length()), self._longest)

    def share(self, count: int, source: int, slot: int) -> None:
        self._cache[:, :, slot, :, :count] = self._cache[:, :, source, :, :count]


def plain(layer: int, q: Any, k: Any, v: Any) -> Any:
    """Causal attention over the tokens at hand, without a cache."""
    heads = (x.transpose(0, 1)[None] for x in (q, k, v))
    return functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
