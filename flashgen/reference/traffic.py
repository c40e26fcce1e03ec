"""HBM traffic of standard attention, FlashAttention 1 and 2: a counter for runs, and closed forms for any size.

Counts are elements of one head, whatever their width: multiply by batch x heads, and by the bytes of an element. The
closed forms equal what the runs of `tiled`, `splits` and `tiled_backward` count. For N = len_q = len_k and d = head_dim
= value_dim:

    standard attention    4 N^2 + 4 N d                                             Theta(N d + N^2)
    FlashAttention 1      ceil(N / B) N (3 d + 4) + 3 N d + 2 N,  B = ceil(M / 4 d)   Theta(N^2 d^2 / M)
    FlashAttention 2      ceil(N / B) 2 N d + 2 N d + N,          B = ceil(M / 4 d)   Theta(N^2 d^2 / M)
    Flash-Decoding        ceil(N / rows) 2 N d + 2 N d                              shares and LSE are counted beside
    standard backward     7 N^2 + 8 N d                                             Theta(N d + N^2)
    Flash backward        ceil(N / B) N (5 d + 1) + 7 N d,        B = ceil(M / 4 d)   Theta(N^2 d^2 / M)

Source: Dao et al., "FlashAttention", 2022, theorems 2, 5 (d <= M <= N d); Dao, "FlashAttention-2", 2023, section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from flashgen.errors import ArgumentError


@dataclass(frozen=True)
class HbmTraffic:
    """Elements read from and written to HBM."""

    reads: int
    writes: int

    @property
    def total(self) -> int:
        return self.reads + self.writes

    def __add__(self, other: HbmTraffic) -> HbmTraffic:
        return HbmTraffic(self.reads + other.reads, self.writes + other.writes)

    def __mul__(self, heads: int) -> HbmTraffic:
        return HbmTraffic(self.reads * heads, self.writes * heads)

    __rmul__ = __mul__


class Hbm:
    """The door between HBM and the chip: it counts every load and store of a run."""

    def __init__(self) -> None:
        self.reads = 0
        self.writes = 0

    def load(self, array: NDArray[Any], *region: slice) -> NDArray[Any]:
        """A copy of array[region], on chip."""
        block = array[region].copy()
        self.reads += block.size
        return block

    def store(self, array: NDArray[Any], value: Any, *region: slice) -> None:
        """array[region] = value, in HBM."""
        array[region] = value
        self.writes += array[region].size

    @property
    def traffic(self) -> HbmTraffic:
        return HbmTraffic(self.reads, self.writes)


@dataclass(frozen=True)
class Blocks:
    """Rows (queries) and columns (keys) of a tile: B_r and B_c of the papers."""

    rows: int
    columns: int


def flash1_blocks(on_chip: int, head_dim: int, value_dim: int | None = None) -> Blocks:
    """B_c = ceil(M / 4d), B_r = min(B_c, d), of FlashAttention's algorithm 1, line 1; M = on_chip in elements.

    Blocks of Q, K, V and O share M, so that 4d becomes 2 (head_dim + value_dim) where the two differ.
    Raises ArgumentError for M below a row of Q or O (the paper assumes d <= M).
    """
    value_dim = head_dim if value_dim is None else value_dim
    if on_chip < max(head_dim, value_dim):
        raise ArgumentError(f"on_chip={on_chip} elements do not hold one row of {max(head_dim, value_dim)}; give more")
    columns = _ceil_div(on_chip, 2 * (head_dim + value_dim))
    return Blocks(min(columns, head_dim), columns)


def flash2_blocks(on_chip: int, head_dim: int, value_dim: int | None = None) -> Blocks:
    """FlashAttention 1's with rows and columns changing places: B_r = ceil(M / 4d), B_c = min(B_r, d).

    FlashAttention-2 leaves the sizes open. K and V are read N / B_r times, which sets its traffic, so the side that
    stays on chip gets the large size; the other's cap keeps the tile of scores within O(M), as in FlashAttention 1.
    """
    swapped = flash1_blocks(on_chip, head_dim, value_dim)
    return Blocks(swapped.columns, swapped.rows)


def traffic_standard(len_q: int, len_k: int, head_dim: int, value_dim: int | None = None) -> HbmTraffic:
    """Standard attention (algorithm 0 of FlashAttention): S written and read, P written and read, all else once.

    Standard attention can do no better: the score function and mask count as fused into the making of S, dropout into
    that of P. A plain library makes more passes over N^2.
    """
    value_dim = head_dim if value_dim is None else value_dim
    square = len_q * len_k
    return HbmTraffic(
        reads=len_q * head_dim + len_k * (head_dim + value_dim) + 2 * square,
        writes=2 * square + len_q * value_dim,
    )


def traffic_flash1(len_q: int, len_k: int, head_dim: int, value_dim: int | None = None, *, on_chip: int) -> HbmTraffic:
    """FlashAttention 1 (algorithm 1): K and V once; Q, O, l and m read, O, l and m written, for each key block.

    Writes include the initial O, l and m of line 2.
    """
    value_dim = head_dim if value_dim is None else value_dim
    passes = _ceil_div(len_k, flash1_blocks(on_chip, head_dim, value_dim).columns)
    state = len_q * (value_dim + 2)
    return HbmTraffic(
        reads=len_k * (head_dim + value_dim) + passes * (len_q * head_dim + state),
        writes=(1 + passes) * state,
    )


def traffic_flash2(len_q: int, len_k: int, head_dim: int, value_dim: int | None = None, *, on_chip: int) -> HbmTraffic:
    """FlashAttention 2 (algorithm 1): Q once; K and V for each query block; O and LSE written once."""
    value_dim = head_dim if value_dim is None else value_dim
    passes = _ceil_div(len_q, flash2_blocks(on_chip, head_dim, value_dim).rows)
    return HbmTraffic(
        reads=len_q * head_dim + passes * len_k * (head_dim + value_dim),
        writes=len_q * (value_dim + 1),
    )


def traffic_flash_decoding(
    len_q: int,
    len_k: int,
    head_dim: int,
    value_dim: int | None = None,
    *,
    heads: int = 1,
    splits: int = 1,
    rows: int = 16,
) -> tuple[HbmTraffic, HbmTraffic]:
    """Flash-Decoding of a head of K and V that `heads` query heads share: (elements of q, k, v, out; float32s beside).

    K and V once for each tile of rows, all else once; of a share its reference and its sum beside value_dim columns.
    """
    value_dim = head_dim if value_dim is None else value_dim
    all_rows = heads * len_q
    tiles = _ceil_div(all_rows, rows)
    arrays = HbmTraffic(all_rows * head_dim + tiles * len_k * (head_dim + value_dim), all_rows * value_dim)
    share = splits * all_rows * (value_dim + 2) if splits > 1 else 0
    return arrays, HbmTraffic(share, share + all_rows)


def traffic_standard_backward(len_q: int, len_k: int, head_dim: int, value_dim: int | None = None) -> HbmTraffic:
    """Standard attention's backward (algorithm 3 of FlashAttention): P read twice, dP and dS written and read.

    P is in HBM already. Dropout and the derivative of the score function count as fused into the making of dP and dS,
    and read nothing, as in `traffic_standard`. A plain library makes more passes over N^2.
    """
    value_dim = head_dim if value_dim is None else value_dim
    square = len_q * len_k
    return HbmTraffic(
        reads=len_q * (head_dim + 2 * value_dim) + len_k * (head_dim + value_dim) + 5 * square,
        writes=len_q * head_dim + len_k * (head_dim + value_dim) + 2 * square,
    )


def traffic_flash_backward(
    len_q: int, len_k: int, head_dim: int, value_dim: int | None = None, *, on_chip: int
) -> HbmTraffic:
    """FlashAttention's backward (algorithm 4): K and V once; Q, O, dO, dQ and LSE read, dQ written, for each key block.

    Writes include the initial dQ, dK and dV of line 5. LSE, in place of the paper's l and m, is an element a row less.
    """
    value_dim = head_dim if value_dim is None else value_dim
    passes = _ceil_div(len_k, flash1_blocks(on_chip, head_dim, value_dim).columns)
    keys = len_k * (head_dim + value_dim)
    return HbmTraffic(
        reads=keys + passes * len_q * (2 * head_dim + 2 * value_dim + 1),
        writes=2 * keys + (1 + passes) * len_q * head_dim,
    )


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
