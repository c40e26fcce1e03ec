"""The functions of the language as its own modules call them: `functions` without placeholders for users."""

from __future__ import annotations

from typing import Any

from flashgen.language import functions
from flashgen.language.functions import len_k, len_q

__all__ = ["len_k", "len_q"]


def _plain(function: Any) -> Any:
    return function.__wrapped__


abs = _plain(functions.abs)
clamp = _plain(functions.clamp)
cos = _plain(functions.cos)
exp = _plain(functions.exp)
exp2 = _plain(functions.exp2)
floor = _plain(functions.floor)
log = _plain(functions.log)
log2 = _plain(functions.log2)
maximum = _plain(functions.maximum)
minimum = _plain(functions.minimum)
sigmoid = _plain(functions.sigmoid)
sin = _plain(functions.sin)
sqrt = _plain(functions.sqrt)
tanh = _plain(functions.tanh)
to_float = _plain(functions.to_float)
to_int = _plain(functions.to_int)
where = _plain(functions.where)
