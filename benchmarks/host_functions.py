"""Measures the host time of functions that are passed with each call, beside a spec of the same functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import flashgen as fg
from benchmarks.host import CALLS, GROUPS, ONE_TILE, HostRow, Run, costs_in_turns

SPEC, GIVEN, TORCHS = (
    "attention, a spec of functions",
    "flex_attention, functions of the call",
    "torch's flex_attention",
)
_COMPILED = ", compiled"
_MOST_WARMING = 3


def function_names(compiled: bool = True) -> list[str]:
    """Returns the names of the rows of `function_rows` in order."""
    return [SPEC, GIVEN, *([SPEC + _COMPILED, GIVEN + _COMPILED, TORCHS + _COMPILED] if compiled else [])]


def function_rows(groups: int = GROUPS, calls: int = CALLS, compiled: bool = True, **engine: Any) -> Iterator[HostRow]:
    """Measures calls without gradients of a mask that reads document ids and a score that reads a table.

    A spec traces both functions once, flex_attention at each call. The groups of all calls are interleaved.

    Args:
        groups, calls: the number of groups of a measurement, and of calls per group.
        compiled: also measure both under torch.compile, beside torch's flex_attention with a block mask made before.
        engine: emulate=True runs on the CPU.
    """
    import torch

    device = "cpu" if engine.get("emulate") else "cuda"
    batch, heads, length = ONE_TILE
    q, k, v = (torch.randn(batch, heads, length, 64, device=device, dtype=torch.float16) for _ in range(3))
    table = torch.randn(heads, 2 * length, device=device)
    ids = torch.zeros(length, dtype=torch.int32, device=device)

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + table[h, i - j + length]

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (ids[i] == ids[j])

    runs = _runs(q, k, v, score, mask, engine, compiled)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    with torch.no_grad():
        for run in runs.values():
            for _ in range(_MOST_WARMING):
                run()
        costs = costs_in_turns([*runs.values()], wait, groups, [calls] * len(runs))
    for name, cost in zip(runs, costs, strict=True):
        yield HostRow(name, "", "torch", "forward", ONE_TILE, cost.median, cost.minimum, cost.parts)


def _runs(q: Any, k: Any, v: Any, score: Any, mask: Any, engine: dict[str, Any], compiled: bool) -> dict[str, Run]:
    import torch
    from torch.nn.attention import flex_attention as torchs

    from flashgen.torch import attention, create_block_mask, flex_attention

    spec = fg.AttentionSpec(64, "float16", score=score, mask=mask)
    sizes = (None, None, q.shape[2], q.shape[2])
    block_mask = create_block_mask(mask, *sizes)
    by_spec: Callable[..., Any] = lambda q, k, v: attention(spec, q, k, v, **engine)
    by_functions: Callable[..., Any] = lambda q, k, v: flex_attention(q, k, v, score, block_mask, **engine)
    runs: dict[str, Run] = {SPEC: lambda: by_spec(q, k, v), GIVEN: lambda: by_functions(q, k, v)}
    if compiled:
        theirs = torchs.create_block_mask(mask, *sizes, device=q.device)
        attends = [by_spec, by_functions, lambda q, k, v: torchs.flex_attention(q, k, v, score, theirs)]
        for name, attend in zip((SPEC, GIVEN, TORCHS), attends, strict=True):
            runs[name + _COMPILED] = partial(torch.compile(attend, fullgraph=True), q, k, v)
    return runs
