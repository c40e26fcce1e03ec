"""The FlashAttention paper's problem, with standard attention beside flashgen: `python -m benchmarks paper`.

The problem has batch 64, 16 heads, length 1024, head dim 64, dropout 0.1, a causal mask and float16 (Dao et al.,
"FlashAttention", 2022, figure 2, left). The paper's table shows GFLOPs, HBM traffic and time; this one adds memory. The
closed forms of `flashgen.reference`, which ignore masks, count the traffic. FLOPs are counted over the visited tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flashgen.attention import Attention, compile
from flashgen.bench.cases import Arrays, Case, Timed, flops, inputs
from flashgen.bench.ours import ours
from flashgen.bench.peers import SDPA_BACKENDS, sdpa
from flashgen.bench.torch_runs import differentiated
from flashgen.errors import LaunchError
from flashgen.language.masks import causal
from flashgen.language.spec import AttentionSpec
from flashgen.reference import traffic_flash2, traffic_flash_backward, traffic_standard, traffic_standard_backward
from flashgen.runtime.timing import Run, free_flush_buffer, median_ms

PEERS = ("FA2", "cuDNN")  # backends of torch
BATCH, HEADS, LENGTH, HEAD_DIM, DROPOUT = 64, 16, 1024, 64, 0.1
_ELEMENT = 2  # bytes
_RECOMPUTED = HEAD_DIM  # multiply-adds per score of QK^T, which the backward of standard attention does not recompute

_Contender = tuple[Callable[[Timed], Run | None], tuple[float | None, int | None]]  # runs; GFLOPs and HBM bytes


@dataclass(frozen=True)
class PaperRow:
    """A measured implementation: median milliseconds, and peak memory in bytes including the inputs.

    `gflops` and `hbm_bytes` are counted for both passes; they are None for implementations without a closed form.
    """

    name: str
    forward_ms: float | None
    backward_ms: float | None
    both_ms: float
    peak_bytes: int
    gflops: float | None
    hbm_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def paper_case() -> Case:
    """Returns the paper's problem."""
    return Case(AttentionSpec(HEAD_DIM, "float16", mask=causal(), dropout=DROPOUT), LENGTH, BATCH, HEADS)


def paper_rows(peers: Sequence[str] = ("FA2",), target: str | None = None) -> Iterator[PaperRow]:
    """Measures standard attention in plain torch, the backends of torch among `peers` that support it, and flashgen.

    `target` is that of `flashgen.compile`. Raises LaunchError if torch is missing.
    """
    try:
        import torch  # noqa: F401
    except ImportError:
        raise LaunchError("standard attention is written in torch, which is not installed: pip install torch") from None
    case = paper_case()
    arrays = inputs(case)
    attention = compile(case.spec, target)
    counted = (standard_gflops(case), standard_bytes(case))
    contenders: dict[str, _Contender] = {"standard": (lambda timed: _standard(case, timed, arrays), counted)}
    for peer in peers:
        backend = SDPA_BACKENDS[peer]
        contenders[peer] = (functools.partial(_sdpa, case, backend, arrays), (None, None))
    counted = (flash_gflops(case, attention), flash_bytes(case, attention))
    contenders["flashgen"] = (lambda timed: ours(attention, timed, arrays), counted)
    for name, (run, (gflops, hbm_bytes)) in contenders.items():
        both = run("both")
        if both is None:
            continue
        peak, both_ms = peak_bytes(both), median_ms(both)
        forward_ms, backward_ms = (median_ms(each) if each else None for each in (run("forward"), run("backward")))
        yield PaperRow(name, forward_ms, backward_ms, both_ms, peak, gflops, hbm_bytes)


def peak_bytes(run: Run) -> int:
    """Returns the peak device memory in bytes during a run, including memory that was in use before.

    It counts the allocators of torch and CuPy, which arrays and workspaces come from.
    """
    import cupy
    import torch

    pool = cupy.get_default_memory_pool()
    free_flush_buffer()
    pool.free_all_blocks()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() + pool.total_bytes()  # CuPy's pool never shrinks by itself
    return int(peak)


def paper_summary(rows: Sequence[PaperRow]) -> list[str]:
    """Returns a line that compares flashgen with standard attention."""
    found = {row.name: row for row in rows}
    if not {"standard", "flashgen"} <= found.keys():
        return ["there is no comparison, since standard attention did not run"]
    standard, flashgen = found["standard"], found["flashgen"]
    assert standard.hbm_bytes and flashgen.hbm_bytes, "both have closed forms"
    return [
        f"beside standard attention flashgen is {standard.both_ms / flashgen.both_ms:.1f} times as fast, takes "
        f"{flashgen.peak_bytes / standard.peak_bytes:.2f} of the memory, "
        f"and moves {flashgen.hbm_bytes / standard.hbm_bytes:.2f} of the bytes"
    ]


def standard_gflops(case: Case) -> float:
    """Counts GFLOPs of both passes with materialised scores: two products in the forward, four in the backward."""
    scores = case.batch * case.heads * case.length**2
    return (flops(case.spec, "both", case.work()) - 2 * _RECOMPUTED * scores) / 1e9


def flash_gflops(case: Case, attention: Attention) -> float:
    """Counts GFLOPs of both passes over the visited tiles: two products in the forward, five in the backward."""
    return flops(case.spec, "both", case.work(attention.tiles(case.length).share)) / 1e9


def standard_bytes(case: Case) -> int:
    """Counts the HBM traffic in bytes of both passes of standard attention with fused mask and dropout."""
    sizes = (case.length, case.length, case.spec.head_dim, case.spec.value_dim)
    total = traffic_standard(*sizes) + traffic_standard_backward(*sizes)
    return _ELEMENT * case.batch * case.heads * total.total


def flash_bytes(case: Case, attention: Attention) -> int:
    """Counts the HBM traffic in bytes of both passes by the papers' algorithms, with flashgen's tiles and no cache."""
    head, value = case.spec.head_dim, case.spec.value_dim
    sizes, row = (case.length, case.length, head, value), 2 * (head + value)  # on-chip elements per row of a tile
    forward = traffic_flash2(*sizes, on_chip=row * attention.plan.tile_q)
    backward = traffic_flash_backward(*sizes, on_chip=row * attention.backward_plan.tile_k)
    return _ELEMENT * case.batch * case.heads * (forward + backward).total


def _sdpa(case: Case, backend: str, arrays: Arrays, timed: Timed) -> Run | None:
    return sdpa(case.spec, backend, timed, arrays, DROPOUT)


def _standard(case: Case, timed: Timed, arrays: Arrays) -> Run | None:
    """Returns a run of attention with materialised matrices of scores and probabilities."""
    import torch

    hidden = torch.ones(case.length, case.length, dtype=torch.bool, device=arrays[0].device).triu(1)

    def forward(q: Any, k: Any, v: Any) -> Any:
        scores = (case.spec.scale * q) @ k.transpose(-2, -1)
        probabilities = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        return torch.nn.functional.dropout(probabilities, case.spec.dropout) @ v

    return differentiated(forward, timed, arrays[:3], arrays[3])
