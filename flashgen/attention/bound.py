"""An attention whose spec closed over arrays: they are given to each call, and need not be by its caller."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np

from flashgen.attention.callable import Attention
from flashgen.language.bound import Bound, BoundArray, is_on_host
from flashgen.runtime import gpu
from flashgen.runtime.arrays import library_of


class BoundAttention(Attention):
    """An attention that adds arrays of its own to the captures of each call; a capture that is given wins.

    Kernels, plans and what calls remember are those of the attention that all specs like this one share: both have one
    dictionary of attributes, and this one its arrays beside it.

    Arrays on the GPU of a call are read where they stand. Those of the host are copied there by the first call on that
    GPU, and by each call after their values have changed, which a comparison on the host tells.
    """

    __slots__ = ("bound",)

    def __init__(self, attention: Attention, bound: Bound) -> None:
        self.__dict__ = attention.__dict__
        self.bound = bound

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundAttention:
        """The same kernels with copies of the arrays: of a model's parameters those of the model's copy."""
        return BoundAttention(self, deepcopy(self.bound, memo))

    def __call__(self, q: Any, k: Any, v: Any, **given: Any) -> Any:
        return super().__call__(q, k, v, **self._with_bound(q, given))

    def backward(self, d_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, **given: Any) -> Any:
        return super().backward(d_out, q, k, v, out, lse, **self._with_bound(q, given))

    def vjp(self, q: Any, k: Any, v: Any, **given: Any) -> tuple[Any, Callable[..., Any]]:
        return super().vjp(q, k, v, **self._with_bound(q, given))

    def tune(self, q: Any, k: Any, v: Any, **given: Any) -> Any:
        return super().tune(q, k, v, **self._with_bound(q, given))

    def tune_backward(self, q: Any, k: Any, v: Any, **given: Any) -> Any:
        return super().tune_backward(q, k, v, **self._with_bound(q, given))

    def tiles(self, *sizes: Any, **given: Any) -> Any:
        return super().tiles(*sizes, **{name: array.on_host() for name, array in self.bound.items()} | given)

    def tile_lists(self, *sizes: Any, **given: Any) -> Any:
        return super().tile_lists(*sizes, **self._where_kernels_run(given))

    def backward_tile_lists(self, *sizes: Any, **given: Any) -> Any:
        return super().backward_tile_lists(*sizes, **self._where_kernels_run(given))

    def decode_schedule(self, *sizes: Any, **given: Any) -> Any:
        return super().decode_schedule(*sizes, **self._where_kernels_run(given))

    def _with_bound(self, q: Any, given: dict[str, Any]) -> dict[str, Any]:
        if isinstance(q, np.ndarray):
            return {name: array.on_host() for name, array in self.bound.items()} | given
        device = library_of(q, "q").view(q, "q").device
        return {name: on_gpu(array, device) for name, array in self.bound.items() if name not in given} | given

    def _where_kernels_run(self, given: dict[str, Any]) -> dict[str, Any]:
        device = self.engine.home()
        placed = {
            name: array.on_host() if device is None else on_gpu(array, device) for name, array in self.bound.items()
        }
        return {name: array for name, array in placed.items() if name in self._mask_names()} | given

    def _mask_names(self) -> set[str]:
        return {capture.name for capture in self.spec.mask.captures}


def unbound(attention: Attention) -> Attention:
    """The attention without the arrays that its spec's functions hold: calls give them."""
    if not isinstance(attention, BoundAttention):
        return attention
    plain = Attention.__new__(Attention)
    plain.__dict__ = attention.__dict__
    return plain


def on_gpu(bound: BoundArray, device: int | None) -> Any:
    """The array on a GPU: itself, or a copy of the host's, which is updated where the values have changed."""
    array = bound.original
    if device is None or (
        not is_on_host(array) and library_of(array, "an array").view(array, "an array").device == device
    ):
        return bound.current()

    def copy(here: np.ndarray[Any, Any], there: Any) -> Any:
        cupy = gpu.cupy()
        with cupy.cuda.Device(device) as current:
            if there is None:
                there = cupy.empty(here.shape, here.dtype)
            else:
                current.synchronize()  # no kernel of another stream reads it any more
            there.set(np.ascontiguousarray(here))
            cupy.cuda.get_current_stream().synchronize()  # ready for whichever stream uses it
        return there

    return bound.moved(device, copy)
