"""Summaries of measured tables, as lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import geometric_mean

from flashgen.bench.beside_flex import VariantRow
from flashgen.bench.biases import BiasRow
from flashgen.bench.decode import DecodeRow
from flashgen.bench.grouped import GroupedRow
from flashgen.bench.measure import Row
from flashgen.bench.varlen import VarlenRow

LONG = 4096  # minimum sequence length of cells that are compared with the best peer
# Minimum ratios that the summaries count as reached.
OF_CUDNN, OF_BEST, OF_FLEX, OF_FIRST, OF_VARLEN = 1.0, 0.97, 1.4, 0.95, 1.05
OF_BEST_DECODER, OF_CONTIGUOUS, OF_16_BITS, OF_BIASES, OF_MASKS = 1.0, 0.95, 0.9, 1.1, 1.2


def speed(rows: Sequence[Row]) -> list[str]:
    """Compares cells with cuDNN and long cells with their best peers, and states the mean speed of flashgen."""
    lines = [
        _compared("cuDNN", "cells", {_cell(row): row.ratio("cuDNN") for row in rows}, OF_CUDNN),
        _compared(
            "the best peer",
            f"cells of {LONG} tokens or more",
            {_cell(row): row.best_ratio for row in rows if row.length >= LONG},
            OF_BEST,
        ),
    ]
    speeds = [row.tflops["flashgen"] for row in rows]
    lines += [f"flashgen: geometric mean {geometric_mean(speeds):.0f} TFLOP/s"] if speeds else []
    return [line for line in lines if line]


def variants(rows: Sequence[VariantRow]) -> list[str]:
    """Compares variants other than full attention with FlexAttention, and states the cost of dropout."""
    ratios = {row.name: row.ratio for row in rows if row.name != "full"}
    lines = [_compared("FlexAttention", "variants", ratios, OF_FLEX)]
    lines += [f"{row.name}: {row.of_full - 1:+.1%} of full attention's time" for row in rows if "dropout" in row.name]
    return [line for line in lines if line]


def grouped(rows: Sequence[GroupedRow]) -> list[str]:
    """Compares numbers of heads of k and v with the first number."""
    first = rows[0].heads_kv if rows else 0
    ratios = {f"{_cell(row)} {row.name}": row.of_first["flashgen"] for row in rows if row.heads_kv != first}
    line = _compared(f"{first} heads of k and v", "cells", ratios, OF_FIRST)
    return [line] if line else []


def biases(rows: Sequence[BiasRow]) -> list[str]:
    """Compares the cases with their best peers."""
    masks = [row for row in rows if row.name.startswith("mask")]
    groups = (("biases", [row for row in rows if row not in masks], OF_BIASES), ("masks", masks, OF_MASKS))
    lines = [
        _compared("the best peer", kind, {f"{row.name} {row.timed}": row.best_ratio for row in group}, minimum)
        for kind, group, minimum in groups
    ]
    return [line for line in lines if line]


def decode(rows: Sequence[DecodeRow]) -> list[str]:
    """Compares sizes with their best peers, and pages with contiguous keys."""
    beside = {f"{row.spec} {row.size}": row.ratio() for row in rows}
    lines = [_compared("the best peer", "sizes", beside, OF_BEST_DECODER)]
    names = dict.fromkeys(name for row in rows for name in row.microseconds if not name.endswith("16 bits"))
    pages = [name for name in names if name.startswith("pages")]
    for name in pages:
        ratios = {
            f"{row.spec} {row.size}": row.microseconds["flashgen"] / row.microseconds[name]
            for row in rows
            if name in row.microseconds
        }
        lines.append(f"{name}: " + _compared("contiguous keys", "sizes", ratios, OF_CONTIGUOUS))
    for name in ("flashgen", *pages):
        halves = {f"{row.spec} {row.size}": row.of_16_bits(name) for row in rows}
        lines.append(_compared(f"16-bit keys, {name}", "sizes", halves, OF_16_BITS))
    return [line for line in lines if line]


def varlen(rows: Sequence[VarlenRow]) -> list[str]:
    """Compares batches with their best peers."""
    line = _compared("the best peer", "batches", {f"{row.spec} {row.name}": row.ratio for row in rows}, OF_VARLEN)
    return [line] if line else []


def _cell(row: Row | GroupedRow) -> str:
    return f"{row.spec} {row.length}"


def _compared(peer: str, cells: str, ratios: Mapping[str, float | None], threshold: float) -> str:
    """Returns a line with the number of ratios that reach a threshold, the others, and the geometric mean."""
    measured = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    if not measured:
        return ""
    below = {name: ratio for name, ratio in measured.items() if ratio < threshold}
    reached = f"{len(measured) - len(below)} of {len(measured)} {cells} at {threshold:.2f} times or more"
    listed = f" (below: {_listed(below.items())})" if below else ""
    return f"beside {peer}: {reached}{listed}; geometric mean {geometric_mean(measured.values()):.3f}"


def _listed(items: Iterable[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {ratio:.3f}" for name, ratio in items)
