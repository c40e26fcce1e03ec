"""FlashInfer as a peer over pages. Its plan is created before the timing starts, as its users do."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np
import sympy

from flashgen.bench.torch_runs import runs_or_none
from flashgen.language.masks import causal
from flashgen.language.spec import AttentionSpec
from flashgen.runtime.timing import Run

_WORKSPACE = 256 * 2**20  # bytes


Table = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""FlashInfer's page table: offsets of sequences in the list of pages, the pages, and keys in each last page."""


def paged_attention(spec: AttentionSpec, queries: Sequence[Any], k: Any, v: Any, table: Table) -> Run | None:
    """Returns a run of FlashInfer; None if it is not installed or does not support the spec.

    Args:
        queries: arrays of shape (sequences, heads, tokens, dim).
        k, v: arrays of shape (pages, page_size, heads_kv, dim).
        table: the page table of all sequences.
    """
    supported = spec.mask.expression in (sympy.true, causal().expression)
    if spec.score or spec.dropout or spec.sink or not supported or spec.head_dim != spec.value_dim:
        return None
    if importlib.util.find_spec("flashinfer") is None:
        return None
    import torch

    library = importlib.import_module("flashinfer")
    workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device="cuda")
    types = {"q_data_type": getattr(torch, spec.dtype), "kv_data_type": getattr(torch, spec.dtype)}
    _, heads, _, dim = queries[0].shape
    rows = torch.cat([q.transpose(1, 2).reshape(-1, heads, dim) for q in queries])
    tokens = [q.shape[2] for q in queries for _ in range(q.shape[0])]
    where, sizes = [_i32(each) for each in table], (heads, k.shape[2], dim, k.shape[1])

    def create_wrapper() -> Any:
        if max(tokens) == 1:
            wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
            wrapper.plan(*where, *sizes, sm_scale=spec.scale, **types)
            return wrapper
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        begins, is_causal = _i32([0, *np.cumsum(tokens)]), spec.mask.expression != sympy.true
        wrapper.plan(begins, *where, *sizes, causal=is_causal, sm_scale=spec.scale, **types)
        return wrapper

    wrappers: list[Any] = []  # filled by the first run, which is not timed

    def run() -> Any:
        if not wrappers:
            wrappers.append(create_wrapper())
        return wrappers[0].run(rows, (k, v))

    return runs_or_none(run)


def _i32(array: Any) -> Any:
    import torch

    return torch.from_numpy(np.asarray(array, np.int32)).cuda()
