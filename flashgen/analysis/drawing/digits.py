"""Numbers in pixels, for pictures without a font: 3 wide and 5 high, a column between two digits."""

from __future__ import annotations

from typing import Any

import numpy as np

WIDTH, HEIGHT = 3, 5
# Each digit's five rows, three bits a row, the left one the highest.
_DIGITS = (
    (7, 5, 5, 5, 7), (2, 6, 2, 2, 7), (7, 1, 7, 4, 7), (7, 1, 7, 1, 7), (5, 5, 7, 1, 1),
    (7, 4, 7, 1, 7), (7, 4, 7, 5, 7), (7, 1, 1, 1, 1), (7, 5, 7, 5, 7), (7, 5, 7, 1, 7),
)  # fmt: skip


def drawn(number: int, scale: int = 1) -> np.ndarray[Any, Any]:
    """A number that is not negative, as booleans: (5 · scale) rows, true where there is ink."""
    parts: list[np.ndarray[Any, Any]] = []
    for character in str(number):
        rows = np.array(_DIGITS[int(character)])[:, None]
        parts += [(rows >> np.arange(WIDTH - 1, -1, -1)) & 1, np.zeros((HEIGHT, 1), int)]
    return np.kron(np.hstack(parts[:-1]), np.ones((scale, scale), int)).astype(bool)
