"""Measures the host time of an exported package, beside that of torch's scaled_dot_product_attention."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import flashgen as fg
from benchmarks.host import CALLS, GROUPS, ONE_TILE, HostRow, Timed, costs_in_turns
from flashgen.codegen.families import target_of_gpu
from flashgen.release.export import VARIANT, export
from flashgen.runtime.gpu import compute_capability

SDPA, EXPORTED = "torch's SDPA", "an exported package"
_CHAIN = 16  # calls in one backward
_CASES: tuple[tuple[str, Timed], ...] = (
    ("", "forward"),
    (", with a graph", "forward"),
    (", in the caller's thread", "backward"),
    (" and backward in autograd's thread", "forward"),
)
_DIM = 64


def export_names() -> list[str]:
    """Returns the names of the rows of `export_rows` in order."""
    return [name + case for name in (SDPA, EXPORTED) for case, _ in _CASES]


def export_rows(groups: int = GROUPS, calls: int = CALLS) -> Iterator[HostRow]:
    """Exports a causal spec for this GPU, and measures calls of one tile: the forward without gradients and with a
    graph, the backward as its share of a backward through several calls, and one call with its backward.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    target = target_of_gpu(*compute_capability()).name
    with TemporaryDirectory() as folder:
        attention = _exported(Path(folder), target)
        sdpa = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            runs = [run for attend in (sdpa, attention) for run in _runs(attend)]
            of = [_CHAIN if timed == "backward" else 1 for _ in (SDPA, EXPORTED) for _, timed in _CASES]
            costs = costs_in_turns(runs, torch.cuda.synchronize, groups, [calls // each for each in of])
    cases = [timed for _ in (SDPA, EXPORTED) for _, timed in _CASES]
    for name, timed, each, cost in zip(export_names(), cases, of, costs, strict=True):
        parts = {part: spent / each for part, spent in cost.parts.items()}
        yield HostRow(name, target, "torch", timed, ONE_TILE, cost.median / each, cost.minimum / each, parts)


def _exported(folder: Path, target: str) -> Callable[..., Any]:
    """Exports and imports a package, and returns its function. Kernels are read from the folder when they first run."""
    spec = fg.AttentionSpec(_DIM, "float16", mask=fg.causal())
    export([spec], folder, targets=[target], name="host-time")
    sys.path.insert(0, str(folder / VARIANT))
    try:
        attention: Callable[..., Any] = import_module("host_time").attention
    finally:
        sys.path.pop(0)
    return attention


def _runs(attend: Callable[..., Any]) -> list[Callable[[], Any]]:
    """Returns the calls to measure, in the order of `_CASES`."""
    import torch

    q, k, v, d_out = (torch.randn((*ONE_TILE, _DIM), device="cuda", dtype=torch.float16) for _ in range(4))
    learned = q.clone().requires_grad_()
    out = learned
    for _ in range(_CHAIN):
        out = attend(out, k, v)

    def backward() -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return torch.autograd.grad(out, learned, d_out, retain_graph=True)

    def both() -> Any:
        return torch.autograd.grad(attend(learned, k, v), learned, d_out)

    return [partial(attend, q, k, v), partial(attend, learned, k, v), backward, both]


def export_summary(rows: Sequence[HostRow]) -> list[str]:
    """Returns lines that compare both."""
    of = {(row.name, row.timed): row.median for row in rows}
    return [
        f"{timed}{case}: {EXPORTED} takes {of[EXPORTED + case, timed]:.1f} us, "
        f"{of[EXPORTED + case, timed] / of[SDPA + case, timed]:.2f} times {SDPA}"
        for case, timed in _CASES
        if {(EXPORTED + case, timed), (SDPA + case, timed)} <= of.keys()
    ]
