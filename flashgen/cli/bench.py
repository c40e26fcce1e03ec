"""`flashgen bench`: kernels timed on a GPU beside the best known ones."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from flashgen.cli import bench_tables
from flashgen.cli.console import note, paragraphs, print_json, print_table, track
from flashgen.cli.options import Json, Passes, SpecOptions, Specs, Target, with_spec_options
from flashgen.cli.specs import load_spec
from flashgen.errors import ArgumentError, LaunchError

if TYPE_CHECKING:
    from flashgen.language.spec import AttentionSpec

PEERS = ("FA2", "cuDNN", "Flex", "FA4")
PLAIN = ("full()", "causal()")
DEFAULT = "speed"
SPEED_EXAMPLES = """[bold]Examples[/]

flashgen bench

flashgen bench "causal()" "sliding_window(1024)" --head-dims 128 --lengths 4096,16384 --output bench.json

flashgen bench --target sm_90 --dtype float16 --peers cuDNN,FA4

flashgen bench --pass backward --deterministic --peers FA2,cuDNN

flashgen bench --variants --no-mask-times

flashgen bench --variants --pass backward --only "window 1024,relative table"

flashgen bench gqa

flashgen bench paper

flashgen bench host
"""


class WithDefault(TyperGroup):
    """A group whose first argument is a command, or else belongs to its default command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = args and (args[0] in self.commands or args[0] in self.get_help_option_names(ctx))
        return super().parse_args(ctx, args if named else [DEFAULT, *args])


app = typer.Typer(
    cls=WithDefault,
    help="Measure kernels on this machine's GPU beside the best known ones; without a command, [cyan]speed[/].",
    epilog=SPEED_EXAMPLES,
)

Output = Annotated[Path, typer.Option("--output", "-o", help="Where the JSON goes.")]
Timed = Annotated[Passes, typer.Option("--pass", help="What is timed; both is one after the other.")]
PEERS_HELP = 'Whom to measure beside, by commas; "" is nobody.'


@with_spec_options
def speed(
    options: SpecOptions,
    specs: Specs = None,
    passes: Timed = Passes.forward,
    lengths: Annotated[str, typer.Option("--lengths", help="Tokens of a sequence, by commas.")] = "1024,4096,16384",
    head_dims: Annotated[str, typer.Option("--head-dims", help="Head dims, by commas.")] = "64,128,256",
    peers: Annotated[str, typer.Option("--peers", help=PEERS_HELP)] = ",".join(PEERS),
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Time the deterministic backward too.")
    ] = False,
    variants: Annotated[
        bool, typer.Option("--variants", help="Time masks and scores at length 16384 beside FlexAttention instead.")
    ] = False,
    only: Annotated[str, typer.Option("--only", help="Of the variants, these, by commas. Default: all.")] = "",
    mask_times: Annotated[
        bool,
        typer.Option(
            "--mask-times/--no-mask-times",
            help="Of the variants, time the making of FlexAttention's block masks, which torch compiles for minutes.",
        ),
    ] = True,
    target: Target = None,
    output: Output = Path("flashgen-bench.json"),
    json: Json = False,
) -> None:
    """Measure TFLOP/s over lengths and head dims, beside torch's SDPA backends, FlexAttention and FlashAttention-4.

    Without SPEC: full() and causal(). Of 16384 tokens and heads·dim 2048, as the FlashAttention papers measure; in
    bfloat16 unless --dtype says otherwise. All in one run on this machine's GPU, each cell's contenders in turn, the L2
    flushed before each launch, the median of many. A peer that is not installed, or cannot do a cell, is left out of
    it; its backward goes through a graph made before. The backward counts 2.5 times the forward's FLOPs. Prints a table
    and what it comes to, and saves both as JSON, row by row.
    """
    require_gpu()
    from flashgen import bench

    beside = chosen(peers, "--peers", PEERS)
    if variants:
        named = bench.chosen_variants(passes.value, listed(only))
        dtype, beside_flex = options.dtype or "bfloat16", "Flex" in beside
        rows = bench.variant_rows(named, passes.value, dtype, beside_flex, mask_times, target)
        report(rows, len(named), bench_tables.variants, output, json, bench.summary.variants)
        return
    if only:
        raise ArgumentError(f"--only {only!r} chooses among variants: add --variants")
    dims = [options.head_dim] if options.head_dim else numbers(head_dims, "--head-dims")
    declared = [declare(text, options, dim) for text in specs or PLAIN for dim in dims]
    sizes = numbers(lengths, "--lengths")
    measured = bench.speed_rows(declared, sizes, beside, passes.value, deterministic, target)
    report(measured, len(declared) * len(sizes), bench_tables.speed, output, json, bench.summary.speed)


@with_spec_options
def gqa(
    options: SpecOptions,
    specs: Specs = None,
    passes: Timed = Passes.forward,
    heads: Annotated[int, typer.Option("--heads", min=1, help="Heads of the queries.")] = 32,
    heads_kv: Annotated[
        str, typer.Option("--heads-kv", help="Heads of keys and values, by commas; the first is compared with.")
    ] = "32,8,1",
    lengths: Annotated[str, typer.Option("--lengths", help="Tokens of a sequence, by commas.")] = "4096,16384",
    peers: Annotated[str, typer.Option("--peers", help=PEERS_HELP)] = "",
    target: Target = None,
    output: Output = Path("flashgen-gqa.json"),
    json: Json = False,
) -> None:
    """Measure query heads that share heads of keys and values (GQA, MQA) beside ones that don't, of the same FLOPs.

    Without SPEC: full() and causal(). Of 16384 tokens and head dim 128, in bfloat16, unless options say otherwise. All
    numbers of heads of keys and values are measured in turn.
    """
    require_gpu()
    from flashgen import bench

    shared, sizes = numbers(heads_kv, "--heads-kv"), numbers(lengths, "--lengths")
    uneven = [number for number in shared if heads % number]
    if uneven:
        raise ArgumentError(f"--heads-kv {heads_kv!r}: {uneven[0]} does not divide --heads {heads}")
    declared = [declare(text, options, 128) for text in specs or PLAIN]
    rows = bench.grouped_rows(declared, sizes, shared, heads, chosen(peers, "--peers", PEERS), passes.value, target)
    total = len(declared) * len(sizes) * len(shared)
    report(rows, total, bench_tables.grouped, output, json, bench.summary.grouped)


def paper(
    peers: Annotated[
        str, typer.Option("--peers", help='Backends of torch to measure beside, by commas; "" is none.')
    ] = "FA2",
    target: Target = None,
    output: Output = Path("flashgen-paper.json"),
    json: Json = False,
) -> None:
    """The FlashAttention paper's own table: standard attention in plain torch beside flashgen's, forward and backward.

    Batch 64, 16 heads, length 1024, head dim 64, dropout 0.1, causal, float16. Time and the most memory are measured;
    FLOPs and HBM traffic are counted, by the closed forms of the papers' algorithms with flashgen's tiles.
    """
    require_gpu()
    from flashgen import bench

    names = chosen(peers, "--peers", ("FA2", "cuDNN"))
    rows = bench.paper_rows(names, target)
    report(rows, len(names) + 2, bench_tables.paper, output, json, bench_tables.paper_summary)


def host(
    passes: Timed = Passes.both,
    libraries: Annotated[
        str, typer.Option("--libraries", help="Whose arrays, by commas: cupy, torch. Default: those installed.")
    ] = "",
    target: Target = None,
    groups: Annotated[int, typer.Option("--groups", min=1, help="Groups of 50 calls for each number.")] = 40,
    output: Output = Path("flashgen-host.json"),
    json: Json = False,
) -> None:
    """What a call costs its host thread, in microseconds: whole, and by part; and what it costs to begin.

    Warm calls of one tile and of many: plain, with arrays for the results given, with dropout, with lists of tiles. The
    median and the least of the medians of groups of calls; measure with nothing else on the machine. Parts are looked
    at in groups of their own, each without what it calls of another: the checks of arguments, the numbers of a call,
    memory for results and workspaces, lists of tiles, counters, clearing, addresses, the struct of arguments, the
    launches, and the rest. An older checkout is measured by `PYTHONPATH=CHECKOUT python -P flashgen/bench/host.py`.
    """
    require_gpu()
    from flashgen import bench

    named = chosen(libraries, "--libraries", bench.LIBRARIES) or bench.installed_libraries()
    timed = bench.PASSES if passes is Passes.both else [name for name in bench.PASSES if name == passes.value]
    rows = chain(bench.host_rows(named, timed, target, groups), bench.start_rows(target))
    total = len(bench.host_cases()) * len(named) * len(timed) + bench.STARTS
    report(rows, total, bench_tables.host, output, json, lambda rows: [])


app.command(DEFAULT, help=paragraphs(speed.__doc__), epilog=SPEED_EXAMPLES)(speed)
app.command("gqa", help=paragraphs(gqa.__doc__))(gqa)
app.command("paper", help=paragraphs(paper.__doc__))(paper)
app.command("host", help=paragraphs(host.__doc__))(host)


def declare(text: str, options: SpecOptions, head_dim: int) -> AttentionSpec:
    """The spec of a SPEC and its options, in bfloat16 and of that head dim unless they say otherwise."""
    return load_spec(text, options.with_defaults(dtype="bfloat16", head_dim=head_dim))


def require_gpu() -> None:
    """LaunchError where there is nothing to measure on."""
    from flashgen.cli.machine import gpus

    if not gpus():
        raise LaunchError("there is no GPU here to measure on; `flashgen verify --emulate` runs kernels without one")


def report(
    measured: Iterator[Any],
    total: int,
    table: Callable[[list[Any]], bench_tables.Table],
    output: Path,
    json: bool,
    summary: Callable[[list[Any]], list[str]],
) -> None:
    """Measure, saving row by row with what the rows come to; then print."""
    from flashgen.bench import environment

    rows: list[Any] = []
    saved: dict[str, Any] = {"environment": environment(), "rows": []}
    for row in track(measured, "measuring", total):
        rows.append(row)
        saved["rows"].append(row.to_dict())
        saved["summary"] = summary(rows)
        output.write_text(json_module.dumps(saved, indent=2) + "\n", encoding="utf-8")  # what is measured is kept
    if json:
        print_json(saved)
        return
    print_table(*table(rows))
    for line in summary(rows):
        note(line)
    note(f"saved to {output}")


def numbers(text: str, option: str) -> list[int]:
    """ "1024,4096" -> [1024, 4096]."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentError(f"{option} {text!r} must be integers parted by commas, such as 1024,4096") from None
    if min(found) < 1:
        raise ArgumentError(f"{option} {text!r} must be positive")
    return found


def listed(text: str) -> list[str]:
    """ "window 1024, full" -> ["window 1024", "full"]; "" is none."""
    return [name.strip() for name in text.split(",") if name.strip()]


def chosen(text: str, option: str, offered: Sequence[str]) -> list[str]:
    """ "FA2,Flex" -> ["FA2", "Flex"]; "" is none."""
    names = listed(text)
    unknown = [name for name in names if name not in offered]
    if unknown:
        raise ArgumentError(f"{option} {text!r}: {unknown[0]!r} is not one of {', '.join(offered)}")
    return names
