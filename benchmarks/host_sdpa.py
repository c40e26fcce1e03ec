"""Measures the host time of torch's flash operators, with torch's own kernels and with flashgen in torch's registry."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from benchmarks.host import CALLS, GROUPS, ONE_TILE, HostRow, Run, Timed, costs_in_turns
from benchmarks.train import in_sdpa

OWN, OURS = "SDPA, torch's flash operator", "SDPA, flashgen in its place"
_CHAIN = 16  # calls in one backward
_DIM = 64
_ROUNDS = 5  # the implementations are measured alternately, as the speed of a host changes
_CASES: tuple[tuple[str, Timed], ...] = (
    ("", "forward"),
    (", with a graph", "forward"),
    (", packed", "forward"),
    (", in the caller's thread", "backward"),
)


def registry_names() -> list[str]:
    """Returns the names of the rows of `registry_rows` in order."""
    return [name + case for name in (OWN, OURS) * _ROUNDS for case, _ in _CASES]


def registry_rows(groups: int = GROUPS, calls: int = CALLS) -> Iterator[HostRow]:
    """Measures a causal call of one tile: without gradients, with a graph, of packed sequences, and its backward.

    The time of a backward is its share of a backward through several calls, in the caller's thread.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v, d_out = (torch.randn((*ONE_TILE, _DIM), device="cuda", dtype=torch.float16) for _ in range(4))
    for name in (OWN, OURS) * _ROUNDS:
        with in_sdpa("flashgen") if name == OURS else nullcontext(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            runs = _runs(q, k, v, d_out)
            of = [_CHAIN if timed == "backward" else 1 for _, timed in _CASES]
            shares = [calls // each for each in of]
            costs = costs_in_turns([*runs.values()], torch.cuda.synchronize, max(groups // _ROUNDS, 1), shares)
            for (case, timed), each, cost in zip(_CASES, of, costs, strict=True):
                parts = {part: spent / each for part, spent in cost.parts.items()}
                where = "-", "torch", timed, ONE_TILE
                yield HostRow(name + case, *where, cost.median / each, cost.minimum / each, parts)


def _runs(q: Any, k: Any, v: Any, d_out: Any) -> Mapping[str, Run]:
    """Returns the calls to measure, in the order of `_CASES`."""
    import torch
    from torch.nn.attention.varlen import varlen_attn

    attend = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
    learned = q.clone().requires_grad_()
    rows = [each[0].transpose(0, 1).contiguous() for each in (q, k, v)]
    length, at = q.shape[2], torch.tensor([0, q.shape[2]], device="cuda", dtype=torch.int32)
    packed: list[Any] = [*rows, at, at, length, length]
    out = learned
    for _ in range(_CHAIN):
        out = attend(out, k, v)

    def backward() -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return torch.autograd.grad(out, learned, d_out, retain_graph=True)

    runs: list[Run] = [
        partial(attend, q, k, v),
        partial(attend, learned, k, v),
        lambda: varlen_attn(*packed, window_size=(-1, 0)),
        backward,
    ]
    return dict(zip((case for case, _ in _CASES), runs, strict=True))


def registry_summary(rows: Sequence[HostRow]) -> list[str]:
    """Returns lines that compare both implementations, by the medians over the rounds."""
    lines = []
    for case, timed in _CASES:
        found = [[row.median for row in rows if (row.name, row.timed) == (name + case, timed)] for name in (OWN, OURS)]
        if all(found):
            own, ours = map(statistics.median, found)
            lines.append(f"{timed}{case}: {OURS} takes {ours:.1f} us, {ours - own:+.1f} beside torch's flash operator")
    return lines
