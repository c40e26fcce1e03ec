"""The colours of every picture: tile maps in the terminal, as SVG and as PNG, timelines, and pages of reports.

Blue and orange are told apart by people who see few colours, and stand on white and on black.
"""

from __future__ import annotations

FULL, PARTIAL, GROUND = "#2b6cb0", "#f2a541", "#f3f4f6"  # tiles without mask code, with it, and never visited
INK, PAPER, RULE = "#1f2937", "#ffffff", "#9ca3af"  # words, what they stand on, and lines of axes

# What a warp does in a timeline.
COPY, PRODUCT, EXPONENTIALS, WAIT, STORE = "#4c9f70", FULL, PARTIAL, "#d1d5db", "#8b5fbf"
