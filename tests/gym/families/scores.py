"""Score functions: biases by distance, head and table, caps, and products of the score with itself."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

import flashgen.language as fg
from families.entry import Array, Captures, Entry, heads, positions
from flashgen.verify import CaptureMaker, Shape

RANK = 6
QR, KR = fg.Tensor("Qr", "float32", 4), fg.Tensor("Kr", "float32", 4)
OFFSET = fg.Tensor("head_offset", "float32", 1)


def checkerboard(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return fg.where(abs(k - q) % 2 == 1, score * 0.5, score * 2.0)


def squared(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score * score


def head_offset(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + OFFSET[h]


def head_factor(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score * OFFSET[h] + h


def bias(name: str, dtype: str, axes: str) -> fg.Score:
    """A bias by the indices named in `axes`, a subset of "bhqk"; a dimension of size 1 broadcasts."""
    table = fg.Tensor("bias", dtype, len(axes))

    def biased(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + table[tuple({"b": b, "h": h, "q": q, "k": k}[axis] for axis in axes)]

    return fg.trace_score(biased, name)


def bias_of(dtype: str, axes: str, ones: str = "") -> CaptureMaker:
    """`ones`: the axes whose dimension is 1."""

    def make(shape: Shape, random: np.random.Generator) -> Captures:
        sizes = {"b": shape.batch, "h": shape.heads_q, "q": shape.len_q, "k": shape.len_k}
        values = random.standard_normal([1 if axis in ones else sizes[axis] for axis in axes])
        return {"bias": values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)}

    return make


def biased(scores: Array, shape: Shape, captures: Captures) -> Array:
    return scores + captures["bias"].astype(np.float64)  # NumPy's broadcasting aligns the last axes, as these do


def low_rank(scale: float) -> fg.Score:
    def low_rank(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        products = [QR[b, h, q, r] * KR[b, h, k, r] for r in range(RANK)]
        return score + scale * functools.reduce(lambda one, other: one + other, products)

    return fg.trace_score(low_rank, f"low_rank({RANK}, {scale})")


def factors(shape: Shape, random: np.random.Generator) -> Captures:
    def of(length: int) -> Array:
        return random.standard_normal((shape.batch, shape.heads_q, length, RANK), dtype=np.float32)

    return {"Qr": of(shape.len_q), "Kr": of(shape.len_k)}


def by_factors(scores: Array, shape: Shape, captures: Captures, scale: float) -> Array:
    q_factors, k_factors = (captures[name].astype(np.float64) for name in ("Qr", "Kr"))
    return scores + scale * np.einsum("bhqr,bhkr->bhqk", q_factors, k_factors)


def relative_table(distance: int) -> CaptureMaker:
    return lambda shape, random: {"table": random.standard_normal((shape.heads_q, 2 * distance + 1), dtype=np.float32)}


def by_distance(scores: Array, shape: Shape, captures: Captures, distance: int) -> Array:
    q, k = positions(shape)
    columns = np.array([min(max(d, -distance), distance) + distance for d in (k - q).ravel()]).reshape((k - q).shape)
    return scores + captures["table"].astype(np.float64)[:, columns]


def alibied(scores: Array, shape: Shape, heads_q: int) -> Array:
    q, k = positions(shape)
    return scores + (k - q) / 2.0 ** (8 * (heads(shape)[1] + 1) / heads_q)


def checkered(scores: Array, shape: Shape, captures: Captures) -> Array:
    result = scores * 2.0
    result[..., 0::2, 1::2] = scores[..., 0::2, 1::2] / 2
    result[..., 1::2, 0::2] = scores[..., 1::2, 0::2] / 2
    return result


def offsets(shape: Shape, random: np.random.Generator) -> Captures:
    return {"head_offset": random.standard_normal(shape.heads_q, dtype=np.float32)}


def offset_of(shape: Shape, captures: Captures) -> Array:
    return captures["head_offset"].astype(np.float64)[:, None, None]


def entries(length: int) -> tuple[Entry, ...]:
    distance = length // 8
    return (
        Entry("alibi", score=fg.alibi(4), modified=lambda x, s, c: alibied(x, s, 4)),
        Entry("softcap", score=fg.softcap(2.5), modified=lambda x, s, c: 2.5 * np.tanh(x / 2.5)),
        Entry(
            "relative_table",
            score=fg.relative_bias("table", distance),
            captures=relative_table(distance),
            modified=lambda x, s, c: by_distance(x, s, c, distance),
        ),
        Entry(
            "bias_bhqk",
            score=bias("bias_bhqk", "float32", "bhqk"),
            captures=bias_of("float32", "bhqk"),
            modified=biased,
        ),
        Entry(
            "bias_b11k",
            score=bias("bias_b11k", "float16", "bhqk"),
            captures=bias_of("float16", "bhqk", ones="hq"),
            modified=biased,
        ),
        Entry(
            "bias_hqk", score=bias("bias_hqk", "bfloat16", "hqk"), captures=bias_of("bfloat16", "hqk"), modified=biased
        ),
        Entry(
            "bias_1qk",
            score=bias("bias_1qk", "float32", "hqk"),
            captures=bias_of("float32", "hqk", ones="h"),
            modified=biased,
        ),
        Entry("bias_qk", score=bias("bias_qk", "float16", "qk"), captures=bias_of("float16", "qk"), modified=biased),
        Entry(
            "low_rank_bias",
            score=low_rank(0.25),
            captures=factors,
            modified=lambda x, s, c: by_factors(x, s, c, 0.25),
        ),
        Entry("checkerboard", score=fg.trace_score(checkerboard), modified=checkered),
        Entry("squared", score=fg.trace_score(squared), modified=lambda x, s, c: x**2),
        Entry(
            "head_offset",
            score=fg.trace_score(head_offset),
            captures=offsets,
            modified=lambda x, s, c: x + offset_of(s, c),
        ),
        Entry(
            "head_factor",
            score=fg.trace_score(head_factor),
            captures=offsets,
            modified=lambda x, s, c: x * offset_of(s, c) + heads(s)[1],
        ),
    )
