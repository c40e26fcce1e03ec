"""The commands of `python -m benchmarks`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import (
    bars,
    context,
    host,
    host_export,
    host_functions,
    host_sdpa,
    host_torch,
    paper,
    start,
    tables,
    train,
    versions,
)
from flashgen.cli.app import ErrorsWithoutTraceback
from flashgen.cli.bench_options import PEERS_HELP, Output, Timed, chosen, listed, numbers
from flashgen.cli.bench_report import report, require_gpu
from flashgen.cli.console import note, paragraphs
from flashgen.cli.options import Json, Passes, Target
from flashgen.cli.writing import Force, check_output, write_output
from flashgen.errors import ArgumentError
from flashgen.files import read_file
from flashgen.ranks import SHARDS
from flashgen.strict_json import parse_json

LONG = 2**20  # tokens of the sequence of `context --long`


def measure_paper(
    peers: Annotated[str, typer.Option("--peers", help=PEERS_HELP)] = "FA2",
    target: Target = None,
    output: Output = Path("flashgen-paper.json"),
    force: Force = False,
    json: Json = False,
) -> None:
    """Compare flashgen with standard attention in plain torch on the problem of the FlashAttention paper.

    The problem has batch 64, 16 heads, length 1024, head dim 64, dropout 0.1, a causal mask and float16. Times of the
    forward and the backward and the peak memory are measured. FLOPs and HBM traffic are counted, by the closed forms of
    the papers' algorithms with flashgen's tiles. Peers are FA2 and cuDNN, backends of torch. Needs torch.
    """
    require_gpu()
    names = chosen(peers, "--peers", paper.PEERS)
    rows = paper.paper_rows(names, target)
    report(rows, ["standard", *names, "flashgen"], tables.paper(), output, json, paper.paper_summary, force)


def measure_host(
    passes: Timed = Passes.both,
    libraries: Annotated[
        str,
        typer.Option("--libraries", help="Array libraries, comma-separated: cupy, torch. Default: those installed."),
    ] = "",
    target: Target = None,
    groups: Annotated[int, typer.Option("--groups", min=1, help="Groups of 50 calls behind each number.")] = 40,
    sdpa_registry: Annotated[
        bool, typer.Option("--sdpa-registry", help="Measure torch's flash operators alone, with and without flashgen.")
    ] = False,
    exported: Annotated[
        bool, typer.Option("--exported", help="Measure an exported package alone, beside torch's SDPA.")
    ] = False,
    output: Output = Path("flashgen-host.json"),
    force: Force = False,
    json: Json = False,
) -> None:
    """Measure the host time of a call in microseconds, in total and by part, and the time of the first import and call.

    The calls are warm and have one tile or many tiles: plain, with output arrays given, with dropout, with tile lists.
    The table shows the median and the minimum over the medians of groups of calls. Run it on an otherwise idle machine.
    Parts are measured in separate groups; each excludes the time of other parts that it calls. The parts are argument
    checks, the numbers of a call, allocation, tile lists, counters, clearing, addresses, the argument struct, launches
    and the rest.

    With torch, the operator is measured with and without gradients, beside the attention itself, torch's SDPA, an
    autograd function around the attention, and an empty autograd function, which is the overhead of autograd. The
    backward of these is measured as the sixteenth part of a backward through 16 calls. An older checkout is measured by
    `PYTHONPATH=CHECKOUT python -P benchmarks/host.py`.
    """
    require_gpu()
    columns = tables.host([*host.PARTS, host.REST])
    if sdpa_registry:
        measured, names = host_sdpa.registry_rows(groups), host_sdpa.registry_names()
        report(measured, names, columns, output, json, host_sdpa.registry_summary, force)
        return
    if exported:
        measured, names = host_export.export_rows(groups), host_export.export_names()
        report(measured, names, columns, output, json, host_export.export_summary, force)
        return
    named = chosen(libraries, "--libraries", host.LIBRARIES) or host.installed_libraries()
    timed = host.PASSES if passes is Passes.both else [name for name in host.PASSES if name == passes.value]
    rows = [host.host_rows(named, timed, target, groups)]
    names = [case.name for _ in named for case in host.host_cases() for each in timed if each in case.passes]
    if "torch" in named:
        rows += [host_torch.operator_rows(timed, target, groups), host_functions.function_rows(groups)]
        names += [*host_torch.operator_names(timed), *host_functions.function_names()]
    measured = chain(*rows, start.start_rows(target))
    report(measured, [*names, *["start"] * start.STARTS], columns, output, json, host_torch.operator_summary, force)


def measure_training(
    attentions: Annotated[
        str, typer.Option("--attentions", help="Comma-separated: standard, FA2, cuDNN, Flex, flashgen.")
    ] = ",".join(train.ATTENTIONS),
    modes: Annotated[str, typer.Option("--modes", help="Comma-separated: eager, compile.")] = ",".join(train.MODES),
    shapes: Annotated[str, typer.Option("--shapes", help="Batch x tokens, comma-separated.")] = "32x1024,4x8192",
    loss_steps: Annotated[
        int, typer.Option("--loss-steps", min=0, help="Compare the losses of this many steps, at the first shape.")
    ] = 0,
    long: Annotated[
        bool,
        typer.Option("--long", help="Train at 1 x 65536 with a window of 1024 in 16 documents, beside Flex alone."),
    ] = False,
    sdpa_registry: Annotated[
        bool,
        typer.Option("--sdpa-registry", help="Also train with SDPA and each flash implementation of torch's registry."),
    ] = False,
    output: Output = Path("flashgen-train.json"),
    force: Force = False,
    json: Json = False,
) -> None:
    """Train GPT-2 124M with several attention implementations: milliseconds per step, tokens per second, peak memory.

    Training uses bfloat16 autocast and fused AdamW, eager and under torch.compile, on text that ships with Python. The
    models are trained one after another; times are medians of 20 steps. Needs torch.

    With --loss-steps all models start from the same weights and see the same batches, with the optimizer and the
    learning-rate schedule of GPT-2's reproductions. Rounding differences grow in training until two runs differ as much
    as any two runs do. Loss curves are therefore compared with that of standard attention twice: smoothed over 30
    steps, and unsmoothed over the first 30 steps. The floor of a difference is that of standard attention with scores
    and weights in float32, which is trained in addition. The curve of a wrong attention differs from the first steps
    on, and by more than the floor.
    """
    require_gpu()
    registered = train.registered_names() if sdpa_registry else []
    names = [*chosen(attentions, "--attentions", train.ATTENTIONS), *registered]
    named = chosen(modes, "--modes", train.MODES)
    sizes = [shape_of(text) for text in listed(shapes)]
    rows = train.train_rows(names, named, sizes, loss_steps, long)
    planned = train.trainings(names, named, sizes, loss_steps, long)
    labels = [f"{name} {mode} {batch}x{length}" for name, mode, (batch, length), _ in planned]
    report(rows, labels, tables.train(), output, json, train.train_summary, force)


def shape_of(text: str) -> tuple[int, int]:
    """Parses batch x tokens: "32x1024" -> (32, 1024)."""
    batch, _, length = text.partition("x")
    if not (batch.isdecimal() and length.isdecimal() and int(batch) and int(length)):
        raise ArgumentError(f"--shapes {text!r} must be batch x tokens, such as 32x1024")
    return int(batch), int(length)


def measure_context(
    gpus: Annotated[int, typer.Option("--gpus", min=0, help="Number of GPUs of this machine; 0 uses all.")] = 0,
    tokens: Annotated[str, typer.Option("--tokens", help="Tokens per GPU, comma-separated.")] = "8192,32768,131072",
    passes: Annotated[str, typer.Option("--pass", help="Comma-separated: forward, both.")] = "forward,both",
    windows: Annotated[
        str,
        typer.Option("--windows", help='Sliding windows to time beside causal masks, comma-separated; "" for none.'),
    ] = "1024",
    shards: Annotated[
        str,
        typer.Option("--shards", help="Shards of windows, comma-separated: zigzag, plain. Causal masks use zigzag."),
    ] = "zigzag,plain",
    contenders: Annotated[
        str, typer.Option("--contenders", help="Schemes of flashgen and peers, comma-separated. Default: all.")
    ] = "",
    long: Annotated[
        bool,
        typer.Option("--long", help="Time one sequence of 1,048,576 tokens, and compare sampled rows with float64."),
    ] = False,
    output: Output = Path("flashgen-context.json"),
    force: Force = False,
    json: Json = False,
) -> None:
    """Measure the attention of one sequence on several GPUs, relative to the speed of a single GPU.

    The attention is that of Llama-3 8B: 32 query heads on 8 key heads of dim 128, causal, bfloat16, batch 1. The
    reference is a single GPU, measured in the same run on a sequence whose FLOPs are those of one GPU's share. The
    peers are torch's context_parallel over its FlashAttention-2, and a zigzag ring over the same operator.
    "ring-captured" replays flashgen's ring, messages included, as a CUDA graph. The command starts a process for each
    GPU. TFLOP/s are per GPU, count unmasked scores only, and follow from the time of the slowest rank.
    """
    require_gpu()
    ranks = gpus or context.gpus_here()
    if ranks > context.gpus_here() or ranks < 2:
        raise ArgumentError(f"--gpus {ranks}: this machine has {context.gpus_here()}, and at least 2 are needed")
    timed = chosen(passes, "--pass", (Passes.forward.value, Passes.both.value))
    beside = chosen(contenders, "--contenders", context.CONTENDERS)
    sizes = [LONG // ranks] if long else numbers(tokens, "--tokens")
    shapes = [context.Shape(size, long=long) for size in sizes]
    if windows and not long:
        spans, dealt = numbers(windows, "--windows"), chosen(shards, "--shards", SHARDS)
        shapes += [context.Shape(size, window=span, shards=each) for size in sizes for span in spans for each in dealt]
    named = beside or (["ring"] if long else list(context.CONTENDERS))
    rows = context.context_rows(ranks, shapes, named, timed)
    cells = [f"{shape.name} {name}" for shape in shapes for name in timed]
    report(rows, cells, tables.context(named), output, json, context.context_summary, force)


def measure_versions(
    checkout: Annotated[Path, typer.Argument(metavar="CHECKOUT", help="The root of another checkout of flashgen.")],
    groups: Annotated[str, typer.Option("--groups", help=f"Comma-separated: {', '.join(versions.GROUPS)}.")] = "",
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds of each checkout behind a median.")] = 3,
    output: Output = Path("flashgen-versions.json"),
    force: Force = False,
    json: Json = False,
) -> None:
    """Measure another checkout beside this one, in turns on the same GPU.

    The groups are the cells of `flashgen bench` for both passes, its decode sizes, the host time of a call, and the
    time of the import and of the first compilation. Peers are not measured. Each round runs both checkouts in processes
    of their own.
    """
    require_gpu()
    if not (checkout / "flashgen" / "__init__.py").is_file():
        raise ArgumentError(f"CHECKOUT {str(checkout)!r} has no folder flashgen; give the root of a checkout")
    names = chosen(groups, "--groups", versions.GROUPS) or versions.GROUPS
    rows = versions.version_rows(checkout.resolve(), names, rounds)
    report(rows, names, tables.versions(), output, json, versions.version_summary, force)


def plot(
    measured: Annotated[
        Path, typer.Argument(metavar="FILE", help="JSON that `flashgen bench` or a benchmark has saved.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The picture to write: .svg or .png.")] = Path(
        "flashgen-bench.svg"
    ),
    force: Force = False,
) -> None:
    """Draw a bar chart of saved measurements. Needs matplotlib, and no GPU."""
    form = output.suffix.removeprefix(".")
    if form not in bars.FORMATS:
        raise ArgumentError(f"--output {output} must end in {' or '.join(f'.{each}' for each in bars.FORMATS)}")
    check_output(output, force)
    try:
        saved = parse_json(read_file(measured))
    except OSError as error:
        raise ArgumentError(f"{measured} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ArgumentError(f"{measured} cannot be read as JSON: {error}") from None
    try:
        drawn = bars.draw(saved, form)
    except ArgumentError as error:
        raise ArgumentError(f"{measured}: {error}") from None
    write_output(output, drawn)
    note(f"{measured} -> {output}")


app = typer.Typer(
    cls=ErrorsWithoutTraceback,
    help="Run the benchmarks behind the pages of flashgen's documentation.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS: dict[str, Callable[..., None]] = {
    "context": measure_context,
    "host": measure_host,
    "paper": measure_paper,
    "plot": plot,
    "train": measure_training,
    "versions": measure_versions,
}
for name, command in COMMANDS.items():
    app.command(name, help=paragraphs(command.__doc__))(command)
