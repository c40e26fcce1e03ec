"""The colours of all pictures: tile maps in the terminal and as SVG, timelines, and pages of reports.

Blue and orange can be distinguished by readers with colour vision deficiency, on white and on black.
"""

from __future__ import annotations

FULL, PARTIAL, GROUND = "#2b6cb0", "#f2a541", "#f3f4f6"  # tiles without mask code, with mask code, and skipped
INK, PAPER, RULE = "#1f2937", "#ffffff", "#9ca3af"  # text, background, and lines of axes

# Activities of a warp in a timeline.
COPY, PRODUCT, EXPONENTIALS, WAIT, STORE = "#4c9f70", FULL, PARTIAL, "#d1d5db", "#8b5fbf"
