"""The language: what a user writes. Traced masks and scores, named variants, captures, `AttentionSpec`."""

from flashgen.language.captures import Scalar, Tensor
from flashgen.language.functions import (
    abs,
    clamp,
    cos,
    exp,
    exp2,
    floor,
    len_k,
    len_q,
    log,
    log2,
    maximum,
    minimum,
    sigmoid,
    sin,
    sqrt,
    tanh,
    to_float,
    to_int,
    where,
)
from flashgen.language.layouts import BlockLayout
from flashgen.language.masks import block_sparse, causal, dilated_window, document, full, prefix_lm, sliding_window
from flashgen.language.parse import parse_mask, parse_score
from flashgen.language.scores import alibi, relative_bias, softcap
from flashgen.language.spec import AttentionSpec
from flashgen.language.variants import Mask, Score, trace_mask, trace_score

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
    "cos",
    "dilated_window",
    "document",
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
    "where",
]
