"""The acceptance suite: attention variants as users write them, each with a second, independent definition.

A family is a file with `entries(length)`, which returns its variants with windows, blocks and canvases for sequences of
about that length.
"""

from __future__ import annotations

from families import blocks, canvas, documents, generation, mixtures, scores, t5, video, windows
from families.entry import Entry

FAMILIES = (windows, documents, generation, canvas, video, blocks, scores, t5, mixtures)


def entries(length: int) -> tuple[Entry, ...]:
    """Returns every variant of the suite for sequences of about this length."""
    return tuple(entry for family in FAMILIES for entry in family.entries(length))
