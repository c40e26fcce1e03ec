"""`flashgen show`: shows what is generated for a spec, without a GPU and without running it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flashgen.cli.console import note, print_code
from flashgen.cli.kernels import (
    Pass,
    What,
    check_path,
    render_kernels,
    show_resources,
    show_texts,
    show_traffic,
    tile_of,
    to_print,
    write_texts,
    write_timeline,
)
from flashgen.cli.options import Deterministic, Json, Spec, SpecOptions, Target, one_of, with_spec_options
from flashgen.cli.pictures import Selection, drawing_of, show_drawing
from flashgen.cli.ranks import (
    EXCHANGE,
    HEADS,
    LENGTH,
    SCHEME,
    SHARDS,
    RankOptions,
    refuse_beside_ranks,
    show_ranks,
)
from flashgen.cli.specs import load_spec
from flashgen.cli.writing import Force
from flashgen.errors import ArgumentError

EXAMPLES = """[bold]Examples[/]

flashgen show "causal() & sliding_window(1024)" --head-dim 128 --dtype bfloat16 --target sm_80

flashgen show "causal()" --what sass --target sm_90 | less

flashgen show "causal()" --pass decode --target sm_90a --what resources

flashgen show "causal()" --pass backward --what resources

flashgen show "causal()" --pass backward --kernel keys

flashgen show "causal()" --pass backward --output kernels/

flashgen show "causal()" --target sm_90a --packed-heads 8

flashgen show "causal() & sliding_window(300)" --what tiles --len-q 1024

flashgen show "document('ids')" --captures packed.npz --what tiles --len-q 4096 --output tiles.svg

flashgen show "prefix_lm(Tensor('lengths', 'int32', 1))" --what tiles --captures packed.npz --batch 2

flashgen show "causal()" --what tiles --len-q 1024 --zoom 1,0

flashgen show "causal()" --what traffic --len-q 4096

flashgen show "causal()" --ranks 8 --length 1048576 --heads 32:8 --head-dim 128

flashgen show "causal()" --what timeline --target sm_90a --output timeline.svg
"""

DEFAULT_TARGET = "sm_80"


@with_spec_options
def show(
    spec: Spec,
    options: SpecOptions,
    target: Target = None,
    what: Annotated[
        What, typer.Option("--what", help="What to show: the source, its machine code, its resources or a picture.")
    ] = What.cuda,
    pass_: Annotated[
        Pass,
        typer.Option(
            "--pass", help="The pass whose kernels are shown; decode is the forward of few queries over many keys."
        ),
    ] = Pass.forward,
    kernel: Annotated[
        str | None,
        typer.Option(
            "--kernel",
            metavar="NAME",
            help="The kernel of the pass to show. Default: the main kernel; for the backward, all in launch order.",
        ),
    ] = None,
    deterministic: Deterministic = False,
    packed_heads: Annotated[
        int,
        typer.Option(
            "--packed-heads",
            metavar="N",
            help="Show the kernel that packs N query heads of a key head into the rows of a tile (sm_90a).",
        ),
    ] = 1,
    smaller_tiles: Annotated[
        bool,
        typer.Option(
            "--smaller-tiles",
            help="Show the kernel with smaller query tiles, for calls with few tiles, if the spec has one (sm_90a).",
        ),
    ] = False,
    heads_apart: Annotated[
        bool,
        typer.Option(
            "--heads-apart",
            help="Show the backward with a block for each query head, also where heads share k and v (sm_90a).",
        ),
    ] = False,
    len_q: Annotated[int, typer.Option("--len-q", min=0, help="Number of queries, for the tile map.")] = 1024,
    len_k: Annotated[
        int | None, typer.Option("--len-k", min=0, help="Number of keys. Default: that of queries.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=0, max=65535, help="The index of the sequence, for the tile map.")
    ] = None,
    head: Annotated[
        int | None, typer.Option("--head", min=0, max=65535, help="The index of the query head, for the tile map.")
    ] = None,
    zoom: Annotated[
        str | None, typer.Option("--zoom", metavar="ROW,COLUMN", help="Show the elements of this tile of the map.")
    ] = None,
    captures: Annotated[
        Path | None,
        typer.Option("--captures", "--input", "-i", help="A file with the mask's captures by name, for the tile map."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write each kernel to a file of its own in this folder, or the tile map to a .svg file.",
        ),
    ] = None,
    force: Force = False,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=1, help="Show instead the plan for one sequence on this number of GPUs."),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option("--length", min=1, help="With --ranks: the length of the sequence.", show_default=str(LENGTH)),
    ] = None,
    scheme: Annotated[
        str | None,
        typer.Option(
            "--scheme",
            help="With --ranks: the scheme, ring, all_gather, ulysses or ulysses_ring.",
            show_default=SCHEME,
            autocompletion=one_of("ring", "all_gather", "ulysses", "ulysses_ring"),
        ),
    ] = None,
    shards: Annotated[
        str | None,
        typer.Option(
            "--shards",
            help="With --ranks: how the sequence is sharded, zigzag or plain.",
            show_default=SHARDS,
            autocompletion=one_of("zigzag", "plain"),
        ),
    ] = None,
    heads_of_call: Annotated[
        str | None,
        typer.Option("--heads", metavar="HEADS:HEADS_KV", help="With --ranks: numbers of heads.", show_default=HEADS),
    ] = None,
    exchange: Annotated[
        int | None,
        typer.Option(
            "--exchange",
            min=1,
            help="With --scheme ulysses_ring: the number of ranks that exchange heads.",
            show_default=str(EXCHANGE),
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show the generated code of a spec, its resources, or a picture.

    --what chooses the CUDA source, the PTX or SASS, the resources, the tile map (as text or SVG), the HBM bytes
    compared with standard attention, a timeline of the warps (SVG), or the spec as JSON. No GPU is needed: nothing is
    run, except that the emulator records the timeline. Without a GPU and without --target, the target is
    [cyan]sm_80[/].

    The backward has several kernels, which are shown in launch order unless --kernel names one. Each is a file of its
    own: --output DIR/ writes the kernels of a pass, including those that list tiles, with the names of a release. A
    file that was edited since is replaced only with --force.

    --ranks shows instead how one sequence is computed on several GPUs: the work of each rank in each step, its balance,
    and the bytes that are sent.
    """
    declared = load_spec(spec, options)
    rank_options = RankOptions(length, scheme, shards, heads_of_call, exchange)
    map_options = {"--batch": batch, "--head": head, "--zoom": zoom, "--captures": captures}
    if ranks is not None:
        others = {"--what": None if what is What.cuda else what, "--kernel": kernel, "--output": output}
        refuse_beside_ranks(others | {name: value for name, value in map_options.items() if name != "--captures"})
        show_ranks(declared, ranks, rank_options, captures, json)
        return
    rank_options.refuse()
    refuse_unused(what, map_options, output)
    if output is not None:
        check_path(output, what, force)
    if what is What.spec:
        print_code(declared.to_json(), "json")
        return
    forward = {"packed_heads": packed_heads, "smaller_tiles": smaller_tiles}
    refuse_other_passes(pass_, deterministic, packed_heads, smaller_tiles, heads_apart)
    architecture = target or target_here()
    if what in (What.tiles, What.svg, What.traffic):
        tile = tile_of(declared, architecture, pass_, deterministic, forward)
        length_k = len_q if len_k is None else len_k
        drawing = drawing_of(declared, tile, len_q, length_k, zoom, captures, Selection(batch, head))
        if what is What.traffic:
            heads = max(drawing.tiles.classes.shape[1], (head or 0) + 1)
            show_traffic(declared, architecture, pass_, deterministic, drawing.tiles, heads, json)
        else:
            show_drawing(drawing, what is What.svg, output, json)
        return
    if what is What.timeline:
        write_timeline(declared, architecture, pass_, kernel, deterministic, output)
        return
    to_files = output is not None
    chosen = render_kernels(declared, architecture, pass_, kernel, deterministic, forward, heads_apart, apart=to_files)
    if output is not None:
        write_texts(chosen, what, output, force)
        return
    printed = chosen if kernel else to_print(chosen, pass_)
    if what is What.resources:
        show_resources(printed, json)
    else:
        show_texts(printed, what)


def refuse_unused(what: What, map_options: dict[str, Any], output: Path | None) -> None:
    """Raises ArgumentError for an option that does not apply to what is shown."""
    names = [name for name, value in map_options.items() if value is not None]
    if names and what not in (What.tiles, What.svg, What.traffic):
        raise ArgumentError(f"{', '.join(names)}: only a tile map takes this, add --what tiles")
    if output is not None and what in (What.resources, What.traffic, What.spec):
        raise ArgumentError(f"--output {output}: --what {what.value} only prints; redirect it with > FILE")


def refuse_other_passes(
    pass_: Pass, deterministic: bool, packed_heads: int, smaller_tiles: bool, heads_apart: bool
) -> None:
    """Raises ArgumentError for an option that the kernels of the pass do not have."""
    if packed_heads != 1 and pass_ is not Pass.forward:
        raise ArgumentError(f"--packed-heads {packed_heads}: only the forward packs heads")
    if smaller_tiles and pass_ is not Pass.forward:
        raise ArgumentError("--smaller-tiles: only the forward has smaller tiles")
    if heads_apart and (pass_ is not Pass.backward or deterministic):
        raise ArgumentError("--heads-apart: only --pass backward without --deterministic has it")


def target_here() -> str:
    """Returns the target that `flashgen.compile` chooses for this machine's GPU, or the default target with a note."""
    from flashgen.cli.machine import gpus
    from flashgen.codegen.targets import target_of_capability

    found = gpus()
    if found:
        return target_of_capability(*found[0].compute_capability).name
    note(f"this machine has no GPU: the target is {DEFAULT_TARGET}; choose another with --target")
    return DEFAULT_TARGET
