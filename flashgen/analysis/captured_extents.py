"""How many sequences and heads the captured arrays of a mask are for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import sympy

from flashgen.errors import ArgumentError
from flashgen.language.operations import BATCH, HEAD, Load

_ARGUMENTS = {BATCH: "batch", HEAD: "heads"}


def captured_extent(mask: sympy.Basic, index: sympy.Symbol, captures: Mapping[str, Any]) -> int | None:
    """The batch (index BATCH) or the number of heads (HEAD) that the captures of a mask have values for.

    None where no captured array tells: none is indexed by it, or all have size 1 there.
    Raises ArgumentError where two arrays say different numbers.
    """
    found: dict[str, int] = {}
    for load in sorted(mask.atoms(Load), key=str):
        shape = np.shape(captures.get(load.capture.name, ()))
        for size, position in zip(shape, load.indices, strict=False):
            if position == index and size > 1:
                found[load.capture.name] = size
    if len(set(found.values())) > 1:
        told = ", ".join(f"{name!r} {size}" for name, size in found.items())
        raise ArgumentError(f"captures have values for different numbers of {_ARGUMENTS[index]}: {told}")
    return next(iter(found.values()), None)
