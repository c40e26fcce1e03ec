"""Every list equals the classes by brute force, in both directions, on the emulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.attention.tile_lists import TileLister, TileLists
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan
from flashgen.codegen.targets import target_named
from flashgen.codegen.tile_list_kernel import Direction, render_lists
from flashgen.language.evaluate import evaluate
from flashgen.language.operations import BATCH, HEAD, KEY, LEN_K, LEN_Q, QUERY
from flashgen.launch.engines import Emulator
from flashgen.runtime.schedule import Schedule, schedules

EMPTY, PARTIAL, FULL = 0, 1, 2


@dataclass(frozen=True)
class Listed:
    """A mask, the lengths at which it is listed, and its captures."""

    mask: fg.Mask
    len_q: int
    len_k: int
    captures: dict[str, Any] = field(default_factory=dict)
    batch: int = 1
    heads: int = 1


def brute_force(case: Listed, tile: tuple[int, int]) -> np.ndarray:
    """Returns the class of every tile, by its elements, as the kernels define it."""
    values = {
        BATCH: np.arange(case.batch)[:, None, None, None],
        HEAD: np.arange(case.heads)[:, None, None],
        QUERY: np.arange(case.len_q)[:, None],
        KEY: np.arange(case.len_k),
        LEN_Q: case.len_q,
        LEN_K: case.len_k,
    }
    holds = evaluate(case.mask.expression, values, case.captures)
    holds = np.broadcast_to(holds, (case.batch, case.heads, case.len_q, case.len_k))
    tiles = [-(-case.len_q // tile[0]), -(-case.len_k // tile[1])]
    classes = np.zeros((case.batch, case.heads, *tiles), np.int8)
    for i in range(tiles[0]):
        for j in range(tiles[1]):
            part = holds[:, :, i * tile[0] : (i + 1) * tile[0], j * tile[1] : (j + 1) * tile[1]]
            whole = (j + 1) * tile[1] <= case.len_k
            classes[:, :, i, j] = np.where(
                part.all(axis=(2, 3)) & whole, FULL, np.where(part.any(axis=(2, 3)), PARTIAL, EMPTY)
            )
    return classes


def list_tiles(
    case: Listed,
    tile: tuple[int, int],
    direction: Direction = "keys",
    sanitize: Any = None,
    schedule: Schedule | None = None,
) -> TileLists:
    """Returns the lists that the emitted kernel writes on the emulator."""
    plan = ForwardPlan(*tile, 1)
    engine = Emulator(sanitize, schedule or Schedule())
    spec = fg.AttentionSpec(head_dim=32, mask=case.mask)
    lister = TileLister(spec, render_lists(spec, target_named("sm_80"), plan, direction), engine, "")
    return lister.make(case.len_q, case.len_k, case.batch, case.heads, case.captures)


@pytest.fixture(autouse=True)
def _compact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes small lists be counted first as well, so that they have no gaps."""
    monkeypatch.setattr("flashgen.attention.tile_lists._FEW_ENTRIES", 0)


@pytest.fixture
def check() -> Callable[..., TileLists]:
    """Lists a case and compares with brute force; where lists share batch or heads, the classes must be equal."""

    def compare(case: Listed, tile: tuple[int, int], direction: Direction = "keys", **options: Any) -> TileLists:
        lists = list_tiles(case, tile, direction, **options)
        listed, expected = lists.tile_map().classes, brute_force(case, tile)
        np.testing.assert_array_equal(np.broadcast_to(listed, expected.shape), expected)
        check_compact(lists)
        return lists

    return compare


def check_compact(lists: TileLists) -> None:
    """Asserts ascending entries, and no gaps between lists."""
    ends = np.cumsum(lists.counts.ravel())
    np.testing.assert_array_equal(lists.offsets.ravel(), ends - lists.counts.ravel())
    if ends.size:
        assert lists.entries.size == max(ends[-1], 1)
    for begin, count in zip(lists.offsets.ravel(), lists.counts.ravel(), strict=True):
        assert (np.diff(lists.entries[begin : begin + count] >> 1) > 0).all()


DIRECTIONS = ("keys", "queries")
_random = np.random.default_rng(7)


def _sorted_ids(length: int, documents: int) -> np.ndarray:
    return np.sort(_random.integers(0, documents, length)).astype(np.int32)


def _neighbourhood(rows: int, columns: int, reach: int) -> Listed:
    """Keys within `reach` of the query on a canvas, with the centre clamped so that every query has equally many."""

    def near(b: Any, h: Any, q: Any, k: Any) -> Any:
        row = fg.clamp(q // columns, reach, rows - 1 - reach)
        column = fg.clamp(q % columns, reach, columns - 1 - reach)
        return (abs(row - k // columns) <= reach) & (abs(column - k % columns) <= reach)

    return Listed(fg.trace_mask(near), rows * columns, rows * columns)


def _global_and_window(length: int, window: int) -> Listed:
    seen_by_all = fg.Tensor("seen_by_all", "bool", 1)
    marked = np.zeros(length, np.bool_)
    marked[[0, length // 2]] = True
    mask = fg.trace_mask(lambda b, h, q, k: (abs(q - k) <= window) | seen_by_all[q] | seen_by_all[k])
    return Listed(mask, length, length, {"seen_by_all": marked})


def _block_diffusion(length: int, block: int) -> Listed:
    def diffusion(b: Any, h: Any, q: Any, k: Any) -> Any:
        noisy_q, noisy_k = q < length, k < length
        block_q, block_k = (q % length) // block, (k % length) // block
        same = (block_q == block_k) & (noisy_q == noisy_k)
        return same | ((block_q > block_k) & noisy_q & ~noisy_k) | ((block_q >= block_k) & ~noisy_q & ~noisy_k)

    return Listed(fg.trace_mask(diffusion), 2 * length, 2 * length)


def _shared_prefix(length: int) -> Listed:
    off, doc, prefix = (fg.Tensor(name, "int32", 1) for name in ("off", "doc", "prefix"))

    def shared(b: Any, h: Any, q: Any, k: Any) -> Any:
        own = doc[q]
        before = prefix[own]
        return ((k >= off[own]) & (q >= k)) | ((own != before) & (off[before] <= k) & (k < off[before + 1]))

    starts = np.array([0, 40, 90, 150, 170, length], np.int32)
    ids = np.searchsorted(starts, np.arange(length), side="right").astype(np.int32) - 1
    return Listed(
        fg.trace_mask(shared),
        length,
        length,
        {"off": starts, "doc": ids, "prefix": np.array([0, 0, 0, 3, 3], np.int32)},
    )


def _packed_windows(length: int) -> Listed:
    """Documents by ids and offsets, with a window within each."""
    off, doc = fg.Tensor("off", "int32", 1), fg.Tensor("doc", "int32", 1)

    def windowed(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (doc[q] == doc[k]) & (abs((q - off[doc[q]]) - (k - off[doc[k]])) <= 20)

    starts = np.array([0, 33, 120], np.int32)
    ids = np.searchsorted(starts, np.arange(length), side="right").astype(np.int32) - 1
    return Listed(fg.trace_mask(windowed), length, length, {"off": starts, "doc": ids})


def _token_windows(len_q: int, len_k: int) -> Listed:
    low, high = fg.Tensor("low", "int32", 1), fg.Tensor("high", "int64", 1)
    first = _random.integers(0, len_k, len_q).astype(np.int32)
    mask = fg.trace_mask(lambda b, h, q, k: (low[q] <= k) & (k < high[q]))
    return Listed(mask, len_q, len_k, {"low": first, "high": first.astype(np.int64) + 30})


def _tree(prefix: int, nodes: int) -> Listed:
    ancestors = fg.Tensor("ancestors", "bool", 2)

    def tree(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k < prefix) | ((k >= prefix) & (k < prefix + nodes) & ancestors[q, fg.clamp(k - prefix, 0, nodes - 1)])

    table = np.tril(_random.random((nodes, nodes)) < 0.2)
    return Listed(fg.trace_mask(tree), nodes, prefix + nodes, {"ancestors": table})


def _chosen_blocks(length: int, block: int) -> Listed:
    """Each block of queries of each head selects two blocks of keys."""
    chosen = fg.Tensor("chosen", "int16", 4)

    def attends(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k // block == chosen[b, h, q // block, 0]) | (k // block == chosen[b, h, q // block, 1])

    blocks = -(-length // block)
    table = _random.integers(0, blocks, (2, 3, blocks, 2)).astype(np.int16)
    return Listed(fg.trace_mask(attends), length, length, {"chosen": table}, batch=2, heads=3)


def _layout(shape: tuple[int, ...], block_q: int, block_k: int, len_q: int, len_k: int, share: float) -> Listed:
    layout = _random.random((*shape, -(-len_q // block_q), -(-len_k // block_k))) < share
    mask = fg.block_sparse(fg.Tensor("layout", "bool", layout.ndim), block_q, block_k)
    heads, batch = (shape[-1] if shape else 1), (shape[0] if len(shape) == 2 else 1)
    return Listed(mask, len_q, len_k, {"layout": layout}, batch, heads)


def _morton(side: int) -> Listed:
    def row_of(position: Any) -> Any:
        return sum(((position >> (2 * bit + 1)) & 1) << bit for bit in range(4))

    mask = fg.trace_mask(lambda b, h, q, k: abs(row_of(q) - row_of(k)) <= 2)
    return Listed(mask, side * side, side * side)


WIDE_IDS = fg.Tensor("ids", "int64", 1)
CASES: dict[str, Listed] = {
    "documents": Listed(fg.document("ids"), 203, 203, {"ids": _sorted_ids(203, 4)}),
    "documents, causal": Listed(fg.document("ids") & fg.causal(), 256, 256, {"ids": _sorted_ids(256, 3)}),
    "documents in any order": Listed(
        fg.document("ids"), 100, 100, {"ids": _random.integers(0, 40, 100).astype(np.int32)}
    ),
    "documents of a batch": Listed(
        fg.document(fg.Tensor("ids", "int8", 2)), 130, 130,
        {"ids": np.stack([_sorted_ids(130, n) for n in (2, 5)]).astype(np.int8)}, batch=2, heads=3,
    ),
    "one document": Listed(fg.document("ids"), 128, 128, {"ids": np.zeros(128, np.int32)}),
    "packed windows": _packed_windows(190),
    "shared prefix": _shared_prefix(210),
    "neighbourhood": _neighbourhood(12, 20, 2),
    "global and window": _global_and_window(300, 12),
    "block diffusion": _block_diffusion(96, 16),
    "windows by token": _token_windows(77, 333),
    "tree": _tree(50, 40),
    "chosen blocks": _chosen_blocks(120, 16),
    "Morton order": _morton(16),
    "layout of tiles": _layout((), 32, 32, 250, 320, 0.3),
    "layout finer than tiles": _layout((3,), 16, 8, 100, 130, 0.4),
    "layout coarser than tiles": _layout((2, 2), 64, 96, 200, 300, 0.5),
    "sparse layout": _layout((), 16, 16, 512, 512, 0.02),
    "head by head": Listed(fg.trace_mask(lambda b, h, q, k: (q // 16 + k // 16) % (h + 2) == 0), 97, 131, heads=4),
    "one query, one key": Listed(fg.document("ids"), 1, 1, {"ids": np.zeros(1, np.int32)}),
    "floats": Listed(fg.trace_mask(lambda b, h, q, k: fg.sqrt(fg.to_float(q * q + k * k)) < 90.5), 120, 120),
    "float capture": Listed(
        fg.trace_mask(lambda b, h, q, k: (fg.Tensor("weight", "float32", 1)[k] > 0.5) & (k <= q)), 100, 100,
        {"weight": _random.random(100).astype(np.float32)},
    ),
    "scalars": Listed(
        fg.trace_mask(lambda b, h, q, k: (q % fg.Scalar("period")) // 8 == (k % fg.Scalar("period")) // 8), 150, 150,
        {"period": 64},
    ),
    "arithmetic": Listed(
        fg.trace_mask(
            lambda b, h, q, k: ((q * 3 - k) // -7 + abs(q - 2 * k) > fg.minimum(k, 40) + (q ^ 5) - (k >> 2))
            | (fg.where(q < 20, k % -9, q | 3) == 2)
        ), 140, 90,
    ),
    "by negative constants": Listed(
        fg.trace_mask(lambda b, h, q, k: ((q ^ k) % -64 > -20) | ((q - 3 * k) // -17 == (k - q) % -3)), 140, 190,
    ),
    "a choice of numbers": Listed(
        fg.trace_mask(
            lambda b, h, q, k: fg.where(k % 3 == 0, abs(q - k) < fg.where(q < 100, 8, 32), k == q)
            & fg.where(k < 90, True, q > 20)
        ), 150, 150,
    ),
    "64-bit ids": Listed(
        fg.document(fg.Tensor("ids", "int64", 1)), 130, 130, {"ids": np.sort(_random.integers(0, 4, 130)) << 33}
    ),
    "64-bit ids at the ends": Listed(
        fg.trace_mask(lambda b, h, q, k: WIDE_IDS[q] <= WIDE_IDS[k]), 90, 130,
        {"ids": np.sort(_random.integers(-(2**63), 2**63 - 1, 130))},
    ),
    "64-bit differences": Listed(
        fg.trace_mask(lambda b, h, q, k: abs(WIDE_IDS[q] - WIDE_IDS[k]) > 2**30), 90, 130,
        {"ids": np.sort(_random.integers(-(2**63), 2**63 - 1, 130))},
    ),
    "64-bit arithmetic": Listed(
        fg.trace_mask(
            lambda b, h, q, k: ((q * 70_000_000 - k * 90_000_000) // -70_000_001 + abs(q - 3 * k)
             > fg.minimum(k * 65536, 40) + ((q << 20) ^ k)) | ((q * 3_000_000) % -900_001 < (k | (q << 16)) % 70_000)
        ), 140, 90,
    ),
    "differences of captured numbers": Listed(
        fg.trace_mask(lambda b, h, q, k: abs(fg.Tensor("at", "int32", 1)[q] - fg.Tensor("at", "int32", 1)[k]) < 2**30),
        130, 130, {"at": np.sort(_random.integers(-(2**31), 2**31 - 1, 130)).astype(np.int32)},
    ),
    "bits of 64": Listed(
        fg.trace_mask(
            lambda b, h, q, k: (((q - 60) << 25) ^ ((k - 40) << 25)) + 5 <= ((k - 70) << 26) & ((q - 9) << 26)
        ), 140, 150,
    ),
    "what may wrap": Listed(
        fg.trace_mask(lambda b, h, q, k: ((q * q * q * 1_000_000_000 * q * q > k) | (k > q)) & (k > 20)), 300, 300
    ),
    "small numbers of a large array": Listed(
        fg.trace_mask(lambda b, h, q, k: fg.Tensor("bytes", "int8", 2)[q, k % 90] * 40_000_000 <= k * 1000), 90, 120,
        {"bytes": _random.integers(-128, 127, (90, 90)).astype(np.int8)},
    ),
    "nothing": Listed(
        fg.document("ids") & fg.trace_mask(lambda b, h, q, k: q > 5000), 70, 70, {"ids": _sorted_ids(70, 2)}
    ),
}  # fmt: skip


@pytest.mark.rotated(36)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", CASES)
def test_lists_equal_the_classes(name: str, direction: Direction, check: Callable[..., Any]) -> None:
    check(CASES[name], (32, 16) if direction == "keys" else (16, 32), direction)


@pytest.mark.parametrize("tile", [(64, 64), (16, 48), (128, 16)])
@pytest.mark.parametrize("name", ["documents, causal", "neighbourhood", "layout coarser than tiles"])
def test_any_tile(name: str, tile: tuple[int, int], check: Callable[..., Any]) -> None:
    check(CASES[name], tile)


def test_more_tiles_than_a_block_handles_at_once(check: Callable[..., Any]) -> None:
    """16 warps of 8 tiles handle 128 at a time, so 3,000 keys in tiles of 16 take two iterations."""
    lists = check(_layout((), 16, 16, 40, 3000, 0.3), (16, 16))
    assert lists.counts.max() > 30


@pytest.mark.parametrize("schedule", list(schedules(4)), ids=str)
def test_thread_orders_give_the_same_lists(schedule: Any, check: Callable[..., Any]) -> None:
    for name in ("documents, causal", "windows by token", "layout finer than tiles"):
        check(CASES[name], (32, 16), schedule=schedule)


@pytest.mark.rotated(3)
@pytest.mark.parametrize("sanitize", ["address", "thread"])
@pytest.mark.parametrize("name", ["documents, causal", "layout coarser than tiles", "windows by token"])
def test_no_access_outside_the_arrays(name: str, sanitize: str, check: Callable[..., Any]) -> None:
    check(CASES[name], (32, 32), sanitize=sanitize)


@pytest.mark.parametrize(
    "name", ["64-bit arithmetic", "bits of 64", "64-bit differences", "what may wrap", "by negative constants"]
)
def test_no_integer_overflows(name: str, check: Callable[..., Any]) -> None:
    """UBSan stops at an overflow."""
    check(CASES[name], (32, 16), sanitize="address")


def test_dimensions_that_the_mask_does_not_read_are_shared(check: Callable[..., Any]) -> None:
    batched = check(CASES["documents of a batch"], (32, 16))
    assert batched.counts.shape[:2] == (2, 1)
    assert check(CASES["head by head"], (32, 16)).counts.shape[:2] == (1, 4)
