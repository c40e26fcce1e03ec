"""The mbarriers of Hopper's kernels, by kernel: what a completed phase of each means, and which threads arrive.

A `full` barrier completes when the bytes that the producer announced have landed; the producer alone arrives at it. An
`empty` barrier completes when every consumer warp has released the buffer.
"""

from __future__ import annotations

from functools import cache

from flashgen.codegen.shared_memory import Barrier, BarrierGroup, Extent, literal

WARPS_OF_GROUP = 4
_GROUP_WARPS, _CONSUMER_WARPS = str(WARPS_OF_GROUP), f"kConsumers * {WARPS_OF_GROUP}"
_ONE_THREAD, _ARRAY_WARPS = "1", "kArrayWarps"
_CLUSTER_WARPS = str(3 * WARPS_OF_GROUP)  # of the three consumer warpgroups of a CTA of a cluster


def _full(name: str, writers: int = 1) -> Barrier:
    return Barrier(f"{name}_full", str(writers))


def _empty(name: str, readers: str = _CONSUMER_WARPS) -> Barrier:
    return Barrier(f"{name}_empty", readers)


def _pipeline(comment: str, *names: str, stages: Extent) -> BarrierGroup:
    """Returns the full and empty barriers of pipelines with the same number of stages."""
    return BarrierGroup(comment, tuple(each for name in names for each in (_full(name), _empty(name))), stages)


@cache
def forward_barriers(
    stages: Extent,
    paged: bool,
    shared_kv: bool,
    passed_stages: Extent | None,
    array_stages: Extent | None = None,
    converted: bool = False,
    part_stages: tuple[Extent, Extent] | None = None,
) -> tuple[BarrierGroup, ...]:
    """Returns the barriers of the forward kernel. Arguments: see `key_tile_barriers`.

    Args:
        array_stages: Stages of the tiles of a captured array, if warps of the producer warpgroup load them.
    """
    queries = "queries_full: Q of a work tile has landed. queries_empty: every consumer warp has read it."
    group = BarrierGroup(queries, (_full("queries"), _empty("queries")))
    arrays = _of_arrays(array_stages) if array_stages else ()
    return group, *key_tile_barriers(stages, paged, shared_kv, passed_stages, converted, part_stages), *arrays


def _array_tiles(stages: Extent) -> BarrierGroup:
    comment = (
        "arrays_full: every warp that loads a tile of a captured array has waited for its copies. arrays_empty: every "
        "consumer warp has read it."
    )
    return BarrierGroup(comment, (Barrier("arrays_full", _ARRAY_WARPS), _empty("arrays")), stages)


def _of_arrays(stages: Extent) -> tuple[BarrierGroup, ...]:
    work = (
        "next_work_full: the producer has published a work tile. next_work_empty: every warp that loads tiles of an "
        "array has read it."
    )
    published = Barrier("next_work_full", _ONE_THREAD), Barrier("next_work_empty", _ARRAY_WARPS)
    return _array_tiles(stages), BarrierGroup(work, published)


@cache
def decode_barriers(
    stages: Extent, passed_stages: Extent, shared_kv: bool, rest: bool, writers: int, scheduled: bool
) -> tuple[BarrierGroup, ...]:
    """Returns the barriers of the decode kernel, in which one warpgroup computes P for the value warpgroups.

    Args:
        stages: Stages of the tiles of K and of V.
        passed_stages: Stages of P.
        shared_kv: Whether V is a part of K. A tile of K then has the columns that are V.
        rest: Whether K has other columns as well, which P replaces.
        writers: Arrivals at the full barriers of a tile of K of which V is a part: the thread that starts the copies,
            or the warps of the producer if these write the tile.
        scheduled: Whether a CTA has several work tiles.
    """
    readers = str(2 * WARPS_OF_GROUP)
    written = "have landed" if writers == 1 else "are written by every warp of the producer"
    if shared_kv:
        comment = (
            f"keys_full: the columns of a tile of K that are V {written}. keys_empty: every warp of the value "
            "warpgroups has read them, for which it needs P, so that the score warpgroup has read them before."
        )
        tiles = BarrierGroup(comment, (_full("keys", writers), _empty("keys", readers)), stages)
    else:
        comment = (
            "keys_full, values_full: a tile of K, or V, has landed. keys_empty: every warp of the score warpgroup has "
            "read K. values_empty: every warp of the value warpgroups has read V."
        )
        keys = _full("keys"), _empty("keys", _GROUP_WARPS)
        tiles = BarrierGroup(comment, (*keys, _full("values"), _empty("values", readers)), stages)
    passed = (
        "passed_full: every warp of the score warpgroup has written its rows of P. passed_empty: every warp of the "
        "value warpgroups has read P."
    )
    barriers: tuple[Barrier, ...] = Barrier("passed_full", _GROUP_WARPS), _empty("passed", readers)
    if rest:
        passed = f"rest_full: the other columns of a tile of K, which P replaces, {written}. {passed}"
        barriers = _full("rest", writers), *barriers
    rows = "rows_full: every warp of the score warpgroup has written where the rows of a work tile's output begin."
    of_rows: tuple[Barrier, ...] = (Barrier("rows_full", _GROUP_WARPS),)
    if scheduled:
        rows += " rows_empty: every warp of the value warpgroups has read them."
        of_rows += (_empty("rows", readers),)
    return tiles, BarrierGroup(passed, barriers, passed_stages), BarrierGroup(rows, of_rows)


@cache
def key_tile_barriers(
    stages: Extent,
    paged: bool,
    shared_kv: bool,
    passed_stages: Extent | None,
    converted: bool = False,
    part_stages: tuple[Extent, Extent] | None = None,
) -> tuple[BarrierGroup, ...]:
    """Returns the barriers of the tiles of K and V, and of what consumer warpgroups pass to each other.

    Args:
        paged: Whether pages are copied, whose rows beyond the last key are zeroed.
        shared_kv: Whether V is a part of K.
        passed_stages: Stages of P, if a consumer warpgroup passes it to another one with the same rows.
        converted: Whether the producer warpgroup converts K and V of 8 bits.
        part_stages: Stages of K and of V, if a stage holds a part of a tile, which one consumer warpgroup reads.
    """
    if converted:
        return (_converted(stages),)
    tail = "tail_full: the last tile of V, whose end is to be zeroed, has landed."
    passed = (
        "passed_full: each warp of the first warpgroup has written its rows of P, or its row states. passed_empty: "
        "each warp of the second one has read them."
    )
    return (
        *([BarrierGroup(tail, (_full("tail"),), at_end=True)] if paged else []),
        *(_of_parts(*part_stages) if part_stages else _staged(stages, shared_kv, bool(passed_stages))),
        *([_between_consumers(passed, "passed", passed_stages, _GROUP_WARPS)] if passed_stages else []),
    )


def _converted(stages: Extent) -> BarrierGroup:
    """Returns the barriers of the tiles of K and V, which half of the warps of the producer warpgroup write."""
    comment = (
        "keys_full, values_full: each of the two producer warps that convert K, or V, has written its part of a tile. "
        "keys_empty, values_empty: every consumer warp has read it."
    )
    barriers = (each for name in ("keys", "values") for each in (_full(name, WARPS_OF_GROUP // 2), _empty(name)))
    return BarrierGroup(comment, tuple(barriers), stages)


def _of_parts(key_stages: Extent, value_stages: Extent) -> tuple[BarrierGroup, ...]:
    """Returns the barriers of parts of tiles of K and V, which one consumer warpgroup reads."""
    keys = (
        "keys_full: a part of the columns of a tile of K has landed. keys_empty: every warp of the first warpgroup has "
        "read it."
    )
    values = (
        "values_full: half of the columns of a tile of V has landed. values_empty: every warp of the warpgroup with "
        "these columns of the output has read it."
    )
    return (
        BarrierGroup(keys, (_full("keys"), _empty("keys", _GROUP_WARPS)), key_stages),
        BarrierGroup(values, (_full("values"), _empty("values", _GROUP_WARPS)), value_stages),
    )


def _staged(stages: Extent, shared_kv: bool, split: bool) -> tuple[BarrierGroup, ...]:
    """Returns the barriers of the tiles of K and V. `split`: one consumer warpgroup of two computes the scores."""
    if shared_kv and split:
        comment = (
            "first_full, rest_full: the first kOutputColumns columns of a tile of K, or the others, have landed. The "
            "first warpgroup reads all columns for the scores, and then the first ones as V. first_empty: each of its "
            "warps has read them. rest_empty: each warp of the second warpgroup has read the others as V, for which it "
            "needs P, so that the first warpgroup has read them before."
        )
        parts = (each for name in ("first", "rest") for each in (_full(name), _empty(name, _GROUP_WARPS)))
        return (BarrierGroup(comment, tuple(parts), stages),)
    if shared_kv:
        comment = (
            "keys_full: a tile of K, of which V is a part, has landed. keys_empty: every consumer warp has read it."
        )
        return (_pipeline(comment, "keys", stages=stages),)
    comment = (
        "keys_full, values_full: a tile of K, or V, has landed. keys_empty, values_empty: every consumer warp has read "
        "it."
    )
    return (_pipeline(comment, "keys", "values", stages=stages),)


def _queries_and_d_o(stages: Extent) -> BarrierGroup:
    comment = (
        "queries_full: a tile of Q, LSE and D have landed, and K if it is the first of a work tile. d_o_full: a "
        "tile of dO has landed, and V if it is the first of a work tile. queries_empty, d_o_empty: every "
        "consumer warp has read Q, or dO."
    )
    return _pipeline(comment, "queries", "d_o", stages=stages)


def _between_consumers(comment: str, name: str, stages: Extent, arrivals: str) -> BarrierGroup:
    """Returns the full and empty barriers of a pipeline that consumer warps fill, and other consumer warps read."""
    barriers = Barrier(f"{name}_full", arrivals), Barrier(f"{name}_empty", arrivals)
    return BarrierGroup(comment, barriers, stages)


@cache
def key_barriers(
    stages: Extent,
    ds_stages: Extent,
    dq_apart: bool,
    stages_dq: bool,
    in_turns: bool,
    array_stages: Extent | None = None,
) -> tuple[BarrierGroup, ...]:
    """Returns the barriers of the persistent backward kernel.

    Args:
        dq_apart: Whether another kernel computes dQ.
        stages_dq: Whether dQ is staged in shared memory for a dQ writer, unless another kernel computes it.
        in_turns: Whether there are two dQ writers, for alternate iterations.
        array_stages: Stages of the tiles of a captured array, if idle warps load them.
    """
    stages_dq = stages_dq and not dq_apart
    ds_comment = "ds_full: every consumer warp has written its part of dS. ds_empty: every consumer warp has read dS."
    ds = _between_consumers(ds_comment, "ds", ds_stages, _CONSUMER_WARPS)
    dq_read = "dq_empty: the dQ writer has read a tile of dQ. There is one phase for each iteration."
    dq_written = (
        "dq_full(parity): every consumer warp has written its part of dQ of an iteration with this parity. Both "
        "barriers guard the same buffer."
    )
    if in_turns:
        dq_written += " Each of the two dQ writers waits for one of them."
    dq = (
        BarrierGroup(dq_read, (Barrier("dq_empty", _ONE_THREAD),)),
        BarrierGroup(dq_written, (Barrier("dq_full", _CONSUMER_WARPS),), literal(2)),
    )
    readers = f"{_CONSUMER_WARPS} + kDqWriters" if stages_dq else _CONSUMER_WARPS
    readers += f" + {_ARRAY_WARPS}" if array_stages else ""
    released = _empty("keys"), _empty("values")
    work_tile = _full("work_tile"), _empty("work_tile", readers)
    published = (
        "work_tile_full: the producer has published a work tile. work_tile_empty: all its readers are done with it."
    )
    return (
        _queries_and_d_o(stages),
        *(() if dq_apart else (ds,)),
        *(dq if stages_dq else ()),
        BarrierGroup(
            "keys_empty, values_empty: every consumer warp has read K, or V. There is one phase for each work tile.",
            released,
        ),
        BarrierGroup(published, work_tile, literal(2)),
        *((_array_tiles(array_stages),) if array_stages else ()),
    )


@cache
def wide_key_barriers(stages: Extent, exchange_stages: Extent) -> tuple[BarrierGroup, ...]:
    """Returns the barriers of the kernel of wide rows, in which one warpgroup passes scores to the other."""
    comment = (
        "exchange_full: each warp of a warpgroup has written what it passes to the other one. exchange_empty: each "
        "warp of the other one has read it."
    )
    return _queries_and_d_o(stages), _between_consumers(comment, "exchange", exchange_stages, _GROUP_WARPS)


@cache
def query_barriers(key_stages: Extent, value_stages: Extent) -> tuple[BarrierGroup, ...]:
    """Returns the barriers of the kernel that computes dQ."""
    return (
        BarrierGroup("queries_full: Q and dO have landed.", (_full("queries"),)),
        _pipeline(
            "keys_full: a tile of K has landed. keys_empty: every consumer warp has read it.", "keys", stages=key_stages
        ),
        _pipeline(
            "values_full: a tile of V has landed. values_empty: every consumer warp has read it.",
            "values",
            stages=value_stages,
        ),
    )


@cache
def cluster_barriers(stages: Extent, passed_stages: Extent, both_accumulate: bool) -> tuple[BarrierGroup, ...]:
    """Returns the barriers of a kernel of clusters of two CTAs.

    Args:
        both_accumulate: Whether both CTAs accumulate a gradient, or only the first one does.
    """
    streamed = (
        "streamed_full: a streamed tile has landed, and the tile that the CTA holds with the first. streamed_empty: "
        "every warp that reads tiles has read it."
    )
    passed = (
        "passed_full: the fragments of the other CTA have landed. passed_empty: each warp of the other CTA that reads "
        "them has read what this one has passed."
    )
    readers = _CLUSTER_WARPS if both_accumulate else f"cluster_rank() == 0 ? {_CLUSTER_WARPS} : 4"
    # P is read by the score warpgroup, and by those that accumulate if it is their operand. dS is read by these alone.
    loaders = "cluster_rank() == 0 ? 12 : 8" if both_accumulate else "cluster_rank() == 0 ? 4 : 8"
    return (
        BarrierGroup(streamed, (_full("streamed"), _empty("streamed", readers)), stages),
        BarrierGroup(passed, (_full("passed"), _empty("passed", loaders)), passed_stages),
    )
