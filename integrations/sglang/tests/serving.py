"""A layer in SGLang's classes, which serves a few sequences step by step, and what it must compute."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import sglang.test.kits.attention_unittest.attention_methods.dense_attention as kit
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

import flashgen_sglang

flashgen_sglang.register()


@dataclasses.dataclass(frozen=True)
class Layer:
    """What a layer and its pool are.

    window: the keys before the query's own. scales: of k and v in float8. longest: the most keys of a sequence.
    """

    page_size: int = 16
    dtype: torch.dtype = torch.float16
    heads: int = 4
    heads_kv: int = 2
    dim: int = 32
    window: int | None = None
    cap: float = 0.0
    sinks: torch.dtype | None = None
    scales: tuple[float | None, float | None] | None = None
    in_window_pool: bool = False
    longest: int = 256
    backend: str = flashgen_sglang.NAME


class Server:
    """Sequences of a layer. Each step adds tokens to some of them, and returns their attention and what it must be."""

    def __init__(self, layer: Layer, sequences: int, device: str) -> None:
        self.layer, self.device = layer, device
        self._random = torch.Generator(device).manual_seed(0)
        self.runner = runner_of(layer, sequences, device)
        self.backend = kit.ATTENTION_BACKENDS[layer.backend](self.runner)
        self.module = module_of(layer, device)
        self.sinks = None if layer.sinks is None else self._draw(layer.heads).to(layer.sinks)
        self._cached: list[list[torch.Tensor]] = [[] for _ in range(sequences)]  # the k and v of each token
        table = self.runner.req_to_token_pool.req_to_token
        self._place(table)

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._random, device=self.device, dtype=torch.float32)

    def _place(self, table: torch.Tensor) -> None:
        """Gives each sequence pages in a random order. Page 0 belongs to no sequence."""
        size, longest, sequences = self.layer.page_size, self.layer.longest, len(self._cached)
        pages = list(range(1, 1 + sequences * longest // size))
        random.Random(0).shuffle(pages)
        of_sequences = torch.tensor(pages, dtype=torch.int32).view(sequences, -1, 1)
        slots = of_sequences * size + torch.arange(size, dtype=torch.int32)
        table[:sequences, :longest] = slots.view(sequences, -1).to(self.device)

    def batch(self, which: list[int], counts: list[int], mode: ForwardMode) -> Any:
        """Returns SGLang's batch of a step, in which the sequences `which` get `counts` tokens."""
        before = [len(self._cached[i]) for i in which]
        after = [n + count for n, count in zip(before, counts, strict=True)]
        table, ints = self.runner.req_to_token_pool.req_to_token, {"dtype": torch.int64, "device": self.device}
        slots = [table[i, a:b] for i, a, b in zip(which, before, after, strict=True)]
        positions = [torch.arange(a, b, **ints) for a, b in zip(before, after, strict=True)]
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(which),
            input_ids=torch.zeros(sum(counts), **ints),
            req_pool_indices=torch.tensor(which, **ints),
            seq_lens=torch.tensor(after, **ints),
            seq_lens_cpu=None,
            out_cache_loc=torch.cat(slots).to(torch.int64),
            seq_lens_sum=None,
            positions=torch.cat(positions),
        )
        self.runner.kv_index_translator.bind_own_plan(batch)
        if not mode.is_decode():
            batch.extend_seq_lens = torch.tensor(counts, dtype=torch.int32, device=self.device)
            batch.extend_seq_lens_cpu = counts
        return batch

    def inputs(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draws q, k and v of new tokens, side by side as the projection of a model returns them."""
        layer = self.layer
        widths = [heads * layer.dim for heads in (layer.heads, layer.heads_kv, layer.heads_kv)]
        q, k, v = self._draw(tokens, sum(widths)).to(layer.dtype).split(widths, dim=-1)
        return q, k, v

    def remember(self, which: list[int], counts: list[int], k: torch.Tensor, v: torch.Tensor) -> None:
        """Notes the keys and values that a step adds to the sequences."""
        added = torch.stack((k.clone(), v.clone()), dim=1).unflatten(-1, (self.layer.heads_kv, -1)).split(counts)
        for i, tokens in zip(which, added, strict=True):
            self._cached[i] += list(tokens)

    def run(self, batch: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Runs the layer, as a model does, on copies of k and v: the pool divides them in place by their scales."""
        options = {} if self.sinks is None else {"sinks": self.sinks}
        with forward_context(ForwardContext(attn_backend=self.backend)):
            return self.module(q, k.clone(), v.clone(), batch, **options)

    def step(self, which: list[int], counts: list[int], mode: ForwardMode) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Returns the attention of a step without a graph, its reference, and the largest error that is allowed."""
        batch, (q, k, v) = self.batch(which, counts, mode), self.inputs(sum(counts))
        self.backend.init_forward_metadata(batch)
        out = self.run(batch, q, k, v)
        self.remember(which, counts, k, v)
        return out, *self.expected(which, counts, q)

    def expected(self, which: list[int], counts: list[int], q: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Returns the attention of the last tokens of sequences in float64, and twice the error of it in 16 bits."""
        queries = q.unflatten(-1, (self.layer.heads, -1)).split(counts)
        pairs = [(rows, torch.stack(self._cached[i])) for i, rows in zip(which, queries, strict=True)]
        ref = torch.cat([self._attend(rows, tokens, torch.float64) for rows, tokens in pairs])
        low = torch.cat([self._attend(rows, tokens, self.layer.dtype) for rows, tokens in pairs])
        return ref, float(2 * (low.double() - ref).abs().max() + 1e-5)

    def _attend(self, rows: torch.Tensor, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Standard attention of rows (queries, heads, dim) over tokens (keys, 2, heads_kv, dim)."""
        layer = self.layer
        if layer.scales is not None:
            scales = torch.tensor([scale or 1.0 for scale in layer.scales], device=self.device)
            # The pool divides by tensors without axes, which a GPU rounds to the type of the tokens first.
            divided = [part.clone().div_(scale) for part, scale in zip(tokens.unbind(1), scales, strict=True)]
            stored = torch.stack(divided, dim=1).to(torch.float8_e4m3fn)
            tokens = (stored.double() * scales[:, None, None]).to(dtype)
        k, v = tokens.to(dtype).repeat_interleave(layer.heads // layer.heads_kv, dim=2).unbind(1)
        scores = torch.einsum("qhd,khd->hqk", rows.to(dtype), k) * layer.dim**-0.5
        if layer.cap:
            scores = layer.cap * torch.tanh(scores / layer.cap)
        last = torch.arange(len(k) - len(rows), len(k), device=self.device)[:, None]
        keys = torch.arange(len(k), device=self.device)
        visible = keys <= last
        if layer.window is not None:
            visible &= keys >= last - layer.window
        scores = scores.masked_fill(~visible, float("-inf"))
        if self.sinks is not None:
            extra = self.sinks.to(dtype)[:, None, None].expand(-1, len(rows), 1)
            scores = torch.cat((scores, extra), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : len(k)]
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def runner_of(layer: Layer, sequences: int, device: str) -> Any:
    """Returns the kit's stand-in for a model runner, with the pool of a layer."""
    case = kit.DenseAttentionCase(
        name="served",
        backend=layer.backend,
        forward_mode=ForwardMode.EXTEND,
        num_heads=layer.heads,
        num_kv_heads=layer.heads_kv,
        page_size=layer.page_size,
        prefix_lens=(0,) * sequences,
        extend_lens=(1,) * sequences,
        sliding_window_size=layer.window,
    )
    config = kit.TinyModelConfig(
        num_heads=layer.heads,
        num_kv_heads=layer.heads_kv,
        head_dim=layer.dim,
        hidden_size=64,
        context_len=layer.longest,
        sliding_window_size=layer.window,
    )
    runner = kit.MockModelRunner(
        case=case,
        model_config=config,
        dtype=layer.dtype,
        device=device,
        max_context_len=layer.longest,
        head_dim=layer.dim,
    )
    runner.kv_cache_dtype = layer.dtype if layer.scales is None else torch.float8_e4m3fn
    runner.token_to_kv_pool = pool_of(layer, sequences * layer.longest, runner.kv_cache_dtype, device)
    runner.init_kv_index_translator()
    return runner


def pool_of(layer: Layer, tokens: int, dtype: torch.dtype, device: str) -> Any:
    """Returns a pool of one layer. In that of the sliding windows, pages are in reverse order."""
    options = {
        "page_size": layer.page_size,
        "dtype": dtype,
        "head_num": layer.heads_kv,
        "head_dim": layer.dim,
        "device": device,
        "enable_memory_saver": False,
    }
    if not layer.in_window_pool:
        return MHATokenToKVPool(size=tokens, layer_num=1, enable_alt_stream=False, **options)
    ids = {"swa_attention_layer_ids": [0], "full_attention_layer_ids": [1]}
    pool = SWAKVPool(size=tokens, size_swa=tokens, **ids, **options)
    pages = torch.arange(tokens // layer.page_size, -1, -1, device=device)[:, None] * layer.page_size
    slots = (pages + torch.arange(layer.page_size, device=device)).flatten()
    pool.register_mapping(torch.cat((slots, slots.new_tensor([-1]))))
    return pool


def module_of(layer: Layer, device: str) -> RadixAttention:
    module = RadixAttention(
        layer.heads,
        layer.dim,
        layer.dim**-0.5,
        layer.heads_kv,
        layer_id=0,
        logit_cap=layer.cap,
        sliding_window_size=-1 if layer.window is None else layer.window,
    )
    if layer.scales is not None:
        module.k_scale, module.v_scale = (
            None if scale is None else torch.nn.Parameter(torch.tensor(scale, device=device), requires_grad=False)
            for scale in layer.scales
        )
    return module
