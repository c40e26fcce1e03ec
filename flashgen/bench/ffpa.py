"""FFPA as a peer: kernels for heads of more than 256 columns, from the optional package ffpa-attn."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import sympy

from flashgen.bench.cases import Arrays, Timed, has_heads_first
from flashgen.bench.torch_runs import differentiated, say_refusal
from flashgen.language.masks import causal
from flashgen.language.spec import AttentionSpec
from flashgen.runtime.timing import Run

NARROWEST = 264  # columns; FFPA computes narrower heads by torch's SDPA


def ffpa(spec: AttentionSpec, timed: Timed, arrays: Arrays) -> Run | None:
    """Returns a run of the kernels of FFPA in CuTe DSL; None if it is not installed or does not support the spec.

    Its causal masks align to the bottom right, like the default of flashgen. The first run compiles for seconds.
    """
    plain = spec.mask.expression == sympy.true
    if not plain and spec.mask.expression != causal().expression:
        return None
    if spec.score or spec.dropout or spec.sink or not has_heads_first(spec) or spec.head_dim < NARROWEST:
        return None
    attention = _attention()
    if attention is None:
        return None
    q, k, v, d_out = arrays
    options = {"is_causal": not plain, "scale": spec.scale, "enable_gqa": q.shape[1] != k.shape[1]}

    def forward(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, backend="cutedsl", **options)

    try:
        return differentiated(forward, timed, (q, k, v), d_out)
    except Exception as error:  # its compiler raises error classes of its own
        say_refusal(error)
        return None


def _attention() -> Callable[..., Any] | None:
    """Returns ffpa_attn_func; None if the package is missing, or, with a warning, if it cannot be imported."""
    if importlib.util.find_spec("ffpa_attn") is None:
        return None
    try:
        attention: Callable[..., Any] = importlib.import_module("ffpa_attn").ffpa_attn_func
    except (ImportError, AttributeError, OSError) as error:
        say_refusal(error)
        return None
    return attention
