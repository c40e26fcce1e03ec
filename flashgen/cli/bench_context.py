"""`flashgen bench context`: sequences that are spread over several GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashgen.cli import bench_tables
from flashgen.cli.bench import Output, chosen, numbers, report, require_gpu
from flashgen.cli.options import Json, Passes
from flashgen.errors import ArgumentError

_LONG = 2**20


def context(
    gpus: Annotated[int, typer.Option("--gpus", min=0, help="How many of this machine's; 0 is all.")] = 0,
    tokens: Annotated[str, typer.Option("--tokens", help="Tokens of a GPU, by commas.")] = "8192,32768,131072",
    passes: Annotated[str, typer.Option("--pass", help="By commas: forward, both.")] = "forward,both",
    windows: Annotated[
        str, typer.Option("--windows", help='Sliding windows to measure beside causal masks, by commas; "" is none.')
    ] = "1024",
    shards: Annotated[
        str,
        typer.Option("--shards", help="How windows are sharded, by commas: zigzag, as causal masks always are; plain."),
    ] = "zigzag,plain",
    contenders: Annotated[
        str, typer.Option("--contenders", help="flashgen's schemes and peers, by commas. Default: all.")
    ] = "",
    long: Annotated[
        bool, typer.Option("--long", help="One sequence of 1,048,576 tokens instead, with sampled rows in float64.")
    ] = False,
    output: Output = Path("flashgen-context.json"),
    json: Json = False,
) -> None:
    """Measure one sequence on several GPUs: each scheme, as a share of what one GPU does by itself.

    Llama-3 8B's attention: 32 heads over 8 of dim 128, causal, bfloat16, one sequence. One GPU alone has a sequence of
    a GPU's share of the FLOPs, in the same run. Beside them torch's context_parallel over its FlashAttention-2, and a
    zigzag ring over the same operator. "ring-captured" is flashgen's ring in a CUDA graph, messages and all, which the
    host replays. Starts a process for each GPU by itself. TFLOP/s are a GPU's, of scores that
    count; the slowest rank's time counts.
    """
    require_gpu()
    from flashgen import bench
    from flashgen.ranks import SHARDS

    ranks = gpus or bench.gpus_here()
    if ranks > bench.gpus_here() or ranks < 2:
        raise ArgumentError(f"--gpus {ranks}: this machine has {bench.gpus_here()}, and 2 at least are measured")
    timed = [name.strip() for name in passes.split(",")]
    unknown = [name for name in timed if name not in (Passes.forward.value, Passes.both.value)]
    if unknown:
        raise ArgumentError(f"--pass {passes!r}: {unknown[0]!r} is not one of forward, both")
    beside = chosen(contenders, "--contenders", bench.CONTEXT_CONTENDERS)
    sizes = [_LONG // ranks] if long else numbers(tokens, "--tokens")
    shapes = [bench.ContextShape(size, long=long) for size in sizes]
    if windows and not long:
        spans, dealt = numbers(windows, "--windows"), chosen(shards, "--shards", SHARDS)
        shapes += [
            bench.ContextShape(size, window=span, shards=each) for size in sizes for span in spans for each in dealt
        ]
    named = beside or (["ring"] if long else list(bench.CONTEXT_CONTENDERS))
    rows = bench.context_rows(ranks, shapes, named, timed)
    cells = [f"{shape.name} {name}" for shape in shapes for name in timed]
    report(rows, cells, bench_tables.context(named), output, json, bench.context_summary)
