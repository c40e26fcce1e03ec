"""The named scores. Each prints as the call that makes it; they compose by calling, `softcap(30)(alibi(8))`."""

from __future__ import annotations

import math
from typing import Any

from flashgen.errors import SpecError
from flashgen.language import elementary as f
from flashgen.language.bound import is_array
from flashgen.language.captures import Scalar, Tensor
from flashgen.language.closures import BoundTensor
from flashgen.language.modifiers import Score, trace_score
from flashgen.language.trace import Traced

# The parser, `flashgen.language` and `flashgen` take the named scores from here.
__all__ = ["alibi", "relative_bias", "softcap"]

# A call of each, as messages show it. `flashgen verify` also meets those that none of its variants has.
EXAMPLES = ("alibi(8)", "softcap(30)", "relative_bias('table', 128)")


def alibi(slopes: Any) -> Score:
    """score + slope(h) · (k - q): attention with linear biases (Press et al., arXiv:2108.12409).

    slopes: the number of heads, for slope(h) = 2^(-8(h + 1)/heads), computed in the kernel; or an array of floats,
    (heads,) or (batch, heads), which need not be given at the call; or a floating Tensor of ndim 1 or 2, or its name
    for Tensor(name, "float32", ndim=1).

    k - q takes each position in its own sequence. Where len_q != len_k and the queries are the last ones, that is
    slope·(len_k - len_q) more than the distance: the same for a whole row, so the output is the same, and the LSE is
    larger by it.
    """
    table = _tensor(slopes, "slopes", 1)
    if isinstance(table, Tensor):
        if table.ndim > 2 or table.capture.kind != "float":
            raise SpecError(f"alibi: slopes={table!r} must be a floating Tensor of ndim 1 (heads) or 2 (batch, heads)")
    elif isinstance(table, bool) or not hasattr(table, "__index__") or int(table) < 1:
        raise SpecError(
            f"alibi: slopes={slopes!r} must be the number of heads (an integer >= 1), an array or a Tensor of slopes"
        )

    def biased(score: Any, b: Any, h: Any, q: Any, k: Any) -> Traced:
        if isinstance(table, Tensor):
            slope = table[h] if table.ndim == 1 else table[b, h]
        else:
            slope = f.exp2(-8.0 / int(table) * (h + 1))
        return score + slope * (k - q)

    shown = _table_shown(table, 1) if isinstance(table, Tensor) else str(int(table))
    return trace_score(biased, f"alibi({shown})")


def softcap(cap: float | Scalar, precision: str = "fast") -> Score:
    """cap · tanh(score / cap): bounds scores to (-cap, cap), as in Gemma 2.

    cap: a number > 0 or a float32 Scalar. precision: "fast" takes the hardware's tanh, whose relative error of 2**-11
    is that of rounding the score to float16; "accurate" spends an exponential and a division on an absolute 1e-6.
    """
    if not isinstance(cap, Scalar):
        cap = _positive(cap, "softcap: cap")
    elif cap.kind != "float":
        raise SpecError(f"softcap: cap={cap!r} must be a number > 0 or a Scalar of dtype 'float32'")
    shown = f"{cap:g}" if isinstance(cap, float) and float(f"{cap:g}") == cap else repr(cap)
    shown += "" if precision == "fast" else f", precision={precision!r}"
    return trace_score(lambda score, b, h, q, k: cap * f.tanh(score / cap, precision), f"softcap({shown})")


def relative_bias(table: Any, max_distance: int | Scalar) -> Score:
    """score + table[h, clamp(k - q, -D, D) + D] with D = max_distance: a learned bias of each relative position.

    table: an array of floats of shape (heads, 2·D + 1), or (2·D + 1) shared by all heads, which need not be given at
    the call; or a floating Tensor, or its name for Tensor(name, "float32", ndim=2). Entry D is k == q, entry 0 is
    k <= q - D, entry 2·D is k >= q + D. Each position counts in its own sequence.
    """
    table = _tensor(table, "table", 2)
    if not isinstance(table, Tensor) or table.ndim > 2 or table.capture.kind != "float":
        raise SpecError(
            f"relative_bias: table={table!r} must be a floating Tensor of shape (heads, 2*max_distance + 1) or "
            "(2*max_distance + 1), an array, or its name"
        )
    distance = max_distance if isinstance(max_distance, Scalar) and max_distance.kind == "int" else _whole(max_distance)

    def biased(score: Any, b: Any, h: Any, q: Any, k: Any) -> Traced:
        entry = f.clamp(k - q, -distance, distance) + distance
        return score + (table[entry] if table.ndim == 1 else table[h, entry])

    return trace_score(biased, f"relative_bias({_table_shown(table, 2)}, {distance!r})")


def _tensor(value: Any, hint: str, ndim: int) -> Any:
    """The Tensor of a name, what stands for an array, or the value itself."""
    if isinstance(value, str):
        return Tensor(value, "float32", ndim)
    return BoundTensor(value, hint) if is_array(value) and value.ndim else value


def _positive(value: Any, argument: str) -> float:
    if isinstance(value, (bool, str, Traced)) or not hasattr(value, "__float__"):
        raise SpecError(f"{argument}={value!r} must be a number > 0 or a Scalar of dtype 'float32'")
    number = float(value)
    if not 0 < number < math.inf:
        raise SpecError(f"{argument}={value!r} must be finite and > 0")
    return number


def _whole(value: Any) -> int:
    if isinstance(value, (bool, Traced)) or not hasattr(value, "__index__") or not 0 <= int(value) < 2**30:
        raise SpecError(
            f"relative_bias: max_distance={value!r} must be an integer from 0 to 2**30 - 1, or an int32 Scalar"
        )
    return int(value)


def _table_shown(table: Tensor, ndim: int) -> str:
    if isinstance(table, BoundTensor):
        return repr(table.name)
    plain = repr(table) == repr(Tensor(table.name, "float32", ndim))
    return repr(table.name) if plain else repr(table)
