"""`flashgen bench`: kernels timed on a GPU beside the best known ones."""

from __future__ import annotations

import json as json_module
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from flashgen.cli import bench_tables
from flashgen.cli.console import INTERRUPTED, Rows, note, paragraphs, print_json, progress
from flashgen.cli.options import Json, Passes, SpecOptions, Specs, Target, with_spec_options_of
from flashgen.cli.specs import load_spec
from flashgen.cli.writing import writing
from flashgen.errors import ArgumentError, LaunchError
from flashgen.files import read_file, write_file
from flashgen.strict_json import parse_json

if TYPE_CHECKING:
    from flashgen import bench as bench_module
    from flashgen.language.spec import AttentionSpec

PEERS = ("FA2", "cuDNN", "Flex", "FA4")
PEERS_OF_DECODE = ("cuDNN", "FA2", "Flex", "FlashInfer")
PLAIN = ("full()", "causal()")
DEFAULT = "speed"
WIDEST_NAME = 48  # characters of a row's first cell on a terminal
SPEED_EXAMPLES = """[bold]Examples[/]

flashgen bench

flashgen bench "causal()" "sliding_window(1024)" --head-dims 128 --lengths 4096,16384 --output bench.json

flashgen bench --target sm_90 --dtype float16 --peers cuDNN,FA4

flashgen bench --pass backward --deterministic --peers FA2,cuDNN

flashgen bench --variants --no-mask-times

flashgen bench --variants --pass backward --only "window 1024,relative table"

flashgen bench gqa

flashgen bench decode --pages 16,64

flashgen bench decode --group lengths

flashgen bench ragged --pass backward --uneven

flashgen bench context --gpus 4

flashgen bench paper

flashgen bench host

flashgen bench train --loss-steps 300

flashgen bench plot flashgen-bench.json --output bench.svg
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


@with_spec_options_of(dtype="bfloat16", head_dim="those of --head-dims")
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

    Without SPEC: full() and causal(). There are 16384 tokens, and heads x dim is 2048, as in the FlashAttention papers;
    the dtype is bfloat16 unless --dtype says otherwise. All is measured in one run on this machine's GPU: each cell's
    contenders take turns, the L2 is flushed before each launch, and medians are shown. A peer that is not installed, or
    cannot do a cell, is left out of it; its backward uses a graph made before. The backward counts 2.5 times the
    forward's FLOPs. Prints a table and what it comes to, and saves both as JSON, row by row.
    """
    require_gpu()
    from flashgen import bench

    beside = chosen(peers, "--peers", PEERS)
    if variants:
        named = bench.chosen_variants(passes.value, listed(only))
        dtype, beside_flex = options.dtype or "bfloat16", "Flex" in beside
        rows = bench.variant_rows(named, passes.value, dtype, beside_flex, mask_times, target)
        columns = bench_tables.variants(passes != "forward", beside_flex, mask_times and passes == "forward")
        report(rows, [variant.name for variant in named], columns, output, json, bench.summary.variants)
        return
    if only:
        raise ArgumentError(f"--only {only!r} chooses among variants: add --variants")
    dims = [options.head_dim] if options.head_dim else numbers(head_dims, "--head-dims")
    declared = [declare(text, options, dim) for text in specs or PLAIN for dim in dims]
    sizes = numbers(lengths, "--lengths")
    measured = bench.speed_rows(declared, sizes, beside, passes.value, deterministic, target)
    ours = bench_tables.OURS if deterministic and passes != "forward" else bench_tables.OURS[:1]
    cells = [f"{spec.name} {length}" for spec in declared for length in sizes]
    report(measured, cells, bench_tables.speed([*ours, *beside]), output, json, bench.summary.speed)


@with_spec_options_of(dtype="bfloat16", head_dim="128")
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
    """Measure query heads that share heads of keys and values (GQA, MQA) beside ones that don't, at equal FLOPs.

    Without SPEC: full() and causal(). There are 16384 tokens, with head dim 128 and bfloat16 unless options say
    otherwise. The numbers of heads of keys and values take turns.
    """
    require_gpu()
    from flashgen import bench

    shared, sizes = numbers(heads_kv, "--heads-kv"), numbers(lengths, "--lengths")
    uneven = [number for number in shared if heads % number]
    if uneven:
        raise ArgumentError(f"--heads-kv {heads_kv!r}: {uneven[0]} does not divide --heads {heads}")
    declared, beside = [declare(text, options, 128) for text in specs or PLAIN], chosen(peers, "--peers", PEERS)
    rows = bench.grouped_rows(declared, sizes, shared, heads, beside, passes.value, target)
    cells = [f"{spec.name} {length}" for spec in declared for length in sizes for _ in shared]
    report(rows, cells, bench_tables.grouped(["flashgen", *beside]), output, json, bench.summary.grouped)


@with_spec_options_of(dtype="bfloat16", head_dim="128")
def decode(
    options: SpecOptions,
    specs: Specs = None,
    sizes: Annotated[
        str,
        typer.Option(
            "--sizes",
            help="batch x heads:heads_kv x keys, or x keys x queries, by commas, such as 1x32:8x131072. "
            "Default: nine of them.",
        ),
    ] = "",
    pages: Annotated[str, typer.Option("--pages", help='Sizes of pages to measure too, by commas; "" is none.')] = "",
    splits: Annotated[
        str, typer.Option("--splits", help='Numbers of parts to measure too, by commas; "" is none.')
    ] = "",
    plans: Annotated[
        str,
        typer.Option(
            "--plans",
            help="Plans to measure too, by commas: rows x keys x warps x stages x blocks, as 16x16x4x3x2.",
        ),
    ] = "",
    group: Annotated[
        str, typer.Option("--group", help="Instead of sizes: lengths that differ, variants, or mixed batches.")
    ] = "",
    only: Annotated[str, typer.Option("--only", help="Of the variants, these, by commas. Default: all.")] = "",
    peers: Annotated[str, typer.Option("--peers", help=PEERS_HELP)] = "cuDNN,FA2,Flex,FlashInfer",
    target: Target = None,
    output: Output = Path("flashgen-decode.json"),
    json: Json = False,
) -> None:
    """Measure few queries over many keys, in TB/s of the K and V that the mask needs, beside the best decoders.

    Without SPEC: full(). Head dim 128 and bfloat16 unless options say otherwise; specs must capture nothing. flashgen
    takes the kernel and the splits that calls take; pages are in random order. With --kv-dtype flashgen reads 8 bits,
    and peers 16, as flashgen does once more. FlashInfer, where it is installed, reads pages of 64 and is planned
    beforehand; FlexAttention is compiled for each size. --splits and --plans measure flashgen's own choices.

    --group lengths: 64 sequences of 1 to 32768 keys over pages beside equal ones, also with a schedule made before.
    --group variants: masks and scores beside full attention to as many keys as they visit, and FlexAttention.
    --group mixed: a prompt of 2048 queries and 63 sequences of one, over pages. These take one SPEC, for its dims.
    """
    require_gpu()
    from flashgen import bench

    declared = [declare(text, options, 128) for text in specs or PLAIN[:1]]
    captured = [spec for spec in declared if spec.captures]
    if captured:
        raise ArgumentError(
            f"{captured[0].name} captures {captured[0].captures[0].name!r}: bench specs without captures"
        )
    if options.page_size:
        raise ArgumentError(f"--page-size {options.page_size}: name sizes by --pages, beside contiguous keys")
    given, beside = [decode_size(text) for text in listed(sizes)], chosen(peers, "--peers", bench.DECODE_PEERS)
    if group:
        serving(group, declared[0], given, beside, listed(only), target, output, json)
        return
    if only:
        raise ArgumentError(f"--only {only!r} chooses among variants: add --group variants")
    measured, page_sizes = given or list(bench.DECODE_SIZES), numbers(pages, "--pages") if pages else []
    parts, planned = numbers(splits, "--splits") if splits else [], [decode_plan(text) for text in listed(plans)]
    rows = bench.decode_rows(declared, measured, beside, page_sizes, target, parts, planned)
    wide = ["16 bits"] if options.kv_dtype else []
    own = [*(f"pages of {page}" for page in page_sizes), *bench.own_choices(parts, planned)]
    contenders = ["flashgen", *wide, *own, *beside]
    names = [f"{spec.name} {size}" for spec in declared for size in measured]
    report(rows, names, bench_tables.decode(contenders), output, json, bench.summary.decode)


def serving(
    group: str,
    spec: AttentionSpec,
    sizes: Sequence[bench_module.DecodeSize],
    peers: Sequence[str],
    only: Sequence[str],
    target: str | None,
    output: Path,
    json: bool,
) -> None:
    """A group of `bench decode`."""
    from flashgen import bench

    if group not in bench.SERVING_GROUPS:
        raise ArgumentError(f"--group {group!r} is not known; choose from {', '.join(bench.SERVING_GROUPS)}")
    offered = [variant.name for variant in bench.serving_variants()]
    for name in only:
        if group != "variants" or name not in offered:
            raise ArgumentError(f"--only {name!r}: choose among the variants {', '.join(offered)}, of --group variants")
    rows = bench.serving_rows(group, spec, sizes, peers, target, only)
    contenders = [name for name in bench.SERVING_CONTENDERS[group] if name not in PEERS_OF_DECODE or name in peers]
    columns = bench_tables.serving(contenders, bench.SERVING_COMPARED[group])
    report(rows, [group], columns, output, json, lambda measured: [])


def decode_plan(text: str) -> Any:
    """ "16x16x4x3x2" -> the plan of 16 rows, 16 keys, 4 warps, 3 stages, 2 blocks on a multiprocessor."""
    from flashgen.codegen.mma_sync.decode_plans import DecodePlan

    if not re.fullmatch(r"\d+(x\d+){4}", text):
        raise ArgumentError(f"--plans {text!r} must be rows x keys x warps x stages x blocks, such as 16x16x4x3x2")
    rows, keys, warps, stages, blocks = (int(part) for part in text.split("x"))
    return DecodePlan(rows, keys, warps, stages, blocks)


def decode_size(text: str) -> bench_module.DecodeSize:
    """ "16x64:8x8192x4" -> 16 sequences, 64 heads over 8, 8192 keys, 4 queries."""
    from flashgen import bench

    found = re.fullmatch(r"(\d+)x(\d+):(\d+)x(\d+)(?:x(\d+))?", text)
    given = [int(part) for part in found.groups("1")] if found else [0]
    if not all(given) or given[1] % given[2]:
        raise ArgumentError(f"--sizes {text!r} must be batch x heads:heads_kv x keys, such as 1x32:8x131072")
    return bench.DecodeSize(*given)


@with_spec_options_of(dtype="bfloat16", head_dim="128", layout="thd")
def ragged(
    options: SpecOptions,
    specs: Specs = None,
    passes: Timed = Passes.forward,
    heads: Annotated[int, typer.Option("--heads", min=1, help="Heads of queries, keys and values.")] = 16,
    documents: Annotated[
        str, typer.Option("--documents", help="Batches by commas, DOCUMENTSxTOKENS each.")
    ] = "16x16384,128x16384,64x65536",
    uneven: Annotated[bool, typer.Option("--uneven", help="Lengths that are log-uniform, not equal.")] = False,
    peers: Annotated[
        str, typer.Option("--peers", help="Peers by commas, of FA4 and torch (varlen_attn).")
    ] = "FA4,torch",
    target: Target = None,
    output: Output = Path("flashgen-ragged.json"),
    json: Json = False,
) -> None:
    """Measure ragged batches, packed documents that attend within themselves, beside attention of variable lengths.

    Without SPEC: causal(), with head dim 128 and bfloat16 unless options say otherwise. Peers that are not installed
    are left out. Nothing is made outside of the calls.
    """
    require_gpu()
    from flashgen import bench

    shapes = [batch_of(text) for text in listed(documents)]
    declared = [declare(text, options.with_defaults(layout="thd"), 128) for text in specs or ("causal()",)]
    beside = chosen(peers, "--peers", bench.RAGGED_PEERS)
    rows = bench.ragged_rows(declared, shapes, heads, beside, passes.value, uneven, target)
    cells = [f"{spec.name} {count} in {tokens}" for spec in declared for count, tokens in shapes]
    report(rows, cells, bench_tables.ragged(["flashgen", *beside]), output, json, bench.summary.ragged)


def batch_of(text: str) -> tuple[int, int]:
    """ "16x16384" -> (16, 16384): documents, and tokens in all."""
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        raise ArgumentError(f"--documents {text!r} must be DOCUMENTSxTOKENS, such as 16x16384")
    return int(parts[0]), int(parts[1])


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
    report(rows, ["standard", *names, "flashgen"], bench_tables.paper(), output, json, bench_tables.paper_summary)


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
    launches, and the rest. With torch also its operator, with and without gradients, beside the attention itself,
    torch's SDPA, and functions of the same graph, one around the attention itself and an empty one, which is autograd's
    own share; a backward of these is a call's share of one that goes through 16. An older checkout is measured by
    `PYTHONPATH=CHECKOUT python -P flashgen/bench/host.py`.
    """
    require_gpu()
    from flashgen import bench

    named = chosen(libraries, "--libraries", bench.LIBRARIES) or bench.installed_libraries()
    timed = bench.PASSES if passes is Passes.both else [name for name in bench.PASSES if name == passes.value]
    others = [bench.operator_rows(timed, target, groups), bench.function_rows(groups)] if "torch" in named else []
    rows = chain(bench.host_rows(named, timed, target, groups), *others, bench.start_rows(target))
    names = [case.name for _ in named for case in bench.host_cases() for _ in timed]
    names += [*([*bench.operator_names(timed), *bench.function_names()] if others else []), *["start"] * bench.STARTS]
    report(rows, names, bench_tables.host([*bench.PARTS, bench.REST]), output, json, bench.operator_summary)


def train(
    attentions: Annotated[
        str, typer.Option("--attentions", help="Whose attention, by commas: standard, FA2, cuDNN, Flex, flashgen.")
    ] = "standard,FA2,cuDNN,Flex,flashgen",
    modes: Annotated[str, typer.Option("--modes", help="By commas: eager, compile.")] = "eager,compile",
    shapes: Annotated[str, typer.Option("--shapes", help="Batch x tokens, by commas.")] = "32x1024,4x8192",
    loss_steps: Annotated[
        int, typer.Option("--loss-steps", min=0, help="Compare the losses of so many steps, at the first shape.")
    ] = 0,
    long: Annotated[
        bool, typer.Option("--long", help="1 x 65536 with a window of 1024 in 16 documents instead, beside Flex.")
    ] = False,
    output: Output = Path("flashgen-train.json"),
    json: Json = False,
) -> None:
    """Train GPT-2 124M by each attention: milliseconds a step, tokens a second, the most memory.

    bfloat16 autocast, fused AdamW, eager and under torch.compile, on the text that ships with Python. One model after
    another, each with the memory for itself; medians of 20 steps. Needs torch.

    With --loss-steps all begin with the same weights and see the same batches, by GPT-2's recipe: AdamW of 0.9 and 0.95
    with a decay of 0.1, gradients clipped to 1, a rate that rises over a third of the steps and falls by a cosine to a
    tenth, 6e-4 for 2^19 tokens a step and less by the square root for fewer. Training amplifies any difference of
    roundings until two runs are as far apart as any two. So curves are compared with standard attention's as means over
    30 steps, and over the first 30 steps as they are, beside a floor: standard attention with scores and weights in
    float32, a training more. An attention that is wrong is apart from the first steps on, and beyond the floor.
    """
    require_gpu()
    from flashgen import bench

    names = chosen(attentions, "--attentions", bench.ATTENTIONS)
    named = chosen(modes, "--modes", bench.MODES)
    sizes = [shape_of(text) for text in listed(shapes)]
    rows = bench.train_rows(names, named, sizes, loss_steps, long)
    planned = bench.trainings(names, named, sizes, loss_steps, long)
    labels = [f"{name} {mode} {batch}x{length}" for name, mode, (batch, length), _ in planned]
    report(rows, labels, bench_tables.train(), output, json, bench.train_summary)


def plot(
    measured: Annotated[Path, typer.Argument(metavar="FILE", help="JSON that another `flashgen bench` has saved.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the picture goes: .svg or .png.")] = Path(
        "flashgen-bench.svg"
    ),
) -> None:
    """Draw what another command of this group has saved as bars, beside the peers. Needs matplotlib, and no GPU."""
    from flashgen.bench.bars import FORMATS, draw

    form = output.suffix.removeprefix(".")
    if form not in FORMATS:
        raise ArgumentError(f"--output {output} must end in {' or '.join(f'.{each}' for each in FORMATS)}")
    try:
        saved = parse_json(read_file(measured))
    except OSError as error:
        raise ArgumentError(f"{measured} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ArgumentError(f"{measured} cannot be read as JSON: {error}") from None
    try:
        drawn = draw(saved, form)
    except ArgumentError as error:
        raise ArgumentError(f"{measured}: {error}") from None
    with writing(output):
        write_file(output, drawn)
    note(f"{measured} -> {output}")


def shape_of(text: str) -> tuple[int, int]:
    """ "32x1024" -> (32, 1024)."""
    batch, _, length = text.partition("x")
    if not (batch.isdecimal() and length.isdecimal() and int(batch) and int(length)):
        raise ArgumentError(f"--shapes {text!r} must be batch x tokens, such as 32x1024")
    return int(batch), int(length)


app.command(DEFAULT, help=paragraphs(speed.__doc__), epilog=SPEED_EXAMPLES)(speed)
app.command("gqa", help=paragraphs(gqa.__doc__))(gqa)
app.command("decode", help=paragraphs(decode.__doc__))(decode)
app.command("ragged", help=paragraphs(ragged.__doc__))(ragged)
app.command("paper", help=paragraphs(paper.__doc__))(paper)
app.command("host", help=paragraphs(host.__doc__))(host)
app.command("train", help=paragraphs(train.__doc__))(train)
app.command("plot", help=paragraphs(plot.__doc__))(plot)


def declare(text: str, options: SpecOptions, head_dim: int) -> AttentionSpec:
    """The spec that a SPEC and its options declare, in bfloat16 and with that head dim unless they say otherwise."""
    return load_spec(text, options.with_defaults(dtype="bfloat16", head_dim=head_dim))


def require_gpu() -> None:
    """Raises LaunchError where there is no GPU to measure on."""
    from flashgen.cli.machine import gpus

    if not gpus():
        raise LaunchError("there is no GPU here to measure on; `flashgen verify --emulate` runs kernels without one")


def report(
    measured: Iterator[Any],
    names: Sequence[str],
    columns: bench_tables.Columns,
    output: Path,
    json: bool,
    summary: Callable[[list[Any]], list[str]],
) -> None:
    """Measures, printing and saving row by row, then prints what the rows come to, also after a Ctrl-C.

    names: what is measured, in order, for whoever waits.
    """
    from flashgen.bench import environment

    saved: dict[str, Any] = {"environment": environment(), "rows": [], "interrupted": False}
    rows: list[Any] = []
    shown = Rows(tuple(columns), {next(iter(columns)): min(WIDEST_NAME, max(map(len, names), default=0))})
    with progress(names[0] if names else "", len(names)) as bar:
        try:
            for row in measured:
                rows.append(row)
                saved["rows"].append(row.to_dict())
                if not json:
                    shown.add(bench_tables.cells(columns, row))
                save(saved | {"summary": summary(rows)}, output)  # rows that are measured are kept
                bar.update(bar.task_ids[0], advance=1, description=names[min(len(rows), len(names) - 1)])
        except KeyboardInterrupt:
            saved["interrupted"] = True
    saved["summary"] = summary(rows)
    if rows:
        save(saved, output)
    if json:
        print_json(saved)
    else:
        said = [f"interrupted after {len(rows)} of {len(names)} rows"] if saved["interrupted"] else []
        said += [*saved["summary"], f"saved to {output}"] if rows else []
        for line in said:
            note(line)
    if saved["interrupted"]:
        raise typer.Exit(INTERRUPTED)


def save(measured: dict[str, Any], output: Path) -> None:
    with writing(output):
        write_file(output, json_module.dumps(measured, indent=2) + "\n")


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
