"""Measures varlen batches of packed documents: `flashgen bench ragged`."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import sympy

from flashgen.attention import compile
from flashgen.bench.cases import Timed, counted_share, flops
from flashgen.bench.flash_attention4 import mask_options
from flashgen.bench.ours import ours
from flashgen.bench.torch_runs import differentiated, say_refusal
from flashgen.codegen.costs import WorkSizes
from flashgen.language.masks import causal
from flashgen.language.spec import AttentionSpec
from flashgen.runtime.timing import Run, medians_ms

HEADS = 16
SHAPES = ((16, 16384), (128, 16384), (64, 65536))
"""Batches as (documents, total tokens)."""
VARLEN_PEERS = ("FA4", "torch")
_UNEVEN_SEED = 0


@dataclass(frozen=True)
class VarlenRow:
    """A measured batch: median milliseconds and TFLOP/s by implementation; scores across documents are not counted.

    `target` is the architecture of the kernels of flashgen, `longest` the length of the longest document.
    """

    spec: str
    target: str
    timed: Timed
    documents: int
    tokens: int
    longest: int
    milliseconds: Mapping[str, float]
    tflops: Mapping[str, float]

    @property
    def name(self) -> str:
        return f"{self.documents} in {self.tokens}"

    @property
    def ratio(self) -> float | None:
        """The speed of flashgen relative to the fastest peer; None without peers."""
        peers = [time for name, time in self.milliseconds.items() if name != "flashgen"]
        return min(peers) / self.milliseconds["flashgen"] if peers else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"name": self.name, "ratio": self.ratio}


def lengths_of(documents: int, tokens: int, uneven: bool) -> list[int]:
    """Returns lengths that add up to `tokens`: equal up to rounding, or log-uniform from a fixed seed."""
    if uneven:
        weights = np.exp(np.random.default_rng(_UNEVEN_SEED).uniform(0, np.log(64), documents))
        ends = np.round(np.cumsum(weights) / weights.sum() * tokens).astype(int)
    else:
        ends = np.arange(1, documents + 1) * tokens // documents
    return [int(end - begin) for begin, end in pairwise([0, *ends])]


def varlen_flops(spec: AttentionSpec, lengths: Sequence[int], heads: int, timed: Timed) -> float:
    """Returns the FLOPs of all documents; a causal mask halves them, by the usual convention."""
    pairs = sum(length**2 for length in lengths)
    sizes = (len(lengths), heads, heads, max(lengths), max(lengths))
    return flops(spec, timed, WorkSizes(*sizes, pairs=pairs, visited=counted_share(spec)))


def varlen_rows(
    specs: Sequence[AttentionSpec],
    shapes: Sequence[tuple[int, int]] = SHAPES,
    heads: int = HEADS,
    peers: Sequence[str] = VARLEN_PEERS,
    timed: Timed = "forward",
    uneven: bool = False,
    target: str | None = None,
) -> Iterator[VarlenRow]:
    """Measures specs of layout "thd" on batches of torch tensors, including all preparation that a call needs.

    `target` is that of `flashgen.compile`.
    """
    for spec in specs:
        attention = compile(spec, target)
        for documents, tokens in shapes:
            lengths = lengths_of(documents, tokens, uneven)
            arrays, starts = _inputs(spec, lengths, heads)
            runs = {"flashgen": ours(attention, timed, arrays, {"cu_seqlens_q": starts, "max_seqlen_q": max(lengths),
                                                                "max_seqlen_k": max(lengths)})}  # fmt: skip
            others = {name: _peer(name, spec, timed, arrays, starts, max(lengths)) for name in peers}
            runs |= {name: run for name, run in others.items() if run is not None}
            times = medians_ms(runs)
            flops = varlen_flops(spec, lengths, heads, timed)
            tflops = {name: flops / time / 1e9 for name, time in times.items()}
            yield VarlenRow(spec.name, attention.target.name, timed, documents, tokens, max(lengths), times, tflops)


def _inputs(spec: AttentionSpec, lengths: Sequence[int], heads: int) -> tuple[tuple[Any, Any, Any, Any], Any]:
    """Returns random q, k, v and dO, and the cumulative lengths of the documents."""
    import torch

    torch.manual_seed(0)
    tokens, dtype = sum(lengths), getattr(torch, spec.dtype)
    dims = (spec.head_dim, spec.head_dim, spec.value_dim, spec.value_dim)
    q, k, v, d_out = (torch.randn((tokens, heads, dim), device="cuda", dtype=dtype) for dim in dims)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return (q, k, None if spec.shared_kv else v, d_out), torch.from_numpy(starts).cuda()


def _peer(
    name: str, spec: AttentionSpec, timed: Timed, arrays: tuple[Any, Any, Any, Any], starts: Any, longest: int
) -> Run | None:
    """Returns a run of a peer; None if it is not installed or does not support the spec."""
    forward = (_flash_attention4 if name == "FA4" else _torch)(spec, starts, longest)
    if forward is None or spec.shared_kv or spec.score or spec.dropout or spec.sink:
        return None
    try:
        return differentiated(forward, timed, arrays[:3], arrays[3])
    except Exception as error:  # the compiler of FlashAttention-4 raises error classes of its own
        say_refusal(error)
        return None


def _flash_attention4(spec: AttentionSpec, starts: Any, longest: int) -> Any:
    options = mask_options(spec, square=True)
    if options is None or importlib.util.find_spec("flash_attn") is None:
        return None
    try:
        function = importlib.import_module("flash_attn.cute.interface").flash_attn_varlen_func
    except (ImportError, AttributeError, OSError) as error:
        say_refusal(error)
        return None
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}

    def forward(q: Any, k: Any, v: Any) -> Any:
        found = function(q, k, v, softmax_scale=spec.scale, **lengths, **options)
        return found[0] if isinstance(found, tuple) else found

    return forward


def _torch(spec: AttentionSpec, starts: Any, longest: int) -> Any:
    """Returns torch.nn.attention.varlen, which uses FlashAttention-2 by default."""
    is_causal = spec.mask.expression == causal().expression
    if not is_causal and spec.mask.expression != sympy.true:
        return None
    try:
        function = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError) as error:
        say_refusal(error)
        return None
    window = {"window_size": (-1, 0)} if is_causal else {}

    def forward(q: Any, k: Any, v: Any) -> Any:
        return function(q, k, v, starts, starts, longest, longest, scale=spec.scale, **window)

    return forward
