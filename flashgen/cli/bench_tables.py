"""The tables that `flashgen bench` prints: measured rows -> a heading and cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Table = tuple[tuple[str, ...], list[list[str]]]


def speed(rows: list[Any]) -> Table:
    """TFLOP/s by case and contender, and flashgen's speed over cuDNN's and over the best peer's."""
    contenders = list(dict.fromkeys(name for row in rows for name in row.tflops))
    columns = {
        "spec": [row.spec for row in rows],
        "target": [row.target for row in rows],
        "pass": [row.timed for row in rows],
        "length": [str(row.length) for row in rows],
        **{f"{name} TFLOP/s": [number(row.tflops.get(name)) for row in rows] for name in contenders},
        "times cuDNN": [number(row.ratio("cuDNN"), 2) for row in rows],
        "times the best peer": [number(row.best_ratio, 2) for row in rows],
    }
    return told(columns)


def grouped(rows: list[Any]) -> Table:
    """TFLOP/s by heads of k and v and by contender, and each contender's speed over its own with the first number."""
    contenders = list(dict.fromkeys(name for row in rows for name in row.tflops))
    columns = {
        "spec": [row.spec for row in rows],
        "target": [row.target for row in rows],
        "pass": [row.timed for row in rows],
        "length": [str(row.length) for row in rows],
        "heads": [row.name for row in rows],
        **{f"{name} TFLOP/s": [number(row.tflops.get(name)) for row in rows] for name in contenders},
        **{f"{name} of the first": [number(row.of_first.get(name), 3) for row in rows] for name in contenders},
    }
    return told(columns)


def variants(rows: list[Any]) -> Table:
    """Milliseconds by variant, beside FlexAttention's; columns that hold nothing are left out."""
    columns = {
        "variant": [row.name for row in rows],
        "target": [row.target for row in rows],
        "ms": [number(row.milliseconds, 3) for row in rows],
        "Flex ms": [number(row.flex_ms, 3) for row in rows],
        "times Flex": [number(row.ratio, 2) for row in rows],
        "deterministic ms": [number(row.deterministic_ms, 3) for row in rows],
        "of the default's speed": [number(row.deterministic_ratio, 2) for row in rows],
        "lists ms": [number(row.lists_ms, 3) for row in rows],
        "Flex mask ms": [number(row.flex_mask_ms, 3) for row in rows],
        "of full's time": [number(row.of_full, 2) for row in rows],
        "tiles left": [f"{100 * row.share:.1f}%" for row in rows],
        "ms per tile / full's": [number(row.per_tile, 2) for row in rows],
    }
    return told(columns)


def told(columns: Mapping[str, list[str]]) -> Table:
    """The columns that hold something."""
    kept = {name: cells for name, cells in columns.items() if any(cell != "-" for cell in cells)}
    return tuple(kept), [list(cells) for cells in zip(*kept.values(), strict=True)]


def paper(rows: list[Any]) -> Table:
    """What each contender takes, measured and counted."""
    heading = ("attention", "forward ms", "backward ms", "both ms", "memory GB", "HBM GB, counted", "GFLOP, counted")
    cells = [
        [
            row.name,
            number(row.forward_ms, 2),
            number(row.backward_ms, 2),
            number(row.both_ms, 2),
            number(row.peak_bytes / 1e9, 2),
            number(row.hbm_bytes and row.hbm_bytes / 1e9, 1),
            number(row.gflops, 1),
        ]
        for row in rows
    ]
    return heading, cells


def host(rows: list[Any]) -> Table:
    """Microseconds by case, and of each part."""
    parts = list(dict.fromkeys(part for row in rows for part in row.parts))
    columns = {
        "call": [row.name for row in rows],
        "target": [row.target for row in rows],
        "arrays": [row.library for row in rows],
        "pass": [row.timed for row in rows],
        "batch x heads x length": ["x".join(map(str, row.sizes)) for row in rows],
        "us": [number(row.median, 1) for row in rows],
        "least us": [number(row.minimum, 1) for row in rows],
        **{part: [number(row.parts.get(part), 1) for row in rows] for part in parts},
    }
    return told(columns)


def paper_summary(rows: Sequence[Any]) -> list[str]:
    """How flashgen compares with standard attention."""
    found = {row.name: row for row in rows}
    if not {"standard", "flashgen"} <= found.keys():
        return ["standard attention did not run here, which is what this compares with"]
    standard, ours = found["standard"], found["flashgen"]
    faster, memory = standard.both_ms / ours.both_ms, ours.peak_bytes / standard.peak_bytes
    traffic = ours.hbm_bytes / standard.hbm_bytes
    return [
        f"beside standard attention flashgen is {faster:.1f} times as fast, takes {memory:.2f} of the memory, "
        f"and moves {traffic:.2f} of the bytes"
    ]


def number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
