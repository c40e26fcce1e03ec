"""Autocast: q, k and v are converted to the spec's dtype; captured arrays keep their dtype."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.torch.operators import LIBRARY
from flashgen.torch.table import Registered, constant, entry_of_key
from flashgen.torch.tensors import Tensor


@constant
def dtype_of_autocast(is_cuda: bool) -> torch.dtype | None:
    """Returns the dtype of autocast for a GPU or for the CPU; None if it is disabled. Dynamo guards this state."""
    device_type = "cuda" if is_cuda else "cpu"
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def converted(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Converts tensors to the dtype of autocast, if it is enabled for the device of the first one."""
    dtype = dtype_of_autocast(tensors[0].is_cuda)
    return tensors if dtype is None else tuple(tensor.to(dtype) for tensor in tensors)


def cast(entry: Registered, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Converts q, k and v to the spec's dtype. A KV cache keeps its dtype and is not copied."""
    if entry.cache:
        return q.to(entry.dtype), k, v
    return q.to(entry.dtype), k.to(entry.dtype), v.to(entry.dtype)


def _register(device_type: str, key: str) -> None:
    dispatch = getattr(torch._C.DispatchKey, key)

    def under_autocast(q: Tensor, k: Tensor, v: Tensor, captures: Any, name: str, *rest: Any) -> Any:
        rows = cast(entry_of_key(name), q, k, v)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(dispatch)):
            return torch.ops.flashgen.forward(*rows, captures, name, *rest)

    LIBRARY.impl("forward", under_autocast, key)


_register("cuda", "AutocastCUDA")
_register("cpu", "AutocastCPU")
