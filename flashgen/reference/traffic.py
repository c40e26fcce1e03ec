"""HBM traffic of the algorithms of the papers: a counter for the runs, and closed forms for any size.

All counts are elements of one head, whatever their width. Multiply them by batch x heads and by the bytes of an
element. The closed forms equal the counts of the runs in `tiled`, `splits` and `tiled_backward`. For N = len_q = len_k
and d = head_dim = value_dim:

    standard attention    4 N^2 + 4 N d                                             Theta(N d + N^2)
    FlashAttention 1      ceil(N / B) N (3 d + 4) + 3 N d + 2 N,  B = ceil(M / 4 d)   Theta(N^2 d^2 / M)
    FlashAttention 2      ceil(N / B) 2 N d + 2 N d + N,          B = ceil(M / 4 d)   Theta(N^2 d^2 / M)
    Flash-Decoding        ceil(N / rows) 2 N d + 2 N d       plus partial states and LSE, which are counted separately
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
    """Elements read from and written to HBM.

    Attributes:
        reads: elements that are read.
        writes: elements that are written.
    """

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
    """Counts every load from HBM and every store to it."""

    def __init__(self) -> None:
        self.reads = 0
        self.writes = 0

    def load(self, array: NDArray[Any], *region: slice) -> NDArray[Any]:
        """Returns a copy of array[region], which stands for the on-chip block."""
        block = array[region].copy()
        self.reads += block.size
        return block

    def store(self, array: NDArray[Any], value: Any, *region: slice) -> None:
        """Assigns array[region] = value, where array stands for memory in HBM."""
        array[region] = value
        self.writes += array[region].size

    @property
    def traffic(self) -> HbmTraffic:
        return HbmTraffic(self.reads, self.writes)


@dataclass(frozen=True)
class Blocks:
    """The rows (queries) and columns (keys) of a tile: B_r and B_c in the papers.

    Attributes:
        rows: queries of a tile.
        columns: keys of a tile.
    """

    rows: int
    columns: int


def flash1_blocks(on_chip: int, head_dim: int, value_dim: int | None = None) -> Blocks:
    """Returns B_c = ceil(M / 4d) and B_r = min(B_c, d) of FlashAttention's algorithm 1, line 1; M = on_chip elements.

    Blocks of Q, K, V and O share M, so 4d is 2 (head_dim + value_dim) if the two dims differ.
    Raises ArgumentError if M does not hold one row of Q or O (the paper assumes d <= M).

    Args:
        on_chip: the capacity M of the on-chip memory, in elements.
        head_dim: elements of a query or key.
        value_dim: elements of a value; None for head_dim.
    """
    value_dim = head_dim if value_dim is None else value_dim
    if on_chip < max(head_dim, value_dim):
        raise ArgumentError(f"on_chip={on_chip} elements do not hold one row of {max(head_dim, value_dim)}; give more")
    columns = _ceil_div(on_chip, 2 * (head_dim + value_dim))
    return Blocks(min(columns, head_dim), columns)


def flash2_blocks(on_chip: int, head_dim: int, value_dim: int | None = None) -> Blocks:
    """Returns the blocks of FlashAttention 1 with rows and columns exchanged: B_r = ceil(M / 4d), B_c = min(B_r, d).

    The FlashAttention-2 paper leaves the sizes open. K and V are read N / B_r times, which dominates the traffic, so
    the block that stays on chip gets the large size. The cap on B_c keeps the tile of scores within O(M), as in
    FlashAttention 1. Arguments and errors are the same as in `flash1_blocks`.
    """
    swapped = flash1_blocks(on_chip, head_dim, value_dim)
    return Blocks(swapped.columns, swapped.rows)


def traffic_standard(len_q: int, len_k: int, head_dim: int, value_dim: int | None = None) -> HbmTraffic:
    """Returns the traffic of standard attention (FlashAttention, algorithm 0): S and P written and read, the rest once.

    This is a lower bound for standard attention: the score function and mask count as fused into the computation of S,
    and dropout into that of P. An unfused library makes more passes over N^2 elements.

    Args:
        len_q: the number of queries.
        len_k: the number of keys.
        head_dim: elements of a query or key.
        value_dim: elements of a value; None for head_dim.
    """
    value_dim = head_dim if value_dim is None else value_dim
    square = len_q * len_k
    return HbmTraffic(
        reads=len_q * head_dim + len_k * (head_dim + value_dim) + 2 * square,
        writes=2 * square + len_q * value_dim,
    )


def traffic_flash1(len_q: int, len_k: int, head_dim: int, value_dim: int | None = None, *, on_chip: int) -> HbmTraffic:
    """Returns the traffic of FlashAttention 1 (algorithm 1).

    K and V are read once. For each key block, Q, O, l and m are read, and O, l and m are written. Writes include the
    initial O, l and m of line 2.

    Args:
        len_q: the number of queries.
        len_k: the number of keys.
        head_dim: elements of a query or key.
        value_dim: elements of a value; None for head_dim.
        on_chip: the capacity M of the on-chip memory, in elements.
    """
    value_dim = head_dim if value_dim is None else value_dim
    passes = _ceil_div(len_k, flash1_blocks(on_chip, head_dim, value_dim).columns)
    state = len_q * (value_dim + 2)
    return HbmTraffic(
        reads=len_k * (head_dim + value_dim) + passes * (len_q * head_dim + state),
        writes=(1 + passes) * state,
    )


def traffic_flash2(len_q: int, len_k: int, head_dim: int, value_dim: int | None = None, *, on_chip: int) -> HbmTraffic:
    """Returns the traffic of FlashAttention 2 (algorithm 1): Q, O and LSE once, K and V for each query block.

    Arguments are the same as in `traffic_flash1`.
    """
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
    """Returns the traffic of Flash-Decoding for a head of K and V shared by `heads` query heads.

    The result is a pair: elements of q, k, v and out, and float32 elements of partial states and LSE. K and V are read
    once per tile of `rows` rows, everything else once. A partial state has value_dim columns, a row maximum and a row
    sum.

    Args:
        len_q: the number of queries.
        len_k: the number of keys.
        head_dim: elements of a query or key.
        value_dim: elements of a value; None for head_dim.
        heads: query heads that share the head of K and V.
        splits: the number of splits of the keys.
        rows: rows of a tile.
    """
    value_dim = head_dim if value_dim is None else value_dim
    all_rows = heads * len_q
    tiles = _ceil_div(all_rows, rows)
    arrays = HbmTraffic(all_rows * head_dim + tiles * len_k * (head_dim + value_dim), all_rows * value_dim)
    partials = splits * all_rows * (value_dim + 2) if splits > 1 else 0
    return arrays, HbmTraffic(partials, partials + all_rows)


def traffic_standard_backward(len_q: int, len_k: int, head_dim: int, value_dim: int | None = None) -> HbmTraffic:
    """Returns the traffic of the backward of standard attention (FlashAttention, algorithm 3).

    P is in HBM at the start and is read twice; dP and dS are written and read. Dropout and the derivative of the score
    function count as fused into the computation of dP and dS and read nothing, as in `traffic_standard`. An unfused
    library makes more passes over N^2 elements. Arguments are the same as in `traffic_standard`.
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
    """Returns the traffic of FlashAttention's backward (algorithm 4).

    K and V are read once. For each key block, Q, O, dO, dQ and the LSE are read, and dQ is written. Writes include the
    initial dQ, dK and dV of line 5. The LSE replaces the paper's l and m and takes one element less per row.
    Arguments are the same as in `traffic_flash1`.
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
