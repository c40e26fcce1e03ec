"""The tables that `flashgen bench` prints: each column has a heading, and gives the cell of a measured row.

The request alone decides the columns, so that rows can be printed as they are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Columns = Mapping[str, Callable[[Any], str]]
OURS = ("flashgen", "deterministic")  # flashgen's own contenders


def speed(contenders: Sequence[str]) -> Columns:
    """TFLOP/s by case and contender, and flashgen's speed over cuDNN's and over the best peer's."""
    peers = [name for name in contenders if name not in OURS]
    columns = _case() | _tflops(contenders)
    if "cuDNN" in peers:
        columns["times cuDNN"] = lambda row: number(row.ratio("cuDNN"), 2)
    if peers:
        columns["times the best peer"] = lambda row: number(row.best_ratio, 2)
    return columns


def grouped(contenders: Sequence[str]) -> Columns:
    """TFLOP/s by heads of k and v and by contender, and each contender's speed over its first number's."""
    of_first = {f"{name} of the first": _of(name, "of_first", 3) for name in contenders}
    return _case() | {"heads": lambda row: row.name} | _tflops(contenders) | of_first


def ragged(contenders: Sequence[str]) -> Columns:
    """Milliseconds and TFLOP/s by batch and contender, and flashgen's speed over the best peer's."""
    columns: dict[str, Callable[[Any], str]] = {
        "spec": lambda row: row.spec,
        "target": lambda row: row.target,
        "pass": lambda row: row.timed,
        "documents": lambda row: row.name,
        "longest": lambda row: str(row.longest),
    }
    columns |= {f"{name} ms": _of(name, "milliseconds", 3) for name in contenders} | _tflops(contenders)
    return columns | {"times the best peer": lambda row: number(row.ratio, 2)}


def context(contenders: Sequence[str]) -> Columns:
    """TFLOP/s of a GPU by contender, and shares of what one GPU does alone."""
    columns: dict[str, Callable[[Any], str]] = {
        "GPUs": lambda row: str(row.ranks),
        "pass": lambda row: row.timed,
        "tokens a GPU": lambda row: row.name,
        "alone ms": lambda row: number(row.one_ms, 3),
    }
    columns |= _tflops(contenders)
    columns |= {f"{name} of ideal": _of(name, "of_ideal", 3) for name in contenders}
    return columns | {"memory GB": lambda row: number(row.gigabytes, 2)}


def variants(backward: bool, beside_flex: bool, mask_times: bool) -> Columns:
    """Milliseconds by variant, beside FlexAttention's. backward: whether the backward is timed, deterministic too."""
    chosen: dict[str, tuple[bool, Callable[[Any], str]]] = {
        "variant": (True, lambda row: row.name),
        "target": (True, lambda row: row.target),
        "ms": (True, lambda row: number(row.milliseconds, 3)),
        "Flex ms": (beside_flex, lambda row: number(row.flex_ms, 3)),
        "times Flex": (beside_flex, lambda row: number(row.ratio, 2)),
        "deterministic ms": (backward, lambda row: number(row.deterministic_ms, 3)),
        "of the default's speed": (backward, lambda row: number(row.deterministic_ratio, 2)),
        "lists ms": (True, lambda row: number(row.lists_ms, 3)),
        "Flex mask ms": (beside_flex and mask_times, lambda row: number(row.flex_mask_ms, 3)),
        "of full's time": (True, lambda row: number(row.of_full, 2)),
        "tiles left": (True, lambda row: f"{100 * row.share:.1f}%"),
        "ms per tile / full's": (True, lambda row: number(row.per_tile, 2)),
    }
    return {heading: cell for heading, (asked, cell) in chosen.items() if asked}


def decode(contenders: Sequence[str]) -> Columns:
    """TB/s of K and V by size and contender, microseconds of flashgen and of the best peer, and how they compare."""
    columns: dict[str, Callable[[Any], str]] = {
        "spec": lambda row: row.spec,
        "batch, heads, keys": lambda row: str(row.size),
    }
    columns |= {f"{name} TB/s": _of(name, "terabytes", 2) for name in contenders}
    columns |= {f"{name} us": _of(name, "microseconds", 1) for name in contenders}
    return columns | {"times the best peer": lambda row: number(row.ratio(), 2)}


def serving(contenders: Sequence[str], compared: Sequence[str]) -> Columns:
    """TB/s of K and V and microseconds by case and contender, and what the group compares."""
    columns: dict[str, Callable[[Any], str]] = {"case": lambda row: row.name}
    columns |= {f"{name} TB/s": _of(name, "terabytes", 2) for name in contenders}
    columns |= {f"{name} us": _of(name, "microseconds", 1) for name in contenders}
    return columns | {f"times {name}": _of(name, "compared", 2) for name in compared}


def paper() -> Columns:
    """What each contender takes, measured and counted."""
    return {
        "attention": lambda row: row.name,
        "forward ms": lambda row: number(row.forward_ms, 2),
        "backward ms": lambda row: number(row.backward_ms, 2),
        "both ms": lambda row: number(row.both_ms, 2),
        "memory GB": lambda row: number(row.peak_bytes / 1e9, 2),
        "HBM GB, counted": lambda row: number(row.hbm_bytes and row.hbm_bytes / 1e9, 1),
        "GFLOP, counted": lambda row: number(row.gflops, 1),
    }


def train() -> Columns:
    """A step of training by each attention."""
    return {
        "attention": lambda row: row.name,
        "mode": lambda row: row.mode,
        "batch x tokens": lambda row: f"{row.batch} x {row.length}",
        "ms a step": lambda row: number(row.ms, 1),
        "tokens/s": lambda row: number(row.tokens_per_second),
        "memory GB": lambda row: number(row.peak_bytes and row.peak_bytes / 1e9, 2),
        "last loss": lambda row: number(row.losses[-1] if row.losses else None, 3),
        "problem": lambda row: row.problem or "",
    }


def cells(columns: Columns, row: Any) -> list[str]:
    """A row's cells; "-" for what could not be measured."""
    return [cell(row) for cell in columns.values()]


def _case() -> dict[str, Callable[[Any], str]]:
    return {
        "spec": lambda row: row.spec,
        "target": lambda row: row.target,
        "pass": lambda row: row.timed,
        "length": lambda row: str(row.length),
    }


def _tflops(contenders: Sequence[str]) -> dict[str, Callable[[Any], str]]:
    return {f"{name} TFLOP/s": _of(name, "tflops") for name in contenders}


def _of(contender: str, what: str, digits: int = 0) -> Callable[[Any], str]:
    """The cell of a contender's number among those of a row."""
    return lambda row: number(getattr(row, what).get(contender), digits)


def host(parts: Iterable[str]) -> Columns:
    """Microseconds by case and part."""
    columns: dict[str, Callable[[Any], str]] = {
        "call": lambda row: row.name,
        "target": lambda row: row.target,
        "arrays": lambda row: row.library,
        "pass": lambda row: row.timed,
        "batch x heads x length": lambda row: "x".join(map(str, row.sizes)),
        "us": lambda row: number(row.median, 1),
        "least us": lambda row: number(row.minimum, 1),
    }
    return columns | {part: _of(part, "parts", 1) for part in parts}


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
