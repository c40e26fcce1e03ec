"""NumPy arrays in a call for the GPU: copied there, and the results back."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashgen.runtime import gpu


def to_gpu(value: Any) -> Any:
    """A NumPy array as one of CuPy on the current GPU, a copy; anything else as it is."""
    return gpu.cupy().asarray(value) if isinstance(value, np.ndarray) else value


def to_host(array: Any, into: Any = None) -> Any:
    """A CuPy array as one of NumPy: a new one, or `into`, written over; `into` on the GPU was written to there."""
    if into is None:
        return gpu.cupy().asnumpy(array)
    if isinstance(into, np.ndarray):
        into[...] = gpu.cupy().asnumpy(array)
    return into
