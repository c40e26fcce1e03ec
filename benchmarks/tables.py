"""Columns of the tables that the benchmarks print; see `flashgen.cli.bench_tables`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flashgen.cli.bench_tables import Columns, number, tflops, value_of


def context(contenders: Sequence[str]) -> Columns:
    """Returns columns of TFLOP/s per GPU by implementation, and its fraction of the speed of a single GPU."""
    columns: dict[str, Callable[[Any], str]] = {
        "GPUs": lambda row: str(row.ranks),
        "pass": lambda row: row.timed,
        "tokens a GPU": lambda row: row.name,
        "alone ms": lambda row: number(row.one_ms, 3),
    }
    of_ideal = {f"{name} of ideal": value_of(name, "of_ideal", 3) for name in contenders}
    return columns | tflops(contenders) | of_ideal | {"memory GB": lambda row: number(row.gigabytes, 2)}


def paper() -> Columns:
    """Returns columns of measured times and memory, and of counted traffic and FLOPs."""
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
    """Returns columns that describe a training step."""
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


def host(parts: Iterable[str]) -> Columns:
    """Returns columns of the microseconds of a call and of its parts."""
    columns: dict[str, Callable[[Any], str]] = {
        "call": lambda row: row.name,
        "target": lambda row: row.target,
        "arrays": lambda row: row.library,
        "pass": lambda row: row.timed,
        "batch x heads x length": lambda row: "x".join(map(str, row.sizes)),
        "us": lambda row: number(row.median, 1),
        "least us": lambda row: number(row.minimum, 1),
    }
    return columns | {part: value_of(part, "parts", 1) for part in parts}


def versions() -> Columns:
    """Returns columns of the times of a cell in two checkouts, and of their ratio."""
    return {
        "group": lambda row: row.group,
        "cell": lambda row: row.cell,
        "before": lambda row: number(row.before, 4),
        "after": lambda row: number(row.after, 4),
        "speed ratio": lambda row: number(row.ratio, 3),
    }
