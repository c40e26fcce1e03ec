"""T5's relative biases (arXiv:1910.10683): a bucket for each short distance, then logarithmically growing buckets.

T5 computes int(log(n / exact) / log(farthest / exact) · buckets) in float32. Where that is an integer (n = 16, 32, 64
of the usual 8 to 128) rounding decides, so there are two safer forms: in integers, comparing n with the first distance
of each bucket, and by log2, which is exact at powers of two.
"""

from __future__ import annotations

import decimal
import functools
import math
from typing import Any

import numpy as np

import flashgen.language as fg
from families.entry import Array, Captures, Entry, positions
from flashgen.verify import Shape

BUCKETS, FARTHEST = 32, 128
TABLE = fg.Tensor("table", "float32", 2)  # (buckets, heads), as in T5


def first_distances(buckets: int) -> list[int]:
    """Smallest distances of the buckets beyond the exact ones: log(n / exact) / log(FARTHEST / exact) >= i / steps."""
    exact, steps = buckets // 2, buckets - buckets // 2

    def reaches(n: int, i: int) -> bool:
        return n**steps >= exact ** (steps - i) * FARTHEST**i  # the same in integers

    return [next(n for n in range(exact, FARTHEST + 1) if reaches(n, i)) for i in range(1, steps)]


def in_integers(distance: Any, buckets: int) -> Any:
    """distance >= 0 -> 0 .. buckets - 1."""
    exact = buckets // 2
    beyond = functools.reduce(
        lambda total, first: total + fg.where(distance >= first, 1, 0), first_distances(buckets), exact
    )
    return fg.where(distance < exact, distance, beyond)


def by_log(distance: Any, buckets: int) -> Any:
    """T5's own form."""
    exact = buckets // 2
    ratio = fg.log(fg.maximum(distance, 1) / exact) / math.log(FARTHEST / exact)
    beyond = exact + fg.to_int(ratio * (buckets - exact))
    return fg.where(distance < exact, distance, fg.minimum(beyond, buckets - 1))


def by_log2(distance: Any, buckets: int) -> Any:
    exact = buckets // 2
    factor = (buckets - exact) / math.log2(FARTHEST / exact)
    ratio = fg.maximum(distance, 1) / exact
    beyond = exact + fg.to_int(fg.log2(ratio) * factor)
    return fg.where(distance < exact, distance, fg.minimum(beyond, buckets - 1))


def t5_bias(bucket_of: Any, bidirectional: bool) -> fg.Score:
    """Both directions share the buckets; in one direction, later keys count as distance 0."""

    def t5_bias(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        ahead = k - q
        if bidirectional:
            half = BUCKETS // 2
            bucket = fg.where(ahead > 0, half, 0) + bucket_of(abs(ahead), half)
        else:
            bucket = bucket_of(fg.maximum(-ahead, 0), BUCKETS)
        return score + TABLE[bucket, h]

    return fg.trace_score(t5_bias, f"t5_bias({bucket_of.__name__}, {bidirectional})")


def learned(shape: Shape, random: np.random.Generator) -> Captures:
    return {"table": random.standard_normal((BUCKETS, shape.heads_q), dtype=np.float32)}


def bucket_by_decimals(distance: int, buckets: int) -> int:
    """T5's formula with 50 digits; an error in the last digit of an integer has no effect."""
    exact = buckets // 2
    if distance < exact:
        return distance
    with decimal.localcontext(prec=50):
        of = (decimal.Decimal(distance) / exact).ln() / (decimal.Decimal(FARTHEST) / exact).ln() * (buckets - exact)
        return min(exact + int(of + decimal.Decimal("1e-40")), buckets - 1)


def by_bucket(scores: Array, shape: Shape, captures: Captures, bidirectional: bool) -> Array:
    q, k = positions(shape)
    ahead, half = k - q, BUCKETS // 2
    if bidirectional:
        of = {n: bucket_by_decimals(int(abs(n)), half) + (half if n > 0 else 0) for n in np.unique(ahead)}
    else:
        of = {n: bucket_by_decimals(int(max(-n, 0)), BUCKETS) for n in np.unique(ahead)}
    bucket = np.array([of[n] for n in ahead.ravel()]).reshape(ahead.shape)
    return scores + np.moveaxis(captures["table"].astype(np.float64)[bucket], -1, 0)


def entries(length: int) -> tuple[Entry, ...]:
    return tuple(
        Entry(
            name,
            mask=None,
            score=t5_bias(bucket_of, bidirectional),
            captures=learned,
            modified=lambda x, s, c, bidirectional=bidirectional: by_bucket(x, s, c, bidirectional),
        )
        for name, bucket_of, bidirectional in (
            ("t5_log", by_log, True),
            ("t5_log_backwards", by_log, False),
            ("t5_integers", in_integers, True),
            ("t5_integers_backwards", in_integers, False),
            ("t5_log2", by_log2, True),
            ("t5_log2_backwards", by_log2, False),
        )
    )
