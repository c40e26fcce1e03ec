"""Plans of several ranks: every visible score is computed once, from rows that its rank has or receives."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.analysis.intervals.evaluation import EMPTY, FULL, PARTIAL
from flashgen.errors import ArgumentError
from flashgen.language.evaluate import evaluate
from flashgen.language.operations import BATCH, HEAD, KEY, LEN_K, LEN_Q, QUERY
from flashgen.ranks import Layout, Plan, Sizes, plan_of
from flashgen.ranks.classes import Rectangle, ScoreMatrix, classify, depends_on_distance_only

IDS = (np.arange(3072) // 300).astype(np.int32)
MASKS = {
    "full": fg.full(),
    "causal": fg.causal(),
    "window": fg.sliding_window(200),
    "both_sides": fg.sliding_window(300, 100),
    "prefix": fg.prefix_lm(700),
    "dilated": fg.dilated_window(600, 3),
    "documents": fg.document("ids") & fg.causal(),
    "far": fg.trace_mask(lambda b, h, q, k: q - k > 900),
    "blocks": fg.trace_mask(lambda b, h, q, k: q // 256 >= k // 256),
}


def seen(mask: fg.Mask, queries: Any, keys: Any, len_q: int, len_k: int) -> Any:
    """Evaluates every element of the mask at positions."""
    values = {BATCH: np.int64(0), HEAD: np.int64(0), LEN_Q: np.int64(len_q), LEN_K: np.int64(len_k)}
    values |= {QUERY: queries[:, None], KEY: keys[None, :]}
    return np.broadcast_to(evaluate(mask.expression, values, {"ids": IDS}), (len(queries), len(keys)))


def rows_of(layout: Layout, rank: int) -> Any:
    """Returns the positions of a rank's rows."""
    return np.concatenate([np.arange(start, start + layout.chunk) for start in layout.starts(rank)])


def computed(plan: Plan, rank: int) -> Any:
    """Returns how often a rank's kernels count each score (rows, all keys), by the mask at their positions."""
    len_q, len_k = plan.queries.length, plan.keys.length
    counts = np.zeros((plan.queries.rows, len_k), int)
    for step in plan.steps(rank):
        owned = np.arange(len_k) if plan.scheme == "all_gather" else rows_of(plan.keys, step.owner)
        there = (
            owned
            if step.owner == rank
            else np.concatenate([owned[:0], *(owned[slice(*piece)] for piece in step.pieces)])
        )
        for block in step.blocks:
            rows, keys = np.arange(block.rows), np.arange(block.keys)
            if plan.halos and step.owner != rank:
                places = block.shard_k + keys  # of the joined keys: also this rank's
                assert set(places) <= {*there, *rows_of(plan.keys, rank)}, "rows that it did not receive"
            else:
                places = owned[block.k + keys]
                assert set(places) <= set(there), "rows that it did not receive"
            kept = np.ones((block.rows, block.keys), bool)
            if block.kind == PARTIAL:
                kept = seen(plan.spec.mask, block.shard_q + rows, block.shard_k + keys, len_q, len_k)
            np.add.at(counts, (block.q + rows[:, None], places[None, :]), kept)
    return counts


@pytest.mark.rotated(36)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("scheme", "shards"), [("ring", "zigzag"), ("ring", "plain"), ("all_gather", "zigzag")])
@pytest.mark.parametrize(("ranks", "length"), [(4, 2048), (3, 1536), (2, 3072)])
def test_each_score_is_counted_once(name: str, scheme: str, shards: str, ranks: int, length: int) -> None:
    for captures in ({}, {"ids": IDS}):
        spec = fg.AttentionSpec(64, mask=MASKS[name])
        plan = plan_of(spec, ranks, length, scheme=scheme, shards=shards, captures=captures)
        for rank in range(ranks):
            rows = rows_of(plan.queries, rank)
            wanted = seen(spec.mask, rows, np.arange(length), length, length)
            np.testing.assert_array_equal(computed(plan, rank), wanted)


@pytest.mark.parametrize("name", MASKS)
def test_classes_of_rectangles_equal_those_of_their_elements(name: str) -> None:
    """A rectangle with a full part and an empty rest is not full."""
    random, whole = np.random.default_rng(5), ScoreMatrix(MASKS[name].expression, 3072, 3072, 1, 1, {"ids": IDS})
    aligned = [Rectangle(q, 256, k, keys) for q in (0, 1024) for k in (0, 512, 768) for keys in (256, 512, 1536)]
    places = random.integers(0, 2000, (20, 2)).tolist()
    sizes = random.integers(1, 1000, (20, 2)).tolist()
    anywhere = [Rectangle(q, rows, k, keys) for (q, k), (rows, keys) in zip(places, sizes, strict=True)]
    for each in (*aligned, *anywhere):
        queries, keys = np.arange(each.q, each.q + each.rows), np.arange(each.k, each.k + each.keys)
        holds = seen(MASKS[name], queries, keys, 3072, 3072)
        expected = FULL if holds.all() else PARTIAL if holds.any() else EMPTY
        assert classify(whole, each) in (expected, PARTIAL), each


def test_a_full_rectangle_that_continues_is_partial() -> None:
    whole = ScoreMatrix(fg.trace_mask(lambda b, h, q, k: k < 256).expression, 1024, 1024, 1, 1, {})
    assert [classify(whole, Rectangle(0, 512, *keys)) for keys in ((0, 256), (0, 512), (256, 512))] == [
        FULL,
        PARTIAL,
        EMPTY,
    ]


def test_full_blocks_join_positions_only_where_nothing_depends_on_them() -> None:
    def joined(spec: fg.AttentionSpec) -> bool:
        return any(block.rows > 256 for step in plan_of(spec, 4, 2048).steps(1) for block in step.blocks)

    assert joined(fg.AttentionSpec(64, mask=fg.causal()))
    assert joined(fg.AttentionSpec(64, mask=fg.causal(), score=fg.softcap(20)))
    assert not joined(fg.AttentionSpec(64, mask=fg.causal(), score=fg.alibi(4)))
    assert not joined(fg.AttentionSpec(64, mask=fg.causal(), dropout=0.1))


def test_full_blocks_have_no_mask_and_read_positions_only_where_needed() -> None:
    plain = plan_of(fg.AttentionSpec(64, mask=fg.causal()), 4, 2048)
    assert plain.masked.sharded
    assert plain.unmasked == fg.AttentionSpec(64)
    biased = plan_of(fg.AttentionSpec(64, mask=fg.causal(), score=fg.alibi(4)), 4, 2048)
    assert biased.unmasked == fg.AttentionSpec(64, score=fg.alibi(4)).shard()


def test_zigzag_balances_causal_masks_with_one_call_per_step() -> None:
    plan = plan_of(fg.AttentionSpec(128, mask=fg.causal()), 8, 65536)
    assert plan.balance == 1.0
    for rank in range(8):
        kinds = [[block.kind for block in step.blocks] for step in plan.steps(rank)]
        assert kinds == [[PARTIAL], *[[FULL]] * 7]
    assert plan_of(fg.AttentionSpec(128, mask=fg.causal()), 8, 65536, shards="plain").balance < 0.6


def test_unread_rows_are_not_sent() -> None:
    window = plan_of(fg.AttentionSpec(128, mask=fg.sliding_window(1024)), 4, 65536, shards="plain")
    for rank in range(1, 4):
        assert [step.pieces for step in window.steps(rank)] == [(), ((15360, 16384),)]
    assert [sum(window.sent(rank)) for rank in range(4)] == [1024 * 256 * 2] * 3 + [0]
    assert [sum(window.sent(rank, backward=True)) for rank in range(4)] == [0] + [1024 * 256 * 2] * 3
    causal = plan_of(fg.AttentionSpec(128, mask=fg.causal()), 4, 65536, shards="plain")
    assert [len(step.blocks) for step in causal.steps(0)] == [1, 0, 0, 0]


@pytest.mark.parametrize("shards", ["zigzag", "plain"])
def test_long_shards_send_no_more_of_a_window_than_short_ones(shards: str) -> None:
    """The boxes of the analysis are larger there, so its results are refined."""
    spec = fg.AttentionSpec(64, mask=fg.sliding_window(128))
    sent = {
        length: {sum(plan_of(spec, 2, length, shards=shards).sent(rank)) for rank in range(2)}
        for length in (8192, 262144)
    }
    assert sent[8192] == sent[262144]


def test_each_row_of_a_window_is_in_one_block() -> None:
    """Boundary rows see a neighbour's keys next to their own rank's; the other rows need no messages."""
    one_way = plan_of(fg.AttentionSpec(64, mask=fg.sliding_window(200)), 4, 8192, shards="plain")
    assert one_way.halos
    blocks = [[block[:4] for block in halo.own] for halo in one_way.halos]
    assert blocks == [[(0, 2048, 0, 2048)], *[[(256, 1792, 0, 2048)]] * 3]
    both = plan_of(fg.AttentionSpec(64, mask=fg.sliding_window(100, 200)), 2, 8192, shards="plain")
    assert both.halos
    assert [[block[:4] for block in halo.own] for halo in both.halos] == [
        [(0, 3840, 0, 4096)],
        [(128, 3968, 0, 4096)],
    ]
    for halo, owner, theirs, own, before in zip(
        both.halos, (1, 0), ((0, 256), (3968, 128)), ((3712, 384), (0, 384)), (False, True), strict=True
    ):
        assert [boundary[1:] for boundary in halo.boundary_blocks] == [(owner, theirs, own, before)]
    assert [halo.lent for halo in both.halos] == [((1, (3968, 128)),), ((0, (0, 256)),)]


def test_each_chunk_has_boundaries_except_at_the_ends() -> None:
    """In zigzag, the last rank's chunks are adjacent, and the first rank's have no neighbour outside the sequence."""
    plan = plan_of(fg.AttentionSpec(64, mask=fg.sliding_window(200)), 4, 8192)
    assert plan.halos
    assert [[block[:4] for block in halo.own] for halo in plan.halos] == [
        [(0, 1024, 0, 1024), (1280, 768, 1024, 1024)],
        *[[(256, 768, 0, 1024), (1280, 768, 1024, 1024)]] * 2,
        [(256, 1792, 0, 2048)],
    ]
    assert [[(boundary.owner, boundary.theirs) for boundary in halo.boundary_blocks] for halo in plan.halos] == [
        [(1, (1792, 256))],
        [(0, (768, 256)), (2, (1792, 256))],
        [(1, (768, 256)), (3, (1792, 256))],
        [(2, (768, 256))],
    ]
    assert [step.owner for step in plan.steps(1)] == [1, 0, 2]


@pytest.mark.parametrize("name", ["window", "both_sides"])
@pytest.mark.parametrize("shards", ["zigzag", "plain"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_joined_boundary_keys_are_contiguous(name: str, shards: str, ranks: int) -> None:
    plan = plan_of(fg.AttentionSpec(64, mask=MASKS[name]), ranks, 2048 * ranks, shards=shards)
    assert plan.halos
    for rank, halo in enumerate(plan.halos):
        for block, owner, theirs, own, before in halo.boundary_blocks:
            received, owned = (
                rows_of(plan.keys, of)[rows.first : rows.first + rows.length]
                for of, rows in ((owner, theirs), (rank, own))
            )
            joined = np.concatenate([received, owned] if before else [owned, received])
            np.testing.assert_array_equal(joined, block.shard_k + np.arange(block.keys))
        for other in range(ranks):
            asked = [boundary.theirs for boundary in plan.halos[other].boundary_blocks if boundary.owner == rank]
            assert [lent.rows for lent in halo.lent if lent.to == other] == asked
        assert [lent.to for lent in halo.lent] == sorted(lent.to for lent in halo.lent)
        assert [boundary.owner for boundary in halo.boundary_blocks] == sorted(
            boundary.owner for boundary in halo.boundary_blocks
        )


@pytest.mark.parametrize(
    ("mask", "shards"),
    [
        (fg.causal(), "plain"),  # every rank reads earlier ones
        (fg.causal(), "zigzag"),
        (fg.sliding_window(1500), "plain"),  # most rows would wait
        (fg.sliding_window(600), "zigzag"),  # two chunks of half the length each
        (fg.sliding_window(200) | fg.prefix_lm(64), "plain"),  # also reads a distant rank
        (fg.trace_mask(lambda b, h, q, k: q // 2048 == k // 2048), "plain"),  # reads no other rank
        (fg.trace_mask(lambda b, h, q, k: q // 1024 == k // 1024), "zigzag"),
        (fg.trace_mask(lambda b, h, q, k: (q - k > 1800) & (q - k < 2000)), "zigzag"),  # only its own keys
    ],
)
def test_plans_without_a_halo_use_a_ring(mask: fg.Mask, shards: str) -> None:
    assert plan_of(fg.AttentionSpec(64, mask=mask), 4, 8192, shards=shards).halos is None


def test_bytes_follow_from_rows_and_sizes() -> None:
    sizes = Sizes(2, 32, 8)
    ring = plan_of(fg.AttentionSpec(128, value_dim=64, mask=fg.full()), 4, 4096, sizes=sizes)
    row = 2 * 8 * (128 + 64)
    assert ring.sent(0) == (0, *[1024 * row * 2] * 3)
    assert ring.sent(0, backward=True) == (0, *[1024 * row * (2 + 2)] * 3)  # each gradient comes from one block
    gathered = plan_of(fg.AttentionSpec(128, value_dim=64), 4, 4096, scheme="all_gather", sizes=sizes)
    assert gathered.sent(0) == (3 * 1024 * row * 2,)
    heads = plan_of(fg.AttentionSpec(128, value_dim=64), 4, 4096, scheme="ulysses", sizes=sizes)
    assert heads.exchanged() == 2 * 1024 * (32 + 8) * (128 + 64) * 2 * 3 // 4
    assert heads.sizes == Sizes(2, 8, 2)


def test_gradients_are_sent_in_float32_where_several_blocks_add() -> None:
    sizes, row, kinds = Sizes(1, 4, 4), 4 * 128, set()
    for mask in (fg.causal(), fg.document("ids") & fg.causal()):
        ring = plan_of(fg.AttentionSpec(64, mask=mask), 2, 4096, sizes=sizes)
        for rank in (0, 1):
            step = ring.steps(rank)[1]
            read = [set(range(block.k, block.k + block.keys)) for block in step.blocks]
            kinds.add(step.adds)
            assert step.adds == (sum(map(len, read)) > len(set().union(*read)))
            back = ring.sent(rank, backward=True)[1] - ring.sent(rank)[1]
            assert back == step.received * row * (4 if step.adds else 2)
    assert kinds == {False, True}


def test_captured_numbers_are_used() -> None:
    spec = fg.AttentionSpec(64, mask=fg.sliding_window(fg.Scalar("window")))
    unknown, known = plan_of(spec, 4, 8192), plan_of(spec, 4, 8192, captures={"window": 128})
    assert sum(sum(known.sent(rank)) for rank in range(4)) < sum(sum(unknown.sent(rank)) for rank in range(4))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("shards", ["zigzag", "plain"])
def test_layouts_assign_each_position_once(ranks: int, shards: str) -> None:
    layout = Layout(ranks, 48 * ranks, shards)
    dealt = np.concatenate([rows_of(layout, rank) for rank in range(ranks)])
    assert sorted(dealt) == list(range(48 * ranks))
    in_order = [rows_of(layout, rank)[row : row + layout.chunk] for rank, row in layout.in_order()]
    np.testing.assert_array_equal(np.concatenate(in_order), np.arange(48 * ranks))
    for rank in range(ranks):
        stretches, rows = layout.stretches(rank), rows_of(layout, rank)
        assert len(stretches) == 1 + (shards == "zigzag" and rank < ranks - 1)
        positions = np.concatenate([np.arange(first, first + length) for first, length, _ in stretches])
        np.testing.assert_array_equal(positions, rows)
        assert [stretch.row_of(stretch.end - 1) for stretch in stretches][-1] == layout.rows - 1
        assert [layout.place(position) for position in rows] == [(rank, row) for row in range(layout.rows)]


@pytest.mark.parametrize(
    ("mask", "wanted"),
    [
        (fg.causal(), True),
        (fg.sliding_window(64) & ~fg.sliding_window(3), True),
        (fg.trace_mask(lambda b, h, q, k: (q - k) % 4 == 0), True),
        (fg.prefix_lm(50), False),
        (fg.trace_mask(lambda b, h, q, k: q // 64 == k // 64), False),
        (fg.trace_mask(lambda b, h, q, k: (q + k) % 4 == 0), False),
        (fg.document("ids"), False),
    ],
)
def test_which_masks_depend_on_distances(mask: fg.Mask, wanted: bool) -> None:
    assert depends_on_distance_only(mask.expression) == wanted


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"length": 1000}, "pad the sequence to 1008"),
        ({"scheme": "butterfly"}, "scheme='butterfly'"),
        ({"shards": "striped"}, "shards='striped'"),
        ({"scheme": "ulysses", "sizes": Sizes(1, 32, 4)}, "repeat the heads of k and v"),
        ({"scheme": "ulysses_ring", "heads": 3}, "ranks=8 is not a multiple of the 3"),
        ({"spec": fg.AttentionSpec(64, dropout=0.1), "length": 8 * 48}, "multiple of 512"),
        ({"spec": fg.AttentionSpec(64, layout="thd")}, "without layout .thd."),
        ({"spec": fg.AttentionSpec(64).shard()}, "without layout .thd."),
    ],
)
def test_impossible_plans_are_refused(given: dict[str, Any], message: str) -> None:
    how: dict[str, Any] = {"spec": fg.AttentionSpec(64, mask=fg.causal()), "length": 1024, "ranks": 8} | given
    with pytest.raises(ArgumentError, match=message):
        plan_of(how.pop("spec"), how.pop("ranks"), how.pop("length"), **how)


def test_work_shares_of_a_plan_are_approximately_right() -> None:
    plan = plan_of(fg.AttentionSpec(64, mask=fg.causal()), 4, 8192)
    assert math.isclose(sum(plan.work(rank) for rank in range(4)), 8192 * 8192 / 2, rel_tol=0.05)
