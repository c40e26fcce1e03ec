"""Finds the batch and the number of heads that the captured arrays of a mask have values for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import sympy

from flashgen.errors import ArgumentError
from flashgen.language.operations import BATCH, HEAD, Load

_ARGUMENTS = {BATCH: "batch", HEAD: "heads"}


def captured_extent(mask: sympy.Basic, index: sympy.Symbol, captures: Mapping[str, Any]) -> int | None:
    """Returns the batch (index BATCH) or the number of heads (index HEAD) that the captures of a mask have values for.

    Returns None if no captured array is indexed by it, or all have size 1 in that dimension.

    Raises:
        ArgumentError: Two arrays have values for different numbers.
    """
    found: dict[str, int] = {}
    for load in sorted(mask.atoms(Load), key=str):
        shape = np.shape(captures.get(load.capture.name, ()))
        for size, position in zip(shape, load.indices, strict=False):
            if position == index and size > 1:
                found[load.capture.name] = size
    if len(set(found.values())) > 1:
        sizes = ", ".join(f"{name!r} {size}" for name, size in found.items())
        raise ArgumentError(f"captures have values for different numbers of {_ARGUMENTS[index]}: {sizes}")
    return next(iter(found.values()), None)
