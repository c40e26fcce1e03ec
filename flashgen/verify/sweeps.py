"""The cases that `flashgen verify` runs without a SPEC, by the size of the sweep."""

from __future__ import annotations

from typing import Literal

from flashgen.verify.variants import Case, all_cases, named_cases, ragged_cases, shard_cases, sink_cases, stepping_cases

SweepSize = Literal["quick", "small", "full"]
QUICK_LENGTHS = 2  # of a user's spec


def sweep_cases(size: SweepSize) -> tuple[Case, ...]:
    """Returns the cases of a sweep.

    Args:
        size: "small" has each named mask and score function, varlen batches of them, sinks and shards. "full" also has
            every head dim and large lengths. "quick" is a part of "small": every third of the named variants once, at
            lengths of several tiles, and a case of each of the others.
    """
    if size == "quick":
        return (*stepping_cases()[1::3], ragged_cases()[1], sink_cases()[0], shard_cases()[0])
    named = all_cases() if size == "full" else named_cases()
    return (*named, *ragged_cases(), *sink_cases(), *shard_cases())
