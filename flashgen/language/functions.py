"""Mathematical functions for traced masks and scores. Each takes traced values or literals and gives a traced value."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from flashgen.language import elementary
from flashgen.language.elementary import len_k, len_q
from flashgen.language.trace import as_placeholder

__all__ = ["abs", "clamp", "cos", "exp", "exp2", "floor", "len_k", "len_q", "log", "log2", "maximum", "minimum"]
__all__ += ["sigmoid", "sin", "sqrt", "tanh", "to_float", "to_int", "where"]


def _public(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as users call it, whose results are placeholders where torch.compile traces them."""

    @wraps(function)
    def call(*operands: Any, **options: Any) -> Any:
        return as_placeholder(function(*operands, **options))

    return call


abs = _public(elementary.abs)
clamp = _public(elementary.clamp)
cos = _public(elementary.cos)
exp = _public(elementary.exp)
exp2 = _public(elementary.exp2)
floor = _public(elementary.floor)
log = _public(elementary.log)
log2 = _public(elementary.log2)
maximum = _public(elementary.maximum)
minimum = _public(elementary.minimum)
sigmoid = _public(elementary.sigmoid)
sin = _public(elementary.sin)
sqrt = _public(elementary.sqrt)
tanh = _public(elementary.tanh)
to_float = _public(elementary.to_float)
to_int = _public(elementary.to_int)
where = _public(elementary.where)
