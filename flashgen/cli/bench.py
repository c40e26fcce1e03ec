"""`flashgen bench`: time kernels on a GPU, and compare them with other implementations."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from flashgen.cli import bench_tables
from flashgen.cli.bench_options import PEERS_HELP, Output, Timed, chosen, listed, numbers
from flashgen.cli.bench_report import report, require_gpu
from flashgen.cli.console import paragraphs
from flashgen.cli.options import Json, Passes, SpecOptions, Specs, Target, with_spec_options_of
from flashgen.cli.specs import load_spec
from flashgen.cli.writing import Force
from flashgen.errors import ArgumentError

if TYPE_CHECKING:
    from flashgen import bench as bench_module
    from flashgen.language.spec import AttentionSpec

PEERS = ("FA2", "cuDNN", "Flex", "FA4", "FFPA")
PEERS_OF_DECODE = ("cuDNN", "FA2", "Flex", "FlashInfer", "FlashMLA")
BIAS_PEERS = ("cuDNN", "EFFICIENT", "Flex")
PLAIN = ("full()", "causal()")
DEFAULT = "speed"
MOVED = ("context", "host", "paper", "plot", "train")  # commands that are now `python -m benchmarks COMMAND`
SPEED_EXAMPLES = """[bold]Examples[/]

flashgen bench

flashgen bench "causal()" "sliding_window(1024)" --head-dims 128 --lengths 4096,16384 --output bench.json

flashgen bench --target sm_90 --dtype float16 --peers cuDNN,FA4

flashgen bench --pass backward --deterministic --peers FA2,cuDNN

flashgen bench --head-dims 512 --lengths 8192,16384 --batch 1 --heads 16 --peers FFPA

flashgen bench --variants --no-mask-times

flashgen bench --variants --pass backward --only "window 1024,relative table"

flashgen bench gqa

flashgen bench biases --pass backward

flashgen bench decode --pages 16,64

flashgen bench decode --group lengths

flashgen bench decode --prompts

flashgen bench decode --latent

flashgen bench ragged --pass backward --uneven
"""


class WithDefault(TyperGroup):
    """A group with a default command, which takes the arguments if the first one does not name a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = args and (args[0] in self.commands or args[0] in self.get_help_option_names(ctx))
        return super().parse_args(ctx, args if named else [DEFAULT, *args])


app = typer.Typer(
    cls=WithDefault,
    help="Compare kernels with other implementations on this machine's GPU. The default command is [cyan]speed[/].",
    epilog=SPEED_EXAMPLES,
)


@with_spec_options_of(dtype="bfloat16", head_dim="those of --head-dims")
def speed(
    options: SpecOptions,
    specs: Specs = None,
    passes: Timed = Passes.forward,
    lengths: Annotated[str, typer.Option("--lengths", help="Sequence lengths, comma-separated.")] = "1024,4096,16384",
    head_dims: Annotated[str, typer.Option("--head-dims", help="Head dims, comma-separated.")] = "64,128,256",
    batch: Annotated[int, typer.Option("--batch", min=0, help="Sequences.", show_default="16384 / length")] = 0,
    heads: Annotated[int, typer.Option("--heads", min=0, help="Heads.", show_default="2048 / head dim")] = 0,
    peers: Annotated[str, typer.Option("--peers", help=PEERS_HELP)] = ",".join(PEERS),
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Also time the deterministic backward.")
    ] = False,
    variants: Annotated[
        bool, typer.Option("--variants", help="Compare masks and scores at length 16384 with FlexAttention instead.")
    ] = False,
    only: Annotated[str, typer.Option("--only", help="The variants to time, comma-separated. Default: all.")] = "",
    mask_times: Annotated[
        bool,
        typer.Option(
            "--mask-times/--no-mask-times",
            help="With --variants: also time FlexAttention's creation of block masks, which takes minutes to compile.",
        ),
    ] = True,
    target: Target = None,
    output: Output = Path("flashgen-bench.json"),
    force: Force = False,
    json: Json = False,
) -> None:
    """Measure TFLOP/s over lengths and head dims, for flashgen, torch's SDPA backends, FlexAttention, FA4 and FFPA.

    The default specs are full() and causal(). As in the FlashAttention papers, batch x length is 16384 tokens and heads
    x head dim is 2048, unless --batch and --heads say otherwise; the default dtype is bfloat16. The implementations of
    a cell run alternately, the L2 cache is flushed before each launch, and the table shows medians. A peer that is not
    installed, or does not support a cell, is left out. The backward of a peer uses an autograd graph that is built
    before the timing starts. The FLOPs of the backward are counted as 2.5 times those of the forward. A table and a
    summary are printed, and saved as JSON after each row.
    """
    require_gpu()
    from flashgen import bench

    beside = chosen(peers, "--peers", PEERS)
    if variants:
        named = bench.chosen_variants(passes.value, listed(only))
        dtype, beside_flex = options.dtype or "bfloat16", "Flex" in beside
        rows = bench.variant_rows(named, passes.value, dtype, beside_flex, mask_times, target)
        columns = bench_tables.variants(passes != "forward", beside_flex, mask_times and passes == "forward")
        report(rows, [variant.name for variant in named], columns, output, json, bench.summary.variants, force)
        return
    if only:
        raise ArgumentError(f"--only {only!r} chooses among variants: add --variants")
    dims = [options.head_dim] if options.head_dim else numbers(head_dims, "--head-dims")
    declared = [declare(text, options, dim) for text in specs or PLAIN for dim in dims]
    sizes = numbers(lengths, "--lengths")
    measured = bench.speed_rows(declared, sizes, beside, passes.value, deterministic, target, batch, heads)
    ours = bench_tables.OURS if deterministic and passes != "forward" else bench_tables.OURS[:1]
    cells = [f"{spec.name} {length}" for spec in declared for length in sizes]
    report(measured, cells, bench_tables.speed([*ours, *beside]), output, json, bench.summary.speed, force)


@with_spec_options_of(dtype="bfloat16", head_dim="128")
def gqa(
    options: SpecOptions,
    specs: Specs = None,
    passes: Timed = Passes.forward,
    heads: Annotated[int, typer.Option("--heads", min=1, help="Number of query heads.")] = 32,
    heads_kv: Annotated[
        str, typer.Option("--heads-kv", help="Numbers of key heads, comma-separated; the first is the reference.")
    ] = "32,8,1",
    lengths: Annotated[str, typer.Option("--lengths", help="Sequence lengths, comma-separated.")] = "4096,16384",
    peers: Annotated[str, typer.Option("--peers", help=PEERS_HELP)] = "",
    target: Target = None,
    output: Output = Path("flashgen-gqa.json"),
    force: Force = False,
    json: Json = False,
) -> None:
    """Compare grouped-query and multi-query attention with multi-head attention of the same FLOPs.

    The default specs are full() and causal(), with head dim 128 and bfloat16. Batch x length is 16384 tokens. The
    numbers of key and value heads run alternately.
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
    report(rows, cells, bench_tables.grouped(["flashgen", *beside]), output, json, bench.summary.grouped, force)


def biases(
    passes: Timed = Passes.forward,
    only: Annotated[str, typer.Option("--only", help="The cases to time, comma-separated. Default: all.")] = "",
    peers: Annotated[str, typer.Option("--peers", help=PEERS_HELP)] = ",".join(BIAS_PEERS),
    target: Target = None,
    output: Output = Path("flashgen-biases.json"),
    force: Force = False,
    json: Json = False,
) -> None:
    """Measure a bias or a boolean mask with an element for each score, as in triangle attention of protein models.

    A bias is bfloat16 and shared by the batch, a mask is shared by the heads. Peers are torch's SDPA with the array as
    its attn_mask, by the backends cuDNN and EFFICIENT, and FlexAttention. In the backward the bias has a gradient.
    """
    require_gpu()
    from flashgen import bench

    offered = {case.name: case for case in bench.BIAS_CASES}
    names, beside = chosen(only, "--only", tuple(offered)) or [*offered], chosen(peers, "--peers", BIAS_PEERS)
    rows = bench.bias_rows([offered[name] for name in names], beside, passes.value, target=target)
    columns = bench_tables.biases(["flashgen", *beside])
    report(rows, names, columns, output, json, bench.summary.biases, force)


@with_spec_options_of(dtype="bfloat16", head_dim="128")
def decode(
    options: SpecOptions,
    specs: Specs = None,
    sizes: Annotated[
        str,
        typer.Option(
            "--sizes",
            help="batch x heads:heads_kv x keys, or x keys x queries, comma-separated, such as 1x32:8x131072. "
            "Default: nine sizes, with --latent six.",
        ),
    ] = "",
    pages: Annotated[
        str, typer.Option("--pages", help='Page sizes to time as well, comma-separated; "" for none, with --latent 64.')
    ] = "",
    splits: Annotated[
        str, typer.Option("--splits", help='Numbers of splits to time as well, comma-separated; "" for none.')
    ] = "",
    plans: Annotated[
        str,
        typer.Option(
            "--plans",
            help="Plans to time as well, comma-separated: rows x keys x warps x stages x blocks, such as 16x16x4x3x2; "
            "on Hopper also warpgroups x keys x stages of the forward, such as 2x128x2, and keys x stages of decoding "
            "with wide heads, such as 64x2.",
        ),
    ] = "",
    group: Annotated[
        str, typer.Option("--group", help="Time a group instead of sizes: lengths, variants or mixed.")
    ] = "",
    latent: Annotated[
        bool, typer.Option("--latent", help="Time latent attention, with dims of 576 and 512 and one head of K.")
    ] = False,
    prompts: Annotated[
        bool, typer.Option("--prompts", help="Time prompts over 8-bit keys, beside the same over 16-bit keys.")
    ] = False,
    only: Annotated[str, typer.Option("--only", help="The variants to time, comma-separated. Default: all.")] = "",
    peers: Annotated[str, typer.Option("--peers", help=PEERS_HELP)] = ",".join(PEERS_OF_DECODE),
    target: Target = None,
    output: Output = Path("flashgen-decode.json"),
    force: Force = False,
    json: Json = False,
) -> None:
    """Measure decoding (few queries over many keys) in TB/s of the K and V that the mask needs.

    The default spec is full(), with head dim 128 and bfloat16; specs must not capture arrays. flashgen uses the kernel
    and the number of splits that a call would choose; pages are in random order. With --kv-dtype flashgen is timed with
    8-bit and with 16-bit K and V, and peers with 16-bit. FlashInfer reads pages of 64 and plans before the timing
    starts; FlexAttention is compiled for each size. --splits and --plans time other choices of flashgen.

    --group lengths compares 64 sequences of 1 to 32768 keys in pages with sequences of equal length, with and without
    a schedule that is created before the call. --group variants compares masks and scores with full attention over as
    many keys as they visit, and with FlexAttention. --group mixed times a batch of one prompt of 2048 queries and 63
    sequences of one query, over pages. The dims of a group are those of the SPEC.

    --latent times specs with --shared-kv, where V is the first columns of K, by default of dims 576 and 512, also over
    pages of 64, and adds TFLOP/s. Its peers are FlashMLA and FlashInfer, which read pages of 64.

    --prompts times 512 and 2048 queries over 8192 keys of float8, or of --kv-dtype, contiguous and in pages of 64, and
    the same over 16-bit keys. It adds TFLOP/s.
    """
    require_gpu()
    from flashgen import bench
    from flashgen.language.kv_records import KV_RECORDS

    if latent:
        options, pages = options.with_defaults(head_dim=576, value_dim=512, shared_kv=True), pages or "64"
    if prompts:
        options, pages = options.with_defaults(kv_dtype="float8_e4m3fn"), pages or "64"
    if options.kv_dtype in KV_RECORDS:
        options, pages = options.with_defaults(page_size=numbers(pages or "64", "--pages")[0], dtype="bfloat16"), ""
    declared = [declare(text, options, 128) for text in specs or PLAIN[:1]]
    captured = [spec for spec in declared if spec.captures]
    if captured:
        raise ArgumentError(
            f"{captured[0].name} captures {captured[0].captures[0].name!r}: bench specs without captures"
        )
    if options.page_size and options.kv_dtype not in KV_RECORDS:
        raise ArgumentError(
            f"--page-size {options.page_size}: give page sizes with --pages, in addition to contiguous keys"
        )
    given, beside = [decode_size(text) for text in listed(sizes)], chosen(peers, "--peers", bench.DECODE_PEERS)
    shared = all(spec.shared_kv for spec in declared)
    beside = [name for name in beside if (name in bench.LATENT_PEERS if shared else name != "FlashMLA")]
    if group and shared:
        raise ArgumentError(f"--group {group!r} is not measured where V is a part of K: leave it out")
    if group:
        serving(group, declared[0], given, beside, listed(only), target, output, json, force)
        return
    if only:
        raise ArgumentError(f"--only {only!r} chooses among variants: add --group variants")
    defaults = bench.LATENT_SIZES if latent else bench.PROMPT_SIZES if prompts else bench.DECODE_SIZES
    measured = given or list(defaults)
    page_sizes = numbers(pages, "--pages") if pages else []
    parts, planned = numbers(splits, "--splits") if splits else [], [decode_plan(text) for text in listed(plans)]
    rows = bench.decode_rows(declared, measured, beside, page_sizes, target, parts, planned)
    wide = ["16 bits"] if options.kv_dtype else []
    paged = [f"pages of {page}{of}" for page in page_sizes for of in ("", *(f", {each}" for each in wide))]
    own = [*paged, *bench.own_choices(parts, planned)]
    contenders = ["flashgen", *wide, *own, *beside]
    names = [f"{spec.name} {size}" for spec in declared for size in measured]
    report(rows, names, bench_tables.decode(contenders, shared or prompts), output, json, bench.summary.decode, force)


def serving(
    group: str,
    spec: AttentionSpec,
    sizes: Sequence[bench_module.DecodeSize],
    peers: Sequence[str],
    only: Sequence[str],
    target: str | None,
    output: Path,
    json: bool,
    force: bool,
) -> None:
    """Runs `flashgen bench decode --group GROUP`."""
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
    report(rows, [group], columns, output, json, lambda measured: [], force)


def decode_plan(text: str) -> Any:
    """Parses the numbers of a plan, such as "16x16x4x3x2": see `bench.plan_of_numbers`."""
    from flashgen import bench

    given = [int(part) for part in text.split("x")] if re.fullmatch(r"\d+(x\d+)*", text) else []
    plan = bench.plan_of_numbers(given)
    if plan is None:
        raise ArgumentError(
            f"--plans {text!r} must be rows x keys x warps x stages x blocks, such as 16x16x4x3x2; on Hopper 2x128x2 "
            "or 64x2"
        )
    return plan


def decode_size(text: str) -> bench_module.DecodeSize:
    """Parses "16x64:8x8192x4": 16 sequences, 64 query heads, 8 key heads, 8192 keys, 4 queries."""
    from flashgen import bench

    found = re.fullmatch(r"(\d+)x(\d+):(\d+)x(\d+)(?:x(\d+))?", text)
    given = [int(part) for part in found.groups("1")] if found else [0]
    if not all(given) or given[1] % given[2]:
        raise ArgumentError(f"--sizes {text!r} must be batch x heads:heads_kv x keys, such as 1x32:8x131072")
    return bench.DecodeSize(*given)


@with_spec_options_of(dtype="bfloat16", head_dim="128", layout="thd")
def varlen(
    options: SpecOptions,
    specs: Specs = None,
    passes: Timed = Passes.forward,
    heads: Annotated[int, typer.Option("--heads", min=1, help="Number of heads of queries, keys and values.")] = 16,
    documents: Annotated[
        str, typer.Option("--documents", help="Batches, comma-separated: documents x tokens.")
    ] = "16x16384,128x16384,64x65536",
    uneven: Annotated[bool, typer.Option("--uneven", help="Log-uniform lengths instead of equal ones.")] = False,
    peers: Annotated[
        str, typer.Option("--peers", help="Baselines, comma-separated: FA4, torch (varlen_attn).")
    ] = "FA4,torch",
    target: Target = None,
    output: Output = Path("flashgen-ragged.json"),
    force: Force = False,
    json: Json = False,
) -> None:
    """Measure varlen (ragged) batches of packed documents, for flashgen and other varlen kernels.

    The default spec is causal(), with head dim 128 and bfloat16. Peers that are not installed are left out. All
    preparation that a call needs is timed with it.
    """
    require_gpu()
    from flashgen import bench

    shapes = [batch_of(text) for text in listed(documents)]
    declared = [declare(text, options.with_defaults(layout="thd"), 128) for text in specs or ("causal()",)]
    beside = chosen(peers, "--peers", bench.VARLEN_PEERS)
    rows = bench.varlen_rows(declared, shapes, heads, beside, passes.value, uneven, target)
    cells = [f"{spec.name} {count} in {tokens}" for spec in declared for count, tokens in shapes]
    report(rows, cells, bench_tables.varlen(["flashgen", *beside]), output, json, bench.summary.varlen, force)


def batch_of(text: str) -> tuple[int, int]:
    """Parses "16x16384": 16 documents with 16384 tokens in total."""
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        raise ArgumentError(f"--documents {text!r} must be DOCUMENTSxTOKENS, such as 16x16384")
    return int(parts[0]), int(parts[1])


app.command(DEFAULT, help=paragraphs(speed.__doc__), epilog=SPEED_EXAMPLES)(speed)
app.command("gqa", help=paragraphs(gqa.__doc__))(gqa)
app.command("biases", help=paragraphs(biases.__doc__))(biases)
app.command("decode", help=paragraphs(decode.__doc__))(decode)
app.command("ragged", help=paragraphs(varlen.__doc__))(varlen)


def moved(context: typer.Context) -> None:
    """Raises ArgumentError with the command that replaces one that has moved to benchmarks/."""
    name = str(context.info_name)
    command = shlex.join(["python", "-m", "benchmarks", name, *context.args])
    raise ArgumentError(f"`flashgen bench {name}` has moved: in a checkout of flashgen's repository, run `{command}`")


_ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}
for _name in MOVED:
    app.command(_name, hidden=True, add_help_option=False, context_settings=_ANY_ARGUMENTS)(moved)


def declare(text: str, options: SpecOptions, head_dim: int) -> AttentionSpec:
    """Returns the spec that a SPEC and its options declare; bfloat16 and `head_dim` are defaults."""
    return load_spec(text, options.with_defaults(dtype="bfloat16", head_dim=head_dim))
