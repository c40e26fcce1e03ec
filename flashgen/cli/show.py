"""`flashgen show`: what is generated for a spec, with no GPU and without running it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flashgen.cli.console import note, print_code
from flashgen.cli.kernels import (
    Pass,
    What,
    rendered,
    show_resources,
    show_texts,
    show_traffic,
    tile_of,
    to_print,
    write_texts,
    write_timeline,
)
from flashgen.cli.options import Deterministic, Json, Spec, SpecOptions, Target, one_of, with_spec_options
from flashgen.cli.pictures import Place, drawing_of, print_drawing, print_numbers, print_svg, write_drawing
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
        What, typer.Option("--what", help="The source, what it becomes, or what is known of it.")
    ] = What.cuda,
    of: Annotated[
        Pass,
        typer.Option(
            "--pass", help="Whose kernels: the output's, those of few queries over many keys, the gradients'."
        ),
    ] = Pass.forward,
    kernel: Annotated[
        str | None,
        typer.Option(
            "--kernel",
            metavar="NAME",
            help="Which of the pass's kernels. Default: the forward one; all of the backward, as they are launched.",
        ),
    ] = None,
    deterministic: Deterministic = False,
    packed_heads: Annotated[
        int,
        typer.Option(
            "--packed-heads",
            metavar="N",
            help="The kernel that has N query heads of one head of k and v as rows of a tile (sm_90a).",
        ),
    ] = 1,
    smaller_tiles: Annotated[
        bool,
        typer.Option(
            "--smaller-tiles",
            help="The kernel with fewer queries a tile, which calls of few take, where a spec has one (sm_90a).",
        ),
    ] = False,
    heads_apart: Annotated[
        bool,
        typer.Option(
            "--heads-apart",
            help="The backward in which query heads that share a head of k and v are blocks of their own (sm_90a).",
        ),
    ] = False,
    len_q: Annotated[int, typer.Option("--len-q", min=0, help="Queries, for the tile map.")] = 1024,
    len_k: Annotated[int | None, typer.Option("--len-k", min=0, help="Keys. Default: as many as queries.")] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=0, max=65535, help="Which sequence of the captures, for the tile map.")
    ] = None,
    head: Annotated[
        int | None, typer.Option("--head", min=0, max=65535, help="Which query head, for the tile map.")
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
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=1, help="Show one sequence on so many GPUs instead: who computes and sends what."),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option("--length", min=1, help="With --ranks: of the whole sequence.", show_default=str(LENGTH)),
    ] = None,
    scheme: Annotated[
        str | None,
        typer.Option(
            "--scheme",
            help="With --ranks: ring, all_gather, ulysses or ulysses_ring.",
            show_default=SCHEME,
            autocompletion=one_of("ring", "all_gather", "ulysses", "ulysses_ring"),
        ),
    ] = None,
    shards: Annotated[
        str | None,
        typer.Option(
            "--shards",
            help="With --ranks: zigzag or plain.",
            show_default=SHARDS,
            autocompletion=one_of("zigzag", "plain"),
        ),
    ] = None,
    heads_of_call: Annotated[
        str | None,
        typer.Option("--heads", metavar="HEADS:HEADS_KV", help="With --ranks: of a call.", show_default=HEADS),
    ] = None,
    exchange: Annotated[
        int | None,
        typer.Option(
            "--exchange",
            min=1,
            help="With --scheme ulysses_ring: how many ranks exchange heads.",
            show_default=str(EXCHANGE),
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show the CUDA of a spec, its PTX or SASS, its resources, its tile map (drawn, or as SVG), the HBM bytes that it
    moves beside standard attention's, a timeline of its warps (recorded by the emulator, as SVG), or the spec as JSON.

    The backward has several kernels, all shown in the order of their launches unless --kernel names one. Each is a
    file of its own: --output DIR/ writes them, named as in a release, and the forward's with the kernel that lists its
    tiles. Nothing is run but, for a timeline, on the emulator, so no GPU is needed; without one and without --target,
    [cyan]sm_80[/] is shown.

    --ranks shows one sequence on several GPUs instead: what each computes in each step, how even that is, and the bytes
    that are sent, before anything runs.
    """
    declared = load_spec(spec, options)
    of_ranks = RankOptions(length, scheme, shards, heads_of_call, exchange)
    pictured = {"--batch": batch, "--head": head, "--zoom": zoom, "--captures": captures}
    if ranks is not None:
        others = {"--what": None if what is What.cuda else what, "--kernel": kernel, "--output": output}
        refuse_beside_ranks(others | {name: value for name, value in pictured.items() if name != "--captures"})
        show_ranks(declared, ranks, of_ranks, captures, json)
        return
    of_ranks.refuse()
    refuse_elsewhere(what, pictured, output)
    if what is What.spec:
        print_code(declared.to_json(), "json")
        return
    if packed_heads != 1 and of is not Pass.forward:
        raise ArgumentError(f"--packed-heads {packed_heads}: only the forward packs heads")
    if smaller_tiles and of is not Pass.forward:
        raise ArgumentError("--smaller-tiles: only the forward has them")
    forward = {"packed_heads": packed_heads, "smaller_tiles": smaller_tiles}
    if heads_apart and (of is not Pass.backward or deterministic):
        raise ArgumentError("--heads-apart: only the backward whose sums may be in any order, --pass backward, has it")
    architecture = target or target_here()
    if what in (What.tiles, What.svg, What.traffic):
        tile = tile_of(declared, architecture, of, deterministic, forward)
        length_k = len_q if len_k is None else len_k
        drawing = drawing_of(declared, tile, len_q, length_k, zoom, captures, Place(batch, head))
        if what is What.traffic:
            heads = max(drawing.tiles.classes.shape[1], (head or 0) + 1)
            show_traffic(declared, architecture, of, deterministic, drawing.tiles, heads, json)
        elif output is not None:
            write_drawing(drawing, output)
        elif what is What.svg:
            print_svg(drawing)
        else:
            (print_numbers if json else print_drawing)(drawing)
        return
    if what is What.timeline:
        write_timeline(declared, architecture, of, kernel, deterministic, output)
        return
    to_files = output is not None
    chosen = rendered(declared, architecture, of, kernel, deterministic, forward, heads_apart, apart=to_files)
    if output is not None:
        write_texts(chosen, what, output)
        return
    printed = chosen if kernel else to_print(chosen, of)
    if what is What.resources:
        show_resources(printed, json)
    else:
        show_texts(printed, what)


def refuse_elsewhere(what: What, of_pictures: dict[str, Any], output: Path | None) -> None:
    """Raises ArgumentError for an option that means nothing here."""
    names = [name for name, value in of_pictures.items() if value is not None]
    if names and what not in (What.tiles, What.svg, What.traffic):
        raise ArgumentError(f"{', '.join(names)}: only a tile map takes this, add --what tiles")
    if output is not None and what in (What.resources, What.traffic, What.spec):
        raise ArgumentError(f"--output {output}: --what {what.value} prints; write it by > FILE")


def target_here() -> str:
    """The target that `flashgen.compile` takes on this machine's GPU, or, with a note, the default."""
    from flashgen.cli.machine import gpus
    from flashgen.codegen.targets import target_of_capability

    found = gpus()
    if found:
        return target_of_capability(*found[0].compute_capability).name
    note(f"no GPU here: this is for {DEFAULT_TARGET}; choose another with --target")
    return DEFAULT_TARGET
