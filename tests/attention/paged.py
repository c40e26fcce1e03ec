"""Helpers for calls over pages on the emulator, including invalid page tables."""

from __future__ import annotations

from typing import Any

import numpy as np

import flashgen as fg
from flashgen import attention
from flashgen.attention.callable import Attention
from flashgen.verify.check import judged
from flashgen.verify.problems import Inputs, Shape, poisoned_outputs, random_inputs

SEED = 7


def with_pages(spec: fg.AttentionSpec, page_size: int) -> fg.AttentionSpec:
    names = ("head_dim", "dtype", "value_dim", "scale", "layout", "dropout", "score", "mask")
    return fg.AttentionSpec(**{name: getattr(spec, name) for name in names}, page_size=page_size)


def call(compiled: Attention, inputs: Inputs, **how: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    out, lse = poisoned_outputs(compiled.spec, inputs.q)
    compiled(inputs.q, inputs.k, inputs.v, return_lse=True, out=(out, lse), **inputs.captures, **how)
    return out, lse


def assert_right(
    spec: fg.AttentionSpec, shape: Shape, splits: int | None = None, captures: Any = None, seed: int = 0, **how: Any
) -> None:
    """Fills every row that is not a key of a sequence with NaN."""
    inputs, dropout = random_inputs(spec, shape, seed, captures), {"seed": SEED} if spec.dropout else {}
    compiled = attention.compile(spec, emulate=True, **how)
    found = call(compiled, inputs, num_splits=splits, **dropout)
    verdict = judged(spec, inputs.q, inputs.k, inputs.v, *found, inputs.captures, **dropout)
    assert verdict.ok, f"{splits} splits of {shape}: {verdict}"


WRONG: dict[str, Any] = {
    "pages that are none": lambda table, lengths, pages: (np.where(table >= 0, table + pages, table), lengths),
    "negative pages": lambda table, lengths, pages: (np.full_like(table, -(2**31)), lengths),
    "the largest number": lambda table, lengths, pages: (np.full_like(table, 2**31 - 1), lengths),
    "lengths beyond the table": lambda table, lengths, pages: (np.clip(table, 0, 0), lengths + 10**9),
    "negative lengths": lambda table, lengths, pages: (table, lengths - 10**9),
}
