"""The masks whose tiles are listed, with what they capture, and their classes by brute force."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.attention.engines import Emulator
from flashgen.attention.lists import TileLister, TileLists
from flashgen.codegen.lists import Direction
from flashgen.codegen.plans import ForwardPlan
from flashgen.codegen.targets import target_named
from flashgen.language.evaluate import evaluate
from flashgen.language.operations import BATCH, HEAD, KEY, LEN_K, LEN_Q, QUERY
from flashgen.runtime.schedule import Schedule

EMPTY, PARTIAL, FULL = 0, 1, 2


@dataclass(frozen=True)
class Listed:
    """A mask, the lengths it is listed at, and what it captures there."""

    mask: fg.Mask
    len_q: int
    len_k: int
    captures: dict[str, Any] = field(default_factory=dict)
    batch: int = 1
    heads: int = 1


def brute_force(case: Listed, tile: tuple[int, int]) -> np.ndarray:
    """The class of every tile, by its elements, as the kernels define it."""
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
    """The lists that the emitted kernel makes on the emulator."""
    plan = ForwardPlan(*tile, 1)
    engine = Emulator(sanitize, schedule or Schedule())
    spec = fg.AttentionSpec(head_dim=32, mask=case.mask)
    lister = TileLister(spec, target_named("sm_80"), plan, engine, "", direction)
    return lister.make(case.len_q, case.len_k, case.batch, case.heads, case.captures)


@pytest.fixture
def check() -> Callable[..., TileLists]:
    """Lists a case and compares it with brute force; where the lists share batch or heads, so must the classes."""

    def compare(case: Listed, tile: tuple[int, int], direction: Direction = "keys", **options: Any) -> TileLists:
        lists = list_tiles(case, tile, direction, **options)
        listed, expected = lists.tile_map().classes, brute_force(case, tile)
        np.testing.assert_array_equal(np.broadcast_to(listed, expected.shape), expected)
        check_compact(lists)
        return lists

    return compare


def check_compact(lists: TileLists) -> None:
    """Ascending within each list, no gap between lists."""
    ends = np.cumsum(lists.counts.ravel())
    np.testing.assert_array_equal(lists.offsets.ravel(), ends - lists.counts.ravel())
    if ends.size:
        assert lists.entries.size == max(ends[-1], 1)
    for begin, count in zip(lists.offsets.ravel(), lists.counts.ravel(), strict=True):
        assert (np.diff(lists.entries[begin : begin + count] >> 1) > 0).all()
