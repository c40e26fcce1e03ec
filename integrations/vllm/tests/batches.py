"""Batches as vLLM gives them to a backend: packed tokens, a filled cache, and `CommonAttentionMetadata`."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from flashgen_vllm.backend import FlashgenBackend
from flashgen_vllm.kv_cache import FLOAT8

ORDERS = {"heads of a token": (0, 2, 1, 3), "tokens of a head": (0, 1, 2, 3), "blocks of a head": (1, 0, 2, 3)}
"""Orders in memory of the axes (blocks, heads_kv, block_size, content): vLLM's layouts LBNHC, LBHNC and LHBNC."""


@dataclass
class Setup:
    """A layer and a batch. `queries` and `keys` have a number for each request; `padding` adds empty requests."""

    queries: list[int]
    keys: list[int]
    heads: int = 4
    heads_kv: int = 2
    dim: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.float16
    order: str = "heads of a token"
    cache_dtype: str = "auto"
    scales: tuple[Any, Any] = (1.0, 1.0)
    padding: int = 0
    causal: bool = True
    ranges: dict[int, list[tuple[int, int]]] | None = None
    clamps_ranges: bool = False
    speculative: int = 0
    layer: dict[str, Any] = field(default_factory=dict)  # further arguments of the implementation

    @property
    def tokens(self) -> int:
        return sum(self.queries)


@dataclass
class Made:
    """The arrays of a setup: q, k_new and v_new are packed tokens; keys and values are those of each request."""

    q: torch.Tensor
    k_new: torch.Tensor
    v_new: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    cache: torch.Tensor
    common: CommonAttentionMetadata
    layer: Any


def make(setup: Setup, device: torch.device) -> Made:
    """Returns random arrays. The cache holds the keys before those of the batch, and NaN where nothing was written."""
    options: Any = {"dtype": setup.dtype, "device": device}
    keys, values = (
        [torch.randn(length, setup.heads_kv, setup.dim, **options) for length in setup.keys] for _ in range(2)
    )
    extra = setup.padding
    used = [-(-length // setup.block_size) for length in setup.keys]
    table = torch.full((len(used) + extra, max(used) + 1), 0, dtype=torch.int32)  # 0 is vLLM's block of nothing
    blocks = iter((torch.randperm(sum(used)) + 1).tolist())
    for b, count in enumerate(used):
        table[b, :count] = torch.tensor([next(blocks) for _ in range(count)])
    starts = torch.tensor([0, *setup.queries] + [0] * extra).cumsum(0).int()
    slots = [_slots(setup, table, b, range(setup.keys[b] - n, setup.keys[b])) for b, n in enumerate(setup.queries)]
    lengths = torch.tensor(setup.keys + [0] * extra, dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=lengths.to(device),
        num_reqs=len(lengths),
        num_actual_tokens=setup.tokens + (extra if max(setup.queries) == 1 else 0),
        max_query_len=max(setup.queries),
        max_seq_len=max(setup.keys),
        block_table_tensor=table.to(device),
        slot_mapping=torch.cat([*slots, torch.full((extra,), -1)]).to(device),
        causal=setup.causal,
        mm_req_doc_ranges=setup.ranges,
    )
    scales = [torch.as_tensor(scale, dtype=torch.float32, device=device) for scale in setup.scales]
    layer = SimpleNamespace(_k_scale=scales[0], _v_scale=scales[1], mm_prefix_clamp_sliding_window=setup.clamps_ranges)
    made = Made(
        *_new_tokens(setup, keys, values, options), keys, values, _cache(setup, sum(used) + 1, device), common, layer
    )
    _fill(setup, made, table.to(device))
    return made


def run(setup: Setup, made: Made) -> torch.Tensor:
    """Returns the output of the backend, through vLLM's interface: the builder, the update of the cache, `forward`."""
    builder, impl = built(setup, made.q.device)
    metadata = builder.build(0, made.common)
    output = torch.full_like(made.q, torch.nan)
    impl.do_kv_cache_update(made.layer, made.k_new, made.v_new, made.cache, metadata.slot_mapping)
    result = impl.forward(made.layer, made.q, made.k_new, made.v_new, made.cache, metadata, output)
    assert result is output
    return output


def built(setup: Setup, device: torch.device) -> tuple[Any, Any]:
    """Returns a metadata builder and an implementation of the backend."""
    speculative = SimpleNamespace(num_speculative_tokens=setup.speculative, parallel_drafting=False)
    config = SimpleNamespace(
        model_config=SimpleNamespace(is_mm_prefix_lm=setup.ranges is not None),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=512),
        speculative_config=speculative if setup.speculative else None,
    )
    spec = SimpleNamespace(block_size=setup.block_size)
    builder = FlashgenBackend.get_builder_cls()(spec, ["layer"], config, device)
    sizes = (setup.heads, setup.dim, setup.dim**-0.5, setup.heads_kv)
    impl = FlashgenBackend.get_impl_cls()(*sizes, kv_cache_dtype=setup.cache_dtype, **setup.layer)
    return builder, impl


def _new_tokens(setup: Setup, keys: Any, values: Any, options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns q, and the last keys and values of each request, as slices of one array, with rows of padding."""
    rows = setup.tokens + setup.padding
    packed = torch.randn(rows, setup.heads + 2 * setup.heads_kv, setup.dim, **options)
    q, k, v = packed.split([setup.heads, setup.heads_kv, setup.heads_kv], dim=1)
    for new, whole in ((k, keys), (v, values)):
        new[: setup.tokens] = torch.cat([each[len(each) - n :] for each, n in zip(whole, setup.queries, strict=True)])
    return q, k, v


def _slots(setup: Setup, table: torch.Tensor, b: int, positions: range) -> torch.Tensor:
    position = torch.tensor(positions, dtype=torch.int64, device=table.device)
    return table[b, position // setup.block_size].long() * setup.block_size + position % setup.block_size


def _cache(setup: Setup, blocks: int, device: torch.device) -> torch.Tensor:
    """Returns vLLM's logical view of a cache with another order in memory; float8 is stored as bytes."""
    shape = (blocks, setup.heads_kv, setup.block_size, 2 * setup.dim)
    order = ORDERS[setup.order]
    stored = torch.empty([shape[axis] for axis in order], dtype=setup.dtype, device=device)
    stored = stored.fill_(torch.nan) if setup.cache_dtype not in FLOAT8 else stored.fill_(0).to(torch.uint8) | 0x7F
    return stored.permute([order.index(axis) for axis in range(4)])


def _fill(setup: Setup, made: Made, table: torch.Tensor) -> None:
    """Writes the keys and values of tokens before the batch, and replaces those of requests by what was stored."""
    for b, (count, new) in enumerate(zip(setup.keys, setup.queries, strict=True)):
        slots = _slots(setup, table, b, range(count))
        page, row = slots // setup.block_size, slots % setup.block_size
        for side, (rows, scale) in enumerate(((made.keys, made.layer._k_scale), (made.values, made.layer._v_scale))):
            stored, rows[b] = _stored(rows[b], scale, setup)
            old = count - new
            columns = slice(side * setup.dim, (side + 1) * setup.dim)
            made.cache[page[:old], :, row[:old], columns] = stored[:old]


def _stored(rows: torch.Tensor, scale: torch.Tensor, setup: Setup) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows as the cache stores them, and the values that these stand for."""
    if setup.cache_dtype not in FLOAT8:
        return rows, rows
    factor = scale.reshape(-1, 1)
    narrow = (rows.float() / factor).to(FLOAT8[setup.cache_dtype])
    return narrow.view(torch.uint8), narrow.float() * factor
