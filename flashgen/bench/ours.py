"""Runs of flashgen: the forward, the backward, or both."""

from __future__ import annotations

from typing import Any

from flashgen.attention import Attention
from flashgen.bench.cases import Arrays, Timed
from flashgen.runtime.timing import Run

Options = dict[str, Any]


def ours(
    attention: Attention,
    timed: Timed,
    arrays: Arrays,
    captures: Options | None = None,
    forward: Options | None = None,
    backward: Options | None = None,
) -> Run:
    """Returns a run of an attention, with a fixed seed for dropout.

    `forward` and `backward` are options of calls of one pass. With "backward", the forward runs once, here.
    """
    q, k, v, d_out = arrays
    given = (captures or {}) | ({"seed": 1} if attention.spec.dropout else {})
    to_forward, to_backward = given | (forward or {}), given | (backward or {})
    if timed == "forward":
        return lambda: attention(q, k, v, **to_forward)

    def both() -> Any:
        out, lse = attention(q, k, v, return_lse=True, **to_forward)
        return attention.backward(d_out, q, k, v, out, lse, **to_backward)

    if timed == "both":
        return both
    out, lse = attention(q, k, v, return_lse=True, **to_forward)
    return lambda: attention.backward(d_out, q, k, v, out, lse, **to_backward)
