"""Autocast: q, k and v become what the spec is of; captured arrays, such as slopes in float32, stay as they are."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.torch.operators import LIBRARY
from flashgen.torch.table import of_key
from flashgen.torch.tensors import Tensor


def cast(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in a dtype."""
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _register(device_type: str, key: str) -> None:
    dispatch = getattr(torch._C.DispatchKey, key)

    def under_autocast(q: Tensor, k: Tensor, v: Tensor, captures: Any, name: str, *rest: Any) -> Any:
        dtype = of_key(name).dtype
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(dispatch)):
            return torch.ops.flashgen.forward(*cast(q, k, v, dtype), captures, name, *rest)

    LIBRARY.impl("forward", under_autocast, key)


_register("cuda", "AutocastCUDA")
_register("cpu", "AutocastCPU")
