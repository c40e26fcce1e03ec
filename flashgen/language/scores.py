"""The named scores. Each prints as the call that makes it. They compose by calling: `softcap(30)(alibi(8))`."""

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

# The parser, `flashgen.language` and `flashgen` read the named scores from this list.
__all__ = ["alibi", "relative_bias", "softcap"]

# One call of each score, for messages. `flashgen verify` also tests those that none of its variants uses.
EXAMPLES = ("alibi(8)", "softcap(30)", "relative_bias('table', 128)")


def alibi(slopes: Any) -> Score:
    """Returns score + slope(h) · (k - q): attention with linear biases (Press et al., arXiv:2108.12409).

    q and k count from the start of their own sequences. If len_q != len_k and the queries are the last positions, the
    bias is larger by slope·(len_k - len_q) than with aligned distances. The difference is constant along a row, so the
    output is the same, and the LSE is larger by that amount.

    Args:
        slopes: The number of heads, for slope(h) = 2^(-8(h + 1)/heads), computed in the kernel; or an array of floats
            of shape (heads,) or (batch, heads) (calls then need not supply it); or a floating Tensor of ndim 1 or 2; or
            a name, which stands for Tensor(name, "float32", ndim=1).
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

    shown = _table_text(table, 1) if isinstance(table, Tensor) else str(int(table))
    return trace_score(biased, f"alibi({shown})")


def softcap(cap: float | Scalar, precision: str = "fast") -> Score:
    """Returns cap · tanh(score / cap), which limits scores to (-cap, cap), as in Gemma 2.

    Args:
        cap: A number > 0 or a float32 Scalar.
        precision: "fast" uses the hardware's tanh instruction, whose relative error of 2**-11 equals that of rounding
            the score to float16. "accurate" uses an exponential and a division, for an absolute error of 1e-6.
    """
    if not isinstance(cap, Scalar):
        cap = _positive(cap, "softcap: cap")
    elif cap.kind != "float":
        raise SpecError(f"softcap: cap={cap!r} must be a number > 0 or a Scalar of dtype 'float32'")
    shown = f"{cap:g}" if isinstance(cap, float) and float(f"{cap:g}") == cap else repr(cap)
    shown += "" if precision == "fast" else f", precision={precision!r}"
    return trace_score(lambda score, b, h, q, k: cap * f.tanh(score / cap, precision), f"softcap({shown})")


def relative_bias(table: Any, max_distance: int | Scalar) -> Score:
    """Returns score + table[h, clamp(k - q, -D, D) + D] with D = max_distance: a learned bias per relative position.

    Entry D holds the bias for k == q, entry 0 for k <= q - D, and entry 2·D for k >= q + D. q and k count from the
    start of their own sequences.

    Args:
        table: An array of floats of shape (heads, 2·D + 1), or (2·D + 1,) shared by all heads (calls then need not
            supply it); or a floating Tensor of ndim 1 or 2; or a name, which stands for Tensor(name, "float32",
            ndim=2).
        max_distance: D, an integer from 0 to 2**30 - 1 or an int32 Scalar.
    """
    table = _tensor(table, "table", 2)
    if not isinstance(table, Tensor) or table.ndim > 2 or table.capture.kind != "float":
        raise SpecError(
            f"relative_bias: table={table!r} must be a floating Tensor of shape (heads, 2*max_distance + 1) or "
            "(2*max_distance + 1), an array, or its name"
        )
    distance = max_distance if isinstance(max_distance, Scalar) and max_distance.kind == "int" else _count(max_distance)

    def biased(score: Any, b: Any, h: Any, q: Any, k: Any) -> Traced:
        entry = f.clamp(k - q, -distance, distance) + distance
        return score + (table[entry] if table.ndim == 1 else table[h, entry])

    return trace_score(biased, f"relative_bias({_table_text(table, 2)}, {distance!r})")


def _tensor(value: Any, hint: str, ndim: int) -> Any:
    """Returns the Tensor for a name, the stand-in for an array, or any other value unchanged."""
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


def _count(value: Any) -> int:
    if isinstance(value, (bool, Traced)) or not hasattr(value, "__index__") or not 0 <= int(value) < 2**30:
        raise SpecError(
            f"relative_bias: max_distance={value!r} must be an integer from 0 to 2**30 - 1, or an int32 Scalar"
        )
    return int(value)


def _table_text(table: Tensor, ndim: int) -> str:
    if isinstance(table, BoundTensor):
        return repr(table.name)
    plain = repr(table) == repr(Tensor(table.name, "float32", ndim))
    return repr(table.name) if plain else repr(table)
