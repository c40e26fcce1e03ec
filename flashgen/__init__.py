"""flashgen: declare an attention variant, get a readable CUDA kernel.

    import flashgen as fg

    spec = fg.AttentionSpec(head_dim=64, dtype="float16", mask=fg.causal())
    attention = fg.compile(spec)            # this GPU; or target="sm_80"; or emulate=True on the CPU
    out = attention(q, k, v)

Names are imported when they are first used, so that `import flashgen` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashgen import errors, reference, verify
    from flashgen.attention import compile
    from flashgen.language import (
        AttentionSpec,
        BlockLayout,
        Mask,
        Scalar,
        Score,
        Tensor,
        abs,
        alibi,
        block_sparse,
        causal,
        clamp,
        cos,
        dilated_window,
        document,
        exp,
        exp2,
        floor,
        full,
        len_k,
        len_q,
        log,
        log2,
        maximum,
        minimum,
        parse_mask,
        parse_score,
        prefix_lm,
        relative_bias,
        sigmoid,
        sin,
        sliding_window,
        softcap,
        sqrt,
        tanh,
        to_float,
        to_int,
        trace_mask,
        trace_score,
        where,
    )

__version__ = "0.1.0"

_MODULES = ("errors", "reference", "verify")

__all__ = [
    "AttentionSpec",
    "BlockLayout",
    "Mask",
    "Scalar",
    "Score",
    "Tensor",
    "abs",
    "alibi",
    "block_sparse",
    "causal",
    "clamp",
    "compile",
    "cos",
    "dilated_window",
    "document",
    "errors",
    "exp",
    "exp2",
    "floor",
    "full",
    "len_k",
    "len_q",
    "log",
    "log2",
    "maximum",
    "minimum",
    "parse_mask",
    "parse_score",
    "prefix_lm",
    "reference",
    "relative_bias",
    "sigmoid",
    "sin",
    "sliding_window",
    "softcap",
    "sqrt",
    "tanh",
    "to_float",
    "to_int",
    "trace_mask",
    "trace_score",
    "verify",
    "where",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"flashgen.{name}")
    if name in __all__:
        home = "flashgen.attention" if name == "compile" else "flashgen.language"
        value = getattr(importlib.import_module(home), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'flashgen' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
