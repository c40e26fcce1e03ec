"""Columns of the tables that `flashgen bench` prints.

A column has a heading and a function from a measured row to the text of its cell. The columns depend on the options of
a command alone, so that rows can be printed while they are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Columns = Mapping[str, Callable[[Any], str]]
OURS = ("flashgen", "deterministic")  # flashgen's own entries of a table


def speed(contenders: Sequence[str]) -> Columns:
    """Returns columns of TFLOP/s by implementation, and flashgen's speed relative to cuDNN and to the best peer."""
    peers = [name for name in contenders if name not in OURS]
    columns = _case() | tflops(contenders)
    if "cuDNN" in peers:
        columns["times cuDNN"] = lambda row: number(row.ratio("cuDNN"), 2)
    if peers:
        columns["times the best peer"] = lambda row: number(row.best_ratio, 2)
    return columns


def grouped(contenders: Sequence[str]) -> Columns:
    """Returns columns of TFLOP/s by implementation, and its speed relative to the first number of key heads."""
    of_first = {f"{name} of the first": value_of(name, "of_first", 3) for name in contenders}
    return _case() | {"heads": lambda row: row.name} | tflops(contenders) | of_first


def biases(contenders: Sequence[str]) -> Columns:
    """Returns columns of milliseconds by implementation, and flashgen's speed relative to the best peer."""
    columns: dict[str, Callable[[Any], str]] = {
        "bias": lambda row: row.name,
        "target": lambda row: row.target,
        "pass": lambda row: row.timed,
    }
    columns |= {f"{name} ms": value_of(name, "milliseconds", 3) for name in contenders}
    return columns | {"times the best peer": lambda row: number(row.best_ratio, 2)}


def varlen(contenders: Sequence[str]) -> Columns:
    """Returns columns of milliseconds and TFLOP/s by implementation, and flashgen's speed relative to the best peer."""
    columns: dict[str, Callable[[Any], str]] = {
        "spec": lambda row: row.spec,
        "target": lambda row: row.target,
        "pass": lambda row: row.timed,
        "documents": lambda row: row.name,
        "longest": lambda row: str(row.longest),
    }
    columns |= {f"{name} ms": value_of(name, "milliseconds", 3) for name in contenders} | tflops(contenders)
    return columns | {"times the best peer": lambda row: number(row.ratio, 2)}


def variants(backward: bool, beside_flex: bool, mask_times: bool) -> Columns:
    """Returns columns of milliseconds of flashgen and of FlexAttention.

    Args:
        backward: the backward is timed, in its deterministic mode as well.
        beside_flex: FlexAttention is timed.
        mask_times: the creation of FlexAttention's block masks is timed.
    """
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


def decode(contenders: Sequence[str], with_tflops: bool = False) -> Columns:
    """Returns columns of TB/s of K and V and of microseconds, and flashgen's speed relative to the best peer.

    with_tflops: add columns of TFLOP/s.
    """
    columns: dict[str, Callable[[Any], str]] = {
        "spec": lambda row: row.spec,
        "batch, heads, keys": lambda row: str(row.size),
    }
    columns |= {f"{name} TB/s": value_of(name, "terabytes", 2) for name in contenders}
    columns |= {f"{name} us": value_of(name, "microseconds", 1) for name in contenders}
    columns |= tflops(contenders) if with_tflops else {}
    return columns | {"times the best peer": lambda row: number(row.ratio(), 2)}


def serving(contenders: Sequence[str], compared: Sequence[str]) -> Columns:
    """Returns columns of TB/s of K and V and of microseconds, and the ratios that the group compares."""
    columns: dict[str, Callable[[Any], str]] = {"case": lambda row: row.name}
    columns |= {f"{name} TB/s": value_of(name, "terabytes", 2) for name in contenders}
    columns |= {f"{name} us": value_of(name, "microseconds", 1) for name in contenders}
    return columns | {f"times {name}": value_of(name, "compared", 2) for name in compared}


def cells(columns: Columns, row: Any) -> list[str]:
    """Returns the cells of a row; a value that was not measured is "-"."""
    return [cell(row) for cell in columns.values()]


def _case() -> dict[str, Callable[[Any], str]]:
    return {
        "spec": lambda row: row.spec,
        "target": lambda row: row.target,
        "pass": lambda row: row.timed,
        "length": lambda row: str(row.length),
    }


def tflops(contenders: Sequence[str]) -> dict[str, Callable[[Any], str]]:
    """Returns a column of TFLOP/s for each implementation."""
    return {f"{name} TFLOP/s": value_of(name, "tflops") for name in contenders}


def value_of(name: str, mapping: str, digits: int = 0) -> Callable[[Any], str]:
    """Returns the cell function for the value under a name in one of the row's mappings."""
    return lambda row: number(getattr(row, mapping).get(name), digits)


def number(value: float | None, digits: int = 0) -> str:
    """Formats a value; None is "-"."""
    return "-" if value is None else f"{value:.{digits}f}"
