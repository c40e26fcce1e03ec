"""Peers of latent attention over pages of 64 keys, where V is a part of K: FlashMLA and FlashInfer."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import sympy

from flashgen.bench.cases import has_heads_first
from flashgen.bench.torch_runs import runs_or_none
from flashgen.language.masks import causal
from flashgen.language.spec import AttentionSpec
from flashgen.runtime.timing import Run

LATENT_PEERS = ("FlashMLA", "FlashInfer")
_MODULES = ("sgl_flash_mla", "flash_mla")  # of the packages sgl-flash-mla and FlashMLA
_WORKSPACE = 128 * 2**20  # bytes


def latent_peer(name: str, spec: AttentionSpec, q: Any, pages: Any, table: Any, lengths: Any) -> Run | None:
    """Returns a run of a peer of LATENT_PEERS; None if it is not installed or does not support the spec.

    Args:
        q: a tensor of shape (batch, heads, queries, head_dim).
        pages: a tensor of shape (pages, 64, 1, head_dim).
        table, lengths: int32 tensors of shapes (batch, pages of a sequence) and (batch,) on the GPU.
    """
    supported = spec.mask.expression in (sympy.true, causal().expression) and pages.shape[2] == 1
    if spec.score or spec.dropout or spec.sink or not (has_heads_first(spec) and supported):
        return None
    create = {"FlashMLA": _flash_mla, "FlashInfer": _flashinfer}[name]
    run = create(spec, q.transpose(1, 2).contiguous(), pages, table, lengths)
    return None if run is None else runs_or_none(run)


def _flash_mla(spec: AttentionSpec, q: Any, pages: Any, table: Any, lengths: Any) -> Run | None:
    """Returns a run of FlashMLA's dense decode. Its schedule is created in the first run, which is not timed."""
    found = next((name for name in _MODULES if importlib.util.find_spec(name)), None)
    if found is None:
        return None
    library = importlib.import_module(found)
    attention, plan = library.flash_mla_with_kvcache, library.get_mla_metadata
    options = {"softmax_scale": spec.scale, "causal": spec.mask.expression != sympy.true, **_legacy(attention)}
    schedule = _once(lambda: plan(lengths, q.shape[1] * q.shape[2], 1, **_legacy(plan)))
    return lambda: attention(q, pages, table, lengths, spec.value_dim, *schedule(), **options)


def _legacy(function: Callable[..., Any]) -> dict[str, bool]:
    """Returns the option under which functions of sgl-flash-mla have dense decode; FlashMLA has no such option."""
    return {"use_legacy": True} if "use_legacy" in inspect.signature(function).parameters else {}


def _flashinfer(spec: AttentionSpec, q: Any, pages: Any, table: Any, lengths: Any) -> Run | None:
    """Returns a run of FlashInfer's kernels for Hopper. Its plan is created in the first run, which is not timed."""
    if importlib.util.find_spec("flashinfer") is None:
        return None
    import torch

    library = importlib.import_module("flashinfer.mla")
    batch, queries, heads, _ = q.shape
    kv = pages.squeeze(2)
    rows = [part.contiguous() for part in q.flatten(0, 1).tensor_split([spec.value_dim], -1)]
    keys = [part.contiguous() for part in kv.tensor_split([spec.value_dim], -1)]
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    where = (starts * queries, starts * table.shape[1], table.flatten(), lengths)
    sizes = (heads, spec.value_dim, spec.head_dim - spec.value_dim, kv.shape[1])

    def create_wrapper() -> Any:
        workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=q.device)
        wrapper = library.BatchMLAPagedAttentionWrapper(workspace, backend="fa3")
        wrapper.plan(*where, *sizes, spec.mask.expression != sympy.true, spec.scale, q.dtype, kv.dtype)
        return wrapper

    wrapper = _once(create_wrapper)
    return lambda: wrapper().run(*rows, *keys)


def _once(create: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a function that creates a value at its first call and returns it at each call."""
    created: list[Any] = []

    def get() -> Any:
        if not created:
            created.append(create())
        return created[0]

    return get
