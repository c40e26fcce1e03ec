"""What a table of measurements comes to, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import geometric_mean

from flashgen.bench.beside_flex import VariantRow
from flashgen.bench.decode import DecodeRow
from flashgen.bench.grouped import GroupedRow
from flashgen.bench.measure import Row
from flashgen.bench.ragged import RaggedRow

LONG = 4096  # cells with sequences of so many tokens or more are compared with the best peer
OF_CUDNN, OF_BEST, OF_FLEX, OF_FIRST, OF_RAGGED = 1.0, 0.97, 1.4, 0.95, 1.05
OF_BEST_DECODER, OF_CONTIGUOUS = 1.0, 0.95


def speed(rows: Sequence[Row]) -> list[str]:
    """How cells compare with cuDNN, how long ones compare with their best peers, and flashgen's mean speed."""
    said = [
        _compared("cuDNN", "cells", {_cell(row): row.ratio("cuDNN") for row in rows}, OF_CUDNN),
        _compared(
            "the best peer",
            f"cells of {LONG} tokens or more",
            {_cell(row): row.best_ratio for row in rows if row.length >= LONG},
            OF_BEST,
        ),
    ]
    speeds = [row.tflops["flashgen"] for row in rows]
    said += [f"flashgen: geometric mean {geometric_mean(speeds):.0f} TFLOP/s"] if speeds else []
    return [line for line in said if line]


def variants(rows: Sequence[VariantRow]) -> list[str]:
    """How variants compare with FlexAttention, full attention left out, and what dropout costs."""
    ratios = {row.name: row.ratio for row in rows if row.name != "full"}
    said = [_compared("FlexAttention", "variants", ratios, OF_FLEX)]
    said += [f"{row.name}: {row.of_full - 1:+.1%} of full attention's time" for row in rows if "dropout" in row.name]
    return [line for line in said if line]


def grouped(rows: Sequence[GroupedRow]) -> list[str]:
    """How fewer heads of k and v compare with the first number of them."""
    first = rows[0].heads_kv if rows else 0
    ratios = {f"{_cell(row)} {row.name}": row.of_first["flashgen"] for row in rows if row.heads_kv != first}
    line = _compared(f"{first} heads of k and v", "cells", ratios, OF_FIRST)
    return [line] if line else []


def decode(rows: Sequence[DecodeRow]) -> list[str]:
    """How sizes compare with their best peers, and pages with contiguous keys."""
    beside = {f"{row.spec} {row.size}": row.ratio() for row in rows}
    said = [_compared("the best peer", "sizes", beside, OF_BEST_DECODER)]
    pages = dict.fromkeys(name for row in rows for name in row.microseconds if name.startswith("pages"))
    for name in pages:
        ratios = {
            f"{row.spec} {row.size}": row.microseconds["flashgen"] / row.microseconds[name]
            for row in rows
            if name in row.microseconds
        }
        said.append(f"{name}: " + _compared("contiguous keys", "sizes", ratios, OF_CONTIGUOUS))
    return [line for line in said if line]


def ragged(rows: Sequence[RaggedRow]) -> list[str]:
    """How flashgen compares with the best peer of each batch."""
    line = _compared("the best peer", "batches", {f"{row.spec} {row.name}": row.ratio for row in rows}, OF_RAGGED)
    return [line] if line else []


def _cell(row: Row | GroupedRow) -> str:
    return f"{row.spec} {row.length}"


def _compared(peer: str, cells: str, ratios: Mapping[str, float | None], least: float) -> str:
    """How many ratios are at least so much, which are below, and their mean; "" where there are none."""
    known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    if not known:
        return ""
    below = {name: ratio for name, ratio in known.items() if ratio < least}
    reached = f"{len(known) - len(below)} of {len(known)} {cells} at {least:.2f} times or more"
    listed = f" (below: {_listed(below.items())})" if below else ""
    return f"beside {peer}: {reached}{listed}; geometric mean {geometric_mean(known.values()):.3f}"


def _listed(items: Iterable[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {ratio:.3f}" for name, ratio in items)
