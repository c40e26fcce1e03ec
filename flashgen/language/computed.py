"""Refuses tensors that a spec's function computes: the function is traced once, so their first values would be kept."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from flashgen.errors import SpecError


@contextmanager
def refuse_computed_tensors(what: str) -> Iterator[None]:
    """Within this context, raises SpecError if a torch tensor is indexed that was computed from other tensors.

    Views are allowed because they share the values of their tensors, and so are constants made from numbers alone.
    """
    torch = sys.modules.get("torch")
    with nullcontext() if torch is None else _mode(torch, what):
        yield


def _mode(torch: Any, what: str) -> Any:
    from torch.overrides import TorchFunctionMode

    class Computed(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self._results: dict[int, tuple[Any, bool]] = {}  # by id: (tensor, depends on outer tensors)

        def __torch_function__(self, function: Any, _types: Any, arguments: Any = (), keywords: Any = None) -> Any:
            given = [each for each in (*arguments, *(keywords or {}).values()) if isinstance(each, torch.Tensor)]
            if function is torch.Tensor.__getitem__ and not given[1:] and self._is_computed(given[:1]):
                raise SpecError(
                    "it indexes a tensor that it computes from others, and a spec's function is traced once, when the "
                    "spec is created: compute the tensor outside, declare flashgen.Tensor(name, dtype, ndim) and give "
                    "it at each call, or call flashgen.torch.flex_attention, which traces at each call"
                )
            found = function(*arguments, **(keywords or {}))
            if isinstance(found, torch.Tensor) and not any(_share(found, each) for each in given):
                outer = any(self._results.get(id(each), (each, True))[1] for each in given)
                self._results[id(found)] = found, outer
            elif isinstance(found, torch.Tensor) and self._is_computed(given):
                self._results[id(found)] = found, True
            return found

        def _is_computed(self, tensors: Any) -> bool:
            return any(self._results.get(id(each), (each, False))[1] for each in tensors)

    def _share(a: Any, b: Any) -> bool:
        try:
            return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # a tensor without storage
            return False

    return Computed()
