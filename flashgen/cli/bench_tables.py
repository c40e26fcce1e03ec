"""The tables that `flashgen bench` prints: measured rows -> a heading and cells."""

from __future__ import annotations

from typing import Any

Table = tuple[tuple[str, ...], list[list[str]]]


def speed(rows: list[Any]) -> Table:
    """TFLOP/s by case and contender."""
    contenders = list(dict.fromkeys(name for row in rows for name in row.tflops))
    heading = ("spec", "pass", "length", *(f"{name} TFLOP/s" for name in contenders))
    cells = [
        [row.spec, row.timed, str(row.length), *(number(row.tflops.get(name)) for name in contenders)] for row in rows
    ]
    return heading, cells


def variants(rows: list[Any]) -> Table:
    """Milliseconds by variant, beside FlexAttention's; columns that hold nothing are left out."""
    columns = {
        "variant": [row.name for row in rows],
        "ms": [number(row.milliseconds, 3) for row in rows],
        "Flex ms": [number(row.flex_ms, 3) for row in rows],
        "times Flex": [number(row.ratio, 2) for row in rows],
        "deterministic ms": [number(row.deterministic_ms, 3) for row in rows],
        "of the default's speed": [number(row.deterministic_ratio, 2) for row in rows],
        "lists ms": [number(row.lists_ms, 3) for row in rows],
        "Flex mask ms": [number(row.flex_mask_ms, 3) for row in rows],
        "tiles left": [f"{100 * row.share:.1f}%" for row in rows],
        "ms per tile / full's": [number(row.per_tile, 2) for row in rows],
    }
    told = {name: cells for name, cells in columns.items() if any(cell != "-" for cell in cells)}
    return tuple(told), [list(cells) for cells in zip(*told.values(), strict=True)]


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


def paper_summary(rows: list[Any]) -> str:
    """How flashgen compares with standard attention."""
    found = {row.name: row for row in rows}
    if not {"standard", "flashgen"} <= found.keys():
        return "standard attention did not run here, which is what this compares with"
    standard, ours = found["standard"], found["flashgen"]
    faster, memory = standard.both_ms / ours.both_ms, ours.peak_bytes / standard.peak_bytes
    traffic = ours.hbm_bytes / standard.hbm_bytes
    return (
        f"beside standard attention flashgen is {faster:.1f} times as fast, takes {memory:.2f} of the memory, "
        f"and moves {traffic:.2f} of the bytes"
    )


def number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
