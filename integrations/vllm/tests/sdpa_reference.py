"""The reference: attention of each request over its own keys, by torch's SDPA with an explicit mask, in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from batches import Made, Setup


def expected(setup: Setup, made: Made) -> torch.Tensor:
    """Returns the attention of the tokens of a batch; padding is 0."""
    out = torch.zeros(made.q.shape, dtype=torch.float64, device=made.q.device)
    begin = 0
    for b, count in enumerate(setup.queries):
        rows = slice(begin, begin + count)
        out[rows] = _of_request(setup, b, made.q[rows], made.keys[b], made.values[b])
        begin += count
    return out


def _of_request(setup: Setup, b: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    group = setup.heads // setup.heads_kv
    q, k, v = (each.double().transpose(0, 1) for each in (q, k, v))
    k, v = (each.repeat_interleave(group, 0) for each in (k, v))
    bias = torch.zeros(setup.heads, q.shape[1], k.shape[1], dtype=torch.float64, device=q.device)
    bias.masked_fill_(~_kept(setup, b, q.shape[1], k.shape[1], q.device), -torch.inf)
    if setup.layer.get("alibi_slopes"):
        slopes = torch.tensor(setup.layer["alibi_slopes"], dtype=torch.float64, device=q.device)
        bias += slopes[:, None, None] * torch.arange(k.shape[1], device=q.device)  # up to a constant of each row
    if setup.layer.get("sinks") is not None:  # a further key with this score, and no value
        sinks = setup.layer["sinks"].double()[:, None, None].expand(-1, q.shape[1], 1)
        k, v = (functional.pad(each, (0, 0, 0, 1)) for each in (k, v))
        bias = torch.cat([bias, sinks], -1)
    cap = setup.layer.get("logits_soft_cap")
    if cap:  # SDPA has no function of scores: they are its bias
        bias += cap * torch.tanh(q @ k.transpose(1, 2) * setup.dim**-0.5 / cap)
        q = torch.zeros_like(q)
    return functional.scaled_dot_product_attention(q, k, v, bias, scale=setup.dim**-0.5).transpose(0, 1)


def _kept(setup: Setup, b: int, queries: int, keys: int, device: Any) -> torch.Tensor:
    position = torch.arange(keys - queries, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)[None]
    kept = key <= position if setup.causal else torch.ones(queries, keys, dtype=torch.bool, device=device)
    window = setup.layer.get("sliding_window")
    if window:
        kept = kept & (position - key < window) & (key - position < window)
    for first, last in (setup.ranges or {}).get(b, []):
        within = (first <= position) & (position <= last) & (first <= key) & (key <= last)
        kept = kept | (within & (position - key < window) if setup.clamps_ranges and window else within)
    return kept
