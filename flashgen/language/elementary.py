"""The functions of the language for its own modules: those of `functions`, without placeholders for torch.compile."""

from __future__ import annotations

from typing import Any

from flashgen.language import functions
from flashgen.language.functions import len_k, len_q

__all__ = ["len_k", "len_q"]


def _without_placeholders(function: Any) -> Any:
    return function.__wrapped__


abs = _without_placeholders(functions.abs)
clamp = _without_placeholders(functions.clamp)
cos = _without_placeholders(functions.cos)
exp = _without_placeholders(functions.exp)
exp2 = _without_placeholders(functions.exp2)
floor = _without_placeholders(functions.floor)
log = _without_placeholders(functions.log)
log2 = _without_placeholders(functions.log2)
maximum = _without_placeholders(functions.maximum)
minimum = _without_placeholders(functions.minimum)
sigmoid = _without_placeholders(functions.sigmoid)
sin = _without_placeholders(functions.sin)
sqrt = _without_placeholders(functions.sqrt)
tanh = _without_placeholders(functions.tanh)
to_float = _without_placeholders(functions.to_float)
to_int = _without_placeholders(functions.to_int)
where = _without_placeholders(functions.where)
