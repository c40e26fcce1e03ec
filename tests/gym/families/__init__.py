"""The acceptance suite: attention variants as their users write them, each with its meaning said twice.

A family is a file with `entries(length)`: its variants, with windows, blocks and canvases fit for sequences of about
that length.
"""

from __future__ import annotations

from families import blocks, canvas, documents, generation, mixtures, scores, t5, video, windows
from families.entry import Entry

FAMILIES = (windows, documents, generation, canvas, video, blocks, scores, t5, mixtures)


def entries(length: int) -> tuple[Entry, ...]:
    """Every variant of the suite, for sequences of about this length."""
    return tuple(entry for family in FAMILIES for entry in family.entries(length))
