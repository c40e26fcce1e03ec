"""Refuses tensors that a spec's function computes, whose first values a spec would keep: it is traced once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from flashgen.errors import SpecError


@contextmanager
def refusing_computed(what: str) -> Iterator[None]:
    """Inside, indexing a tensor of torch that was computed of other tensors raises a SpecError.

    Views share the values of their tensors, and what is made of numbers alone is a constant: both are allowed.
    """
    torch = sys.modules.get("torch")
    with nullcontext() if torch is None else _mode(torch, what):
        yield


def _mode(torch: Any, what: str) -> Any:
    from torch.overrides import TorchFunctionMode

    class Computed(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self._made: dict[int, tuple[Any, bool]] = {}  # a tensor that was made inside, and whether of outer ones

        def __torch_function__(self, function: Any, _types: Any, arguments: Any = (), keywords: Any = None) -> Any:
            given = [each for each in (*arguments, *(keywords or {}).values()) if isinstance(each, torch.Tensor)]
            if function is torch.Tensor.__getitem__ and not given[1:] and self._is_computed(given[:1]):
                raise SpecError(
                    "it indexes a tensor that it computes of others, and a spec's function is traced once, when the "
                    "spec is made: compute the tensor outside, declare flashgen.Tensor(name, dtype, ndim) and give it "
                    "at each call, or call flashgen.torch.flex_attention, which traces at each call"
                )
            found = function(*arguments, **(keywords or {}))
            if isinstance(found, torch.Tensor) and not any(_share(found, each) for each in given):
                outer = any(self._made.get(id(each), (each, True))[1] for each in given)
                self._made[id(found)] = found, outer
            elif isinstance(found, torch.Tensor) and self._is_computed(given):
                self._made[id(found)] = found, True
            return found

        def _is_computed(self, tensors: Any) -> bool:
            return any(self._made.get(id(each), (each, False))[1] for each in tensors)

    def _share(a: Any, b: Any) -> bool:
        try:
            return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # a tensor without storage
            return False

    return Computed()
