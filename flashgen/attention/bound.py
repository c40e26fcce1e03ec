"""An attention with a spec that closes over arrays, which it passes to each call itself."""

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
    """An attention that adds its own arrays to the captures of each call; captures given by the caller win.

    It shares kernels, plans and caches with the plain attention of its spec: both have the same attribute dictionary,
    and this object holds the arrays in addition.

    Arrays on the GPU of a call are read in place. Host arrays are copied to a GPU by the first call there, and again by
    the first call after their values have changed, which a comparison on the host detects.
    """

    __slots__ = ("bound",)

    def __init__(self, attention: Attention, bound: Bound) -> None:
        self.__dict__ = attention.__dict__
        self.bound = bound

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundAttention:
        """Returns the same kernels with copies of the arrays, so a copied model gets its own parameters."""
        return BoundAttention(self, deepcopy(self.bound, memo))

    def __call__(self, q: Any, k: Any, v: Any = None, **given: Any) -> Any:
        return super().__call__(q, k, v, **self._with_bound(q, given))

    def backward(self, d_out: Any, q: Any, k: Any, v: Any, out: Any = None, lse: Any = None, **given: Any) -> Any:
        return super().backward(d_out, q, k, v, out, lse, **self._with_bound(q, given))

    def vjp(self, q: Any, k: Any, v: Any = None, **given: Any) -> tuple[Any, Callable[..., Any]]:
        return super().vjp(q, k, v, **self._with_bound(q, given))

    def tune(self, q: Any, k: Any, v: Any = None, **given: Any) -> Any:
        return super().tune(q, k, v, **self._with_bound(q, given))

    def tune_backward(self, q: Any, k: Any, v: Any = None, **given: Any) -> Any:
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
        device = self.engine.array_device()
        arrays = {
            name: array.on_host() if device is None else on_gpu(array, device) for name, array in self.bound.items()
        }
        return {name: array for name, array in arrays.items() if name in self._mask_names()} | given

    def _mask_names(self) -> set[str]:
        return {capture.name for capture in self.spec.mask.captures}


def unbound(attention: Attention) -> Attention:
    """Returns the attention without the arrays that its spec closes over; its callers pass them to each call."""
    if not isinstance(attention, BoundAttention):
        return attention
    plain = Attention.__new__(Attention)
    plain.__dict__ = attention.__dict__
    return plain


def on_gpu(bound: BoundArray, device: int | None) -> Any:
    """Returns the array on a GPU: itself, or a copy of a host array, updated if the values have changed."""
    array = bound.original
    if device is None or (
        not is_on_host(array) and library_of(array, "an array").view(array, "an array").device == device
    ):
        return bound.current()

    def copy(source: np.ndarray[Any, Any], copied: Any) -> Any:
        cupy = gpu.cupy()
        with cupy.cuda.Device(device) as current:
            if copied is None:
                copied = cupy.empty(source.shape, source.dtype)
            else:
                current.synchronize()  # kernels on other streams may still read the old values
            copied.set(np.ascontiguousarray(source))
            cupy.cuda.get_current_stream().synchronize()  # ready for calls on any stream
        return copied

    return bound.moved(device, copy)
