"""The mbarriers of Hopper's kernels, by kernel: what a completed phase of each means, and which threads arrive.

A `full` barrier completes when the bytes that the producer announced have landed; the producer alone arrives at it. An
`empty` barrier completes when every consumer warp has released the buffer.
"""

from __future__ import annotations

from functools import cache

from flashgen.codegen.shared_memory import Barrier, BarrierGroup, Extent, literal

_ONE_THREAD, _CONSUMER_WARPS = "1", "kConsumers * 4"


def _full(name: str) -> Barrier:
    return Barrier(f"{name}_full", _ONE_THREAD)


def _empty(name: str) -> Barrier:
    return Barrier(f"{name}_empty", _CONSUMER_WARPS)


def _pipeline(comment: str, *names: str, stages: Extent, parity: str) -> BarrierGroup:
    """Returns the full and empty barriers of pipelines with the same number of stages."""
    return BarrierGroup(comment, tuple(each for name in names for each in (_full(name), _empty(name))), stages, parity)


@cache
def forward_barriers(stages: Extent, paged: bool) -> tuple[BarrierGroup, ...]:
    """Returns the barriers of the forward kernel. `paged`: the KV cache is paged."""
    queries = "Q of a tile has landed; every consumer warp has released it."
    tail = "The last tile of V, whose end is to be zeroed, has landed."
    staged = "A stage of K has landed, and every consumer warp has released it; the same of V."
    return (
        BarrierGroup(queries, (_full("queries"), _empty("queries"))),
        *([BarrierGroup(tail, (_full("tail"),), at_end=True)] if paged else []),
        _pipeline(staged, "keys", "values", stages=stages, parity="phase"),
    )


def _queries_and_outputs(stages: Extent) -> BarrierGroup:
    comment = "A stage of Q and of the rows' statistics has landed, and has been released; the same of dO."
    return _pipeline(comment, "queries", "outputs", stages=stages, parity="phase")


def _scores(comment: str, stages: Extent, arrivals: str) -> BarrierGroup:
    barriers = Barrier("scores_full", arrivals), Barrier("scores_empty", arrivals)
    return BarrierGroup(comment, barriers, stages, parity="score_phase")


@cache
def key_barriers(stages: Extent, score_stages: Extent, dq_apart: bool) -> tuple[BarrierGroup, ...]:
    """Returns the barriers of the persistent backward kernel. `dq_apart`: another kernel computes dQ."""
    scores = _scores("Every consumer warp has written its part of dS, and has read dS.", score_stages, _CONSUMER_WARPS)
    freed = "The previous tile of dQ has been added to global memory, so that its buffer is free."
    added = BarrierGroup(freed, (Barrier("gradients_empty", _ONE_THREAD),))
    written = "Every consumer warp has written its part of a tile of dQ, of an even step and of an odd one."
    gradients = BarrierGroup(written, (Barrier("gradients_full", _CONSUMER_WARPS),), literal(2))
    work_readers = _CONSUMER_WARPS if dq_apart else f"{_CONSUMER_WARPS} + kAdders"
    released = _empty("keys"), _empty("values")
    work = _full("work_tile"), Barrier("work_tile_empty", work_readers)
    return (
        _queries_and_outputs(stages),
        *(() if dq_apart else (scores, added, gradients)),
        BarrierGroup("Every consumer warp has released K of a work tile; the same of V.", released),
        BarrierGroup("The coordinates of a work tile are written, and have been read.", work, literal(2)),
    )


@cache
def wide_key_barriers(stages: Extent, score_stages: Extent) -> tuple[BarrierGroup, ...]:
    """Returns the barriers of the kernel of wide rows, in which one warpgroup passes scores to the other."""
    exchanged = "The four warps of one warpgroup have written what they hand over; those of the other have read it."
    return _queries_and_outputs(stages), _scores(exchanged, score_stages, "4")


@cache
def query_barriers(key_stages: Extent, value_stages: Extent) -> tuple[BarrierGroup, ...]:
    """Returns the barriers of the kernel that computes dQ."""
    return (
        BarrierGroup("Q and dO have landed.", (_full("queries"),)),
        _pipeline("A stage of K has landed, and has been released.", "keys", stages=key_stages, parity="key_phase"),
        _pipeline("The same of V.", "values", stages=value_stages, parity="value_phase"),
    )
