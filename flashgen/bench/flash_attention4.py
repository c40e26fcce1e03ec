"""FlashAttention-4 as a peer: kernels in NVIDIA's CuTe DSL, from the optional package flash-attn-4."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from typing import Any

import sympy

from flashgen.bench.cases import Arrays, Timed
from flashgen.bench.torch_runs import differentiated, say_refusal
from flashgen.language.masks import causal, sliding_window
from flashgen.language.spec import AttentionSpec
from flashgen.runtime.timing import Run


def flash_attention4(spec: AttentionSpec, timed: Timed, arrays: Arrays) -> Run | None:
    """Returns a run of FlashAttention-4; None if it is not installed or does not support the spec.

    It receives contiguous arrays in its own layout (batch, length, heads, dim), regardless of the layout of the spec.
    The first run compiles for seconds.
    """
    layout = spec.batch_layout
    options = mask_options(spec, square=arrays[0].shape[layout.rows_axis] == arrays[1].shape[layout.rows_axis])
    if spec.score or spec.dropout or spec.sink or options is None:
        return None
    attention = _attention()
    if attention is None:
        return None
    q, k, v, d_out = (layout.swap_heads(array).transpose(1, 2).contiguous() for array in arrays)

    def forward(q: Any, k: Any, v: Any) -> Any:
        found = attention(q, k, v, softmax_scale=spec.scale, **options)
        return found[0] if isinstance(found, tuple) else found  # some releases return the LSE as well

    try:
        return differentiated(forward, timed, (q, k, v), d_out)
    except Exception as error:  # its compiler raises error classes of its own
        say_refusal(error)
        return None


def mask_options(spec: AttentionSpec, square: bool) -> dict[str, Any] | None:
    """Returns the arguments of flash_attn_func for the mask of a spec; None if it has no arguments for that mask.

    Its masks align to the bottom right, like the default of flashgen. For square scores both alignments are equal.
    """
    expression = spec.mask.expression
    if expression == sympy.true:
        return {}
    if expression == causal().expression or (square and expression == causal("top_left").expression):
        return {"causal": True}
    window = re.fullmatch(r"sliding_window\((\d+)(?:, (\d+))?\)", spec.mask.name)
    if window is None:
        return None
    left, right = int(window[1]), int(window[2] or 0)
    named = sliding_window(left, right).expression
    return {"window_size": (left, right)} if expression == named else None


def _attention() -> Callable[..., Any] | None:
    """Returns flash_attn_func; None if the package is missing, or, with a warning, if it cannot be imported."""
    try:
        if importlib.util.find_spec("flash_attn.cute") is None:
            return None
    except ModuleNotFoundError:  # flash_attn is missing too
        return None
    try:
        attention: Callable[..., Any] = importlib.import_module("flash_attn.cute.interface").flash_attn_func
    except (ImportError, AttributeError, OSError) as error:
        say_refusal(error)
        return None
    return attention
