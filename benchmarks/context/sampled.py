"""Compares sampled rows of a long sequence with float64: output, LSE and dQ of queries, dK and dV of keys.

Rows of outputs are recomputed in float64 from q, k and v. Gradients of keys need the LSE and the output of every row;
they use those of the call, whose sampled rows are compared as well.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from benchmarks.context.contending import Tensors, maximum_of_ranks, spec_of
from benchmarks.context.rows import Shape
from flashgen.torch.context_parallel import attention, positions, unshard

_ROWS = 8  # sampled per rank
_CHUNK = 65536  # queries per block of scores with the sampled keys


def errors(shape: Shape, tensors: Tensors, scheme: str) -> dict[str, float]:
    """Returns the maximum error of sampled rows by result, relative to the maximum magnitude of the reference.

    Samples are taken from the first and the last head.
    """
    q, k, v, d_out = tensors
    shards = shape.shards
    out, lse = attention(spec_of(shape), q, k, v, scheme=scheme, shards=shards, return_lse=True)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), d_out)
    own = positions(q.shape[2] * dist.get_world_size(), shards=shards, device=q.device)
    chosen = torch.linspace(0, q.shape[2] - 1, _ROWS, device=q.device).long()
    group = shape.heads_q // shape.heads_kv
    found: dict[str, float] = {}
    with torch.no_grad():
        for head in (0, shape.heads_q - 1):
            keys = [unshard(tensor[:, head // group], 1, shards=shards)[0].double() for tensor in (k, v)]
            queries = [q[0, head, chosen].double(), d_out[0, head, chosen].double()]
            wanted = _of_queries(shape, queries, keys, own[chosen])
            got = {"out": out[0, head, chosen], "lse": lse[0, head, chosen], "dq": dq[0, head, chosen]}
            _compare(found, got, wanted)
        for head in (0, shape.heads_kv - 1):
            heads = slice(head * group, (head + 1) * group)
            _compare(found, *_of_keys(shape, tensors, (out, lse, dk, dv), head, heads, shards, own, chosen))
    return {name: maximum_of_ranks(error) for name, error in found.items()}


def _seen(shape: Shape, of_q: Any, of_k: Any) -> Any:
    seen = of_k[None, :] <= of_q[:, None]
    return seen if shape.window is None else seen & (of_k[None, :] >= of_q[:, None] - shape.window)


def _of_queries(shape: Shape, queries: list[Any], keys: list[Any], places: Any) -> dict[str, Any]:
    (q, d_out), (k, v), scale = queries, keys, shape.head_dim**-0.5
    seen = _seen(shape, places, torch.arange(k.shape[0], device=k.device))
    scores = torch.where(seen, scale * q @ k.T, -torch.inf)
    lse = scores.logsumexp(1)
    weights = (scores - lse[:, None]).exp()
    out = weights @ v
    d_scores = weights * (d_out @ v.T - (d_out * out).sum(1, keepdim=True))
    return {"out": out, "lse": lse, "dq": scale * d_scores @ k}


def _of_keys(
    shape: Shape, tensors: Tensors, made: Any, head: int, heads: slice, shards: str, own: Any, chosen: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (computed, reference) gradients of the sampled keys of all ranks; ranks sum over their queries."""
    (q, k, v, d_out), (out, lse, dk, dv), scale = tensors, made, shape.head_dim**-0.5
    every = [_gathered(tensor[0, head, chosen]) for tensor in (k, v, dk, dv)]
    places = _gathered(own[chosen])
    k_rows, v_rows = every[0].double(), every[1].double()
    dk_rows, dv_rows = torch.zeros_like(k_rows), torch.zeros_like(v_rows)
    for each in range(heads.start, heads.stop):
        for first in range(0, q.shape[2], _CHUNK):
            rows = slice(first, first + _CHUNK)
            q_rows, d_rows, out_rows = (tensor[0, each, rows].double() for tensor in (q, d_out, out))
            weights = torch.where(
                _seen(shape, own[rows], places),
                (scale * q_rows @ k_rows.T - lse[0, each, rows, None].double()).exp(),
                0.0,
            )
            d_scores = weights * (d_rows @ v_rows.T - (d_rows * out_rows).sum(1, keepdim=True))
            dv_rows += weights.T @ d_rows
            dk_rows += scale * d_scores.T @ q_rows
    for total in (dk_rows, dv_rows):
        dist.all_reduce(total)
    return {"dk": every[2], "dv": every[3]}, {"dk": dk_rows, "dv": dv_rows}


def _gathered(rows: Any) -> Any:
    every = rows.new_empty((dist.get_world_size() * rows.shape[0], *rows.shape[1:]))
    dist.all_gather_into_tensor(every, rows.contiguous())
    return every


def _compare(found: dict[str, float], got: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, right in wanted.items():
        error = float((got[name].double() - right).abs().max() / right.abs().max())
        found[name] = max(found.get(name, 0.0), error)
