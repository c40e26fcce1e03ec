"""The README's gallery: tile maps of eight masks, each a name in this file.

python docs/gallery.py                                                   # writes docs/gallery-*.svg
flashgen show docs/gallery.py:dilated --what tiles --len-q 2048          # one of them, in a kernel's own tiles
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import flashgen as fg
from flashgen.analysis.drawing.tile_maps import to_svg
from flashgen.analysis.tile_classes import tile_map

LENGTH = 2048
TILE = (64, 64)
SIZE = 200  # pixels
ROWS, COLUMNS, RADIUS = 32, 64, 6  # of a canvas, and of a neighbourhood on it

document_ids = np.searchsorted([190, 700, 830, 1410, 1700], np.arange(LENGTH), side="right").astype(np.int32)


def neighbourhood(b: Any, h: Any, q: Any, k: Any) -> Any:
    """The square of 13 × 13 pixels around a pixel, moved inwards at the edges of the canvas."""
    row = fg.clamp(q // COLUMNS, RADIUS, ROWS - 1 - RADIUS)
    column = fg.clamp(q % COLUMNS, RADIUS, COLUMNS - 1 - RADIUS)
    return (abs(row - k // COLUMNS) <= RADIUS) & (abs(column - k % COLUMNS) <= RADIUS)


def block_diffusion(b: Any, h: Any, q: Any, k: Any) -> Any:
    """A noised half before a clean one: a noised block of 160 sees itself and the clean blocks before it."""
    half, block = LENGTH // 2, 160
    noised_q, noised_k = q < half, k < half
    block_q, block_k = q % half // block, k % half // block
    itself = (block_q == block_k) & (noised_q == noised_k)
    context = (block_q > block_k) & noised_q & ~noised_k
    return itself | context | ((block_q >= block_k) & ~noised_q & ~noised_k)


def global_window(b: Any, h: Any, q: Any, k: Any) -> Any:
    """A window, and 32 tokens in every 640 that see everything and are seen by everything."""
    return (abs(q - k) <= 100) | (q % 640 < 32) | (k % 640 < 32)


causal = fg.causal()
window = fg.sliding_window(500)
prefix = fg.prefix_lm(600)
documents = fg.causal() & fg.document("document_ids")
dilated = fg.causal() & fg.dilated_window(1500, 256)

GALLERY: dict[str, Any] = {
    "causal": causal,
    "sliding window": window,
    "prefix": prefix,
    "packed documents": documents,
    "dilated": dilated,
    "2-D neighbourhood": neighbourhood,
    "block diffusion": block_diffusion,
    "global + window": global_window,
}


def pictures() -> dict[str, str]:
    """Returns the SVG of each picture by file name."""
    return {f"gallery-{title.lower().replace(' + ', '-').replace(' ', '-')}.svg": drawn(title) for title in GALLERY}


def drawn(title: str) -> str:
    spec = fg.AttentionSpec(head_dim=64, mask=GALLERY[title])
    captures = {"document_ids": document_ids} if spec.mask.captures else {}
    return to_svg(tile_map(spec.mask.expression, TILE, LENGTH, LENGTH, captures=captures), title, SIZE)


def main() -> None:
    for name, svg in pictures().items():
        (Path(__file__).parent / name).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
