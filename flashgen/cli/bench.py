"""`flashgen bench`: kernels timed on a GPU beside the best known ones."""

from __future__ import annotations

import json as json_module
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from flashgen.cli.console import note, print_json, print_table, track
from flashgen.cli.options import Json, SpecOptions, Specs, with_spec_options
from flashgen.cli.specs import load_spec
from flashgen.errors import ArgumentError, LaunchError

PEERS = ("FA2", "cuDNN", "Flex")
EXAMPLES = """[bold]Examples[/]

flashgen bench

flashgen bench "causal()" "sliding_window(1024)" --head-dims 128 --lengths 4096,16384 --output bench.json

flashgen bench --variants
"""


@with_spec_options
def bench(
    options: SpecOptions,
    specs: Specs = None,
    lengths: Annotated[str, typer.Option("--lengths", help="Tokens of a sequence, by commas.")] = "1024,4096,16384",
    head_dims: Annotated[str, typer.Option("--head-dims", help="Head dims, by commas.")] = "64,128,256",
    peers: Annotated[str, typer.Option("--peers", help="Whom to measure beside, by commas.")] = "FA2,cuDNN,Flex",
    variants: Annotated[
        bool, typer.Option("--variants", help="Time masks and scores at length 16384 beside FlexAttention instead.")
    ] = False,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the JSON goes.")] = Path("flashgen-bench.json"),
    json: Json = False,
) -> None:
    """Measure TFLOP/s over lengths and head dims, beside torch's SDPA backends and FlexAttention where they are.

    Without SPEC: full() and causal(). Of 16384 tokens and heads·dim 2048, as the FlashAttention papers measure; in
    bfloat16 unless --dtype says otherwise. All in one run on this machine's GPU, the L2 flushed before each launch,
    the median of many. Prints a table and saves it as JSON.
    """
    from flashgen.cli.machine import gpus

    if not gpus():
        raise LaunchError("there is no GPU here to measure on; `flashgen verify --emulate` runs kernels without one")
    from flashgen import bench as benchmark

    measured: Iterator[Any]
    if variants:
        measured, total = benchmark.variant_rows(options.dtype or "bfloat16"), benchmark.variant_count()
    else:
        dims = [options.head_dim] if options.head_dim else numbers(head_dims, "--head-dims")
        declared = [
            load_spec(text, options.with_defaults(dtype="bfloat16", head_dim=dim))
            for text in specs or ["full()", "causal()"]
            for dim in dims
        ]
        sizes = numbers(lengths, "--lengths")
        measured, total = benchmark.forward_rows(declared, sizes, chosen(peers)), len(declared) * len(sizes)
    rows: list[Any] = []
    for row in track(measured, "measuring", total):
        rows.append(row)
        report = {"environment": benchmark.environment(), "rows": [row.to_dict() for row in rows]}
        output.write_text(json_module.dumps(report, indent=2) + "\n", encoding="utf-8")  # what is measured is kept
    if json:
        print_json(report)
        return
    print_table(*(variant_table(rows) if variants else speed_table(rows)))
    note(f"saved to {output}")


def speed_table(rows: list[Any]) -> tuple[tuple[str, ...], list[list[str]]]:
    """TFLOP/s by case and contender."""
    contenders = list(dict.fromkeys(name for row in rows for name in row.tflops))
    heading = ("spec", "length", *(f"{name} TFLOP/s" for name in contenders))
    return heading, [[row.spec, str(row.length), *(number(row.tflops.get(n)) for n in contenders)] for row in rows]


def variant_table(rows: list[Any]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Milliseconds by variant, beside FlexAttention's."""
    heading = (
        "variant",
        "ms",
        "Flex ms",
        "times Flex",
        "lists ms",
        "Flex mask ms",
        "tiles left",
        "ms per tile / full's",
    )
    cells = [
        [
            row.name,
            number(row.milliseconds, 3),
            number(row.flex_ms, 3),
            number(row.ratio, 2),
            number(row.lists_ms, 3),
            number(row.flex_mask_ms, 3),
            f"{100 * row.share:.1f}%",
            number(row.per_tile, 2),
        ]
        for row in rows
    ]
    return heading, cells


def numbers(text: str, option: str) -> list[int]:
    """ "1024,4096" -> [1024, 4096]."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentError(f"{option} {text!r} must be integers parted by commas, such as 1024,4096") from None
    if min(found) < 1:
        raise ArgumentError(f"{option} {text!r} must be positive")
    return found


def chosen(peers: str) -> list[str]:
    """ "FA2,Flex" -> ["FA2", "Flex"]; "" is none."""
    names = [name for name in peers.split(",") if name]
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise ArgumentError(f"--peers {peers!r}: {unknown[0]!r} is not one of {', '.join(PEERS)}")
    return names


def number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
