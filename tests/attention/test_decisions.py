"""Counts the keys that a mask keeps: kernels, tile maps and NumPy agree on each, whatever the numbers are.

With q and k of zeros every score is 0, so the LSE of a row is the logarithm of its number of keys, and a column of dV
the sum of the reciprocals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import flashgen.language as fg
from flashgen import attention
from flashgen.analysis.tile_classes import EMPTY, FULL
from flashgen.language.evaluate import evaluate
from flashgen.language.operations import KEY, LEN_K, LEN_Q, QUERY

LEAST, MOST = -(2**31), 2**31 - 1
WINDOW = fg.Scalar("window")
WIDE_IDS = fg.Tensor("ids", "int64", 1)
DIM = 16


@dataclass(frozen=True)
class Decided:
    """A mask, the lengths at which it is tested, and its captures."""

    mask: Any
    len_q: int = 70
    len_k: int = 100
    captures: dict[str, Any] = field(default_factory=dict)


def by_window(mask: Any, *windows: int, len_q: int = 70, len_k: int = 100) -> list[Decided]:
    return [Decided(mask, len_q, len_k, {"window": window}) for window in windows]


def plain(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Returns a case whose mask depends only on positions."""
    return lambda b, h, q, k: function(q, k)


_ids = np.sort(np.random.default_rng(0).integers(0, 4, 90))
INTEGERS: dict[str, list[Decided]] = {
    "k <= w": by_window(plain(lambda q, k: k <= WINDOW), LEAST, -1, 0, 50, MOST),
    "k - q <= w": by_window(plain(lambda q, k: k - q <= WINDOW), LEAST, -20, MOST),
    "q - k > w": by_window(plain(lambda q, k: q - k > WINDOW), LEAST, -20, MOST),
    "k <= q + w": by_window(plain(lambda q, k: k <= q + WINDOW), LEAST, -20, 20, MOST),
    "q - w <= k": by_window(plain(lambda q, k: (q - WINDOW <= k) & (k <= q + WINDOW)), LEAST, -1, 9, MOST),
    "|q - k| <= w": by_window(plain(lambda q, k: abs(q - k) <= WINDOW), LEAST, -1, 7, MOST),
    "|w - k| <= 5": by_window(plain(lambda q, k: abs(WINDOW - k) <= 5), LEAST, 30, MOST),
    "w * q": by_window(plain(lambda q, k: WINDOW * q <= k * 65536), LEAST, 30000, MOST),
    "dilated by a number": by_window(fg.dilated_window(WINDOW, 4), 9, MOST),
    "window by a number": by_window(fg.sliding_window(WINDOW, 0), 9, MOST, len_q=100, len_k=70),
    "window by two": by_window(fg.sliding_window(WINDOW, WINDOW), 0, MOST, len_q=100, len_k=70),
    "prefix by a number": by_window(fg.prefix_lm(WINDOW), LEAST, 30, MOST),
    "window": [Decided(fg.sliding_window(3, MOST - 1)), Decided(fg.sliding_window(MOST, MOST), 100, 70)],
    "widest window": [Decided(fg.sliding_window(3, MOST))],
    "widest dilated": [Decided(fg.dilated_window(MOST, 3))],
    "constant": [Decided(plain(lambda q, k: k - 5 < MOST)), Decided(plain(lambda q, k: k + MOST < 50 + q))],
    "steep rows": [Decided(plain(lambda q, k: k // 3_000_000 >= q - 30))],
    "products": [Decided(plain(lambda q, k: (q * 65536 * 65536 + k) % 1000 < q * 3_000_000 % 999))],
    "what wraps": [Decided(plain(lambda q, k: (q * 3_000_000) * (k * 3_000_000) * 3_000_000 % 97 < 48))],
    "int64 ids": [
        Decided(fg.document(WIDE_IDS), 90, 90, {"ids": _ids.astype(np.int64)}),
        Decided(fg.document(WIDE_IDS), 90, 90, {"ids": 1 + (_ids % 2) * 2**32}),
        Decided(fg.document(WIDE_IDS), 90, 90, {"ids": np.where(_ids < 2, -(2**63), 2**63 - 1)}),
    ],
    "arithmetic of int64": [
        Decided(plain(lambda q, k: WIDE_IDS[q] - WIDE_IDS[k] > 2), 9, 9, {"ids": np.resize([-(2**63), 2**62, 7], 9)})
    ],
    "indices of int64": [
        Decided(
            plain(lambda q, k: fg.Tensor("flags", "bool", 1)[WIDE_IDS[k]]), 40, 50,
            {"ids": np.resize([2**32 + 1, -(2**40), 0, 1, 2, 3], 50), "flags": np.array([False, True, False, True])},
        )
    ],
}  # fmt: skip
FLOATS: dict[str, list[Decided]] = {
    "floor(q / 41)": [Decided(plain(lambda q, k: fg.floor(q / 41) == fg.floor(k / 41)), 130, 130)],
    "k / 41": [Decided(plain(lambda q, k: k / 41 >= 1)), Decided(plain(lambda q, k: (q + k) / 47 <= 2))],
    "to_int(k / 41)": [Decided(plain(lambda q, k: fg.to_int(k / 41) * 41 == k))],
    "other divisors": [
        Decided(plain(lambda q, k, n=n: fg.floor(q / n) >= k / n), 2 * n + 5, 2 * n + 5) for n in (55, 107)
    ],
    "a tenth": [Decided(plain(lambda q, k: q * 0.1 - k * 0.1 >= 0), 130, 130)],
    "a third less": [Decided(plain(lambda q, k: q * (1 / 3) + 0.7 > k * 0.35 - 1.3), 130, 130)],
    "remainder": [Decided(plain(lambda q, k: (q * 0.7) % 0.3 < (k * 0.1) % 0.7), 90, 130)],
    "roots": [Decided(plain(lambda q, k: fg.sqrt(q) * fg.sqrt(k) <= fg.to_float(q)), 130, 130)],
    "large numbers": [Decided(plain(lambda q, k: fg.to_float(q * 123_456_789) > k * 1e8), 90, 130)],
}
ALL = INTEGERS | FLOATS
EXTRA_TARGET = ("k <= w", "window by a number", "int64 ids", "products", "floor(q / 41)")


def kept(case: Decided, spec: fg.AttentionSpec) -> np.ndarray[Any, Any]:
    values = {QUERY: np.arange(case.len_q)[:, None], KEY: np.arange(case.len_k), LEN_Q: case.len_q, LEN_K: case.len_k}
    return np.broadcast_to(evaluate(spec.mask.expression, values, case.captures), (case.len_q, case.len_k))


def check_calls(compiled: Any, case: Decided, spec: fg.AttentionSpec, module: Any = np) -> None:
    keeps, captures = kept(case, spec), {
        name: module.asarray(value) if np.ndim(value) else value for name, value in case.captures.items()
    }  # fmt: skip
    q, k = (module.zeros((1, 1, length, DIM), "float16") for length in (case.len_q, case.len_k))
    out, lse = compiled(q, k, k, return_lse=True, **captures)
    counts = np.exp(np.float64(lse[0, 0].get() if module is not np else lse[0, 0]))
    np.testing.assert_array_equal(np.round(counts), keeps.sum(axis=1))
    dv = compiled.backward(module.ones_like(out), q, k, k, out, lse, **captures)[2]
    expected = (keeps / np.maximum(keeps.sum(axis=1), 1)[:, None]).sum(axis=0)
    dv = np.float64(dv[0, 0, :, 0].get() if module is not np else dv[0, 0, :, 0])
    np.testing.assert_allclose(dv, expected, rtol=2e-3, atol=2e-3)


def check_tiles(compiled: Any, case: Decided, spec: fg.AttentionSpec) -> None:
    found = compiled.tiles(case.len_q, case.len_k, **case.captures)
    keeps, (rows, columns) = kept(case, spec), found.tile
    for row, column in np.ndindex(found.classes.shape[2:]):
        tile = keeps[row * rows : (row + 1) * rows, column * columns : (column + 1) * columns]
        kind = found.classes[0, 0, row, column]
        assert not (kind == EMPTY and tile.any()) and not (kind == FULL and not tile.all()), (row, column)


@pytest.mark.rotated(36)
@pytest.mark.parametrize(
    ("name", "target"), [*((name, "sm_80") for name in ALL), *((name, "sm_90a") for name in EXTRA_TARGET)]
)
def test_on_the_emulator(name: str, target: str) -> None:
    for case in ALL[name]:
        spec = fg.AttentionSpec(DIM, mask=case.mask)
        compiled = attention.compile(spec, emulate=True, target=target, sanitize="address")
        check_calls(compiled, case, spec)
        check_tiles(compiled, case, spec)


@pytest.mark.parametrize("mask", [plain(lambda q, k: k // 65536 >= q), plain(lambda q, k: k // 65536 < q)])
def test_rows_with_bounds_beyond_int32(mask: Any) -> None:
    """q is the last of 65536 queries: a first key that wraps reads out of bounds, an end that wraps loses rows."""
    case = Decided(mask, 32900, 64)
    spec = fg.AttentionSpec(DIM, mask=mask)
    q, k = (np.zeros((1, 1, length, DIM), "float16") for length in (case.len_q, case.len_k))
    _, lse = attention.compile(spec, emulate=True, target="sm_80", sanitize="address")(q, k, k, return_lse=True)
    np.testing.assert_array_equal(np.round(np.exp(np.float64(lse[0, 0]))), kept(case, spec).sum(axis=1))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL)
def test_on_a_gpu(name: str) -> None:
    """Bits must be equal: fusing a product with a sum would drop half of the diagonal of `a tenth`."""
    cupy = pytest.importorskip("cupy")
    for case in ALL[name]:
        spec = fg.AttentionSpec(DIM, mask=case.mask)
        check_calls(attention.compile(spec), case, spec, cupy)


@pytest.mark.gpu
def test_the_diagonal_of_tenths_on_a_gpu() -> None:
    cupy = pytest.importorskip("cupy")
    case = Decided(FLOATS["a tenth"][0].mask, 2048, 2048)
    spec = fg.AttentionSpec(DIM, mask=case.mask)
    check_calls(attention.compile(spec), case, spec, cupy)
