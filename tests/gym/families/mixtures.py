"""Combinations of masks and scores of the other families."""

from __future__ import annotations

from families import documents, generation, scores, windows
from families.entry import Entry


def entries(length: int) -> tuple[Entry, ...]:
    of = {entry.name: entry for family in (documents, generation, scores, windows) for entry in family.entries(length)}
    return (
        mixed(of["document_causal"], of["alibi"]),
        mixed(of["sliding_window"], of["softcap"]),
        mixed(of["tree_decoding"], of["low_rank_bias"]),
        mixed(of["block_diffusion"], of["relative_table"]),
    )


def mixed(masked: Entry, scored: Entry) -> Entry:
    """The mask of one and the score of the other; both may have captures."""
    return Entry(
        f"{masked.name}+{scored.name}",
        masked.mask,
        scored.score,
        lambda shape, random: {
            name: value
            for entry in (masked, scored)
            if entry.captures
            for name, value in entry.captures(shape, random).items()
        },
        masked.allowed,
        scored.modified,
    )
