"""Sums along the diagonals of a warp's tile, compared with NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from flashgen.codegen.environment import primitives_for
from flashgen.codegen.targets import target_named

KERNEL = (Path(__file__).parent / "kernels" / "diagonals.cu").read_text()


def test_a_warp_sums_along_the_diagonals_of_a_tile(run: Any) -> None:
    """The lanes' parts of a diagonal add up to it; 14 lanes, in which a diagonal begins, have parts of every tile."""
    _, shared = primitives_for(KERNEL, target_named("sm_90a"))
    tile = np.random.default_rng(5).integers(1, 99, (16, 24)).astype(np.float32)
    sums = np.full((5, 32), np.nan, np.float32)
    run("\n".join([*shared, KERNEL]), "diagonals", tile, sums)
    n, lane = np.indices(sums.shape)
    diagonals = n * 8 - 8 + lane % 4 * 2 - lane // 4
    for diagonal in range(diagonals.min(), diagonals.max() + 1):
        assert sums[diagonals == diagonal].sum() == np.trace(tile, diagonal), diagonal
    begins = (lane % 4 == 0) | (lane < 8)
    assert not sums[~begins].any() and begins[0].sum() == 14
