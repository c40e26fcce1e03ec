"""`flashgen show`: what is generated for a spec, with no GPU and without running it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashgen.cli.console import note, print_code, print_json, print_table
from flashgen.cli.options import Json, Spec, SpecOptions, Target, with_spec_options
from flashgen.cli.pictures import drawing_of, print_drawing, print_numbers, print_svg, write_drawing
from flashgen.cli.specs import load_spec
from flashgen.errors import ArgumentError

if TYPE_CHECKING:
    from flashgen.build.cache import Entry
    from flashgen.codegen.kernel import RenderedKernel
    from flashgen.language import AttentionSpec

EXAMPLES = """[bold]Examples[/]

flashgen show "causal() & sliding_window(1024)" --head-dim 128 --dtype bfloat16 --target sm_80

flashgen show "causal()" --what sass --target sm_90 | less

flashgen show "causal() & sliding_window(300)" --what tiles --len-q 1024

flashgen show "document('ids')" --captures packed.npz --what tiles --len-q 4096 --output tiles.png

flashgen show "causal()" --what tiles --len-q 1024 --zoom 1,0
"""

DEFAULT_TARGET = "sm_80"


class What(StrEnum):
    """What to show of a kernel."""

    cuda = "cuda"
    ptx = "ptx"
    sass = "sass"
    resources = "resources"
    tiles = "tiles"
    svg = "svg"
    spec = "spec"


class Part(StrEnum):
    """A spec's kernels: attention itself, and what lists its tiles where no closed form says which they are."""

    forward = "forward"
    lists = "lists"


@with_spec_options
def show(
    spec: Spec,
    options: SpecOptions,
    target: Target = None,
    what: Annotated[
        What, typer.Option("--what", help="The source, what it becomes, or what is known of it.")
    ] = What.cuda,
    kernel: Annotated[Part, typer.Option("--kernel", help="Which of the spec's kernels.")] = Part.forward,
    len_q: Annotated[int, typer.Option("--len-q", min=0, help="Queries, for the tile map.")] = 1024,
    len_k: Annotated[int | None, typer.Option("--len-k", min=0, help="Keys. Default: as many as queries.")] = None,
    zoom: Annotated[
        str | None, typer.Option("--zoom", metavar="ROW,COLUMN", help="Show the elements of this tile of the map.")
    ] = None,
    captures: Annotated[
        Path | None,
        typer.Option("--captures", "--input", "-i", help="A file with the mask's captures by name, for the tile map."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the tile map to this .svg or .png file.")
    ] = None,
    json: Json = False,
) -> None:
    """Show the CUDA of a spec, its PTX or SASS, its resources, its tile map (drawn, or as SVG), or the spec as JSON.

    Nothing is run, so no GPU is needed; without one and without --target, [cyan]sm_80[/] is shown.
    """
    declared = load_spec(spec, options)
    refuse_elsewhere(what, {"--zoom": zoom, "--captures": captures, "--output": output})
    if what is What.spec:
        print_code(declared.to_json(), "json")
        return
    architecture = target or target_here()
    if what in (What.tiles, What.svg):
        drawing = drawing_of(declared, architecture, len_q, len_q if len_k is None else len_k, zoom, captures)
        if output is not None:
            write_drawing(drawing, output)
        elif what is What.svg:
            print_svg(drawing)
        else:
            (print_numbers if json else print_drawing)(drawing)
        return
    chosen = rendered(declared, architecture, kernel)
    if what is What.cuda:
        print_code(chosen.source, "cuda")
    elif what is What.resources:
        show_resources(chosen, json)
    else:
        print_code(machine_code(chosen, what), "nasm")


def refuse_elsewhere(what: What, given: dict[str, Any]) -> None:
    """ArgumentError for an option of pictures where no picture is made."""
    names = [name for name, value in given.items() if value is not None]
    if names and what not in (What.tiles, What.svg):
        raise ArgumentError(f"{', '.join(names)}: only a tile map takes this, add --what tiles")


def target_here() -> str:
    """This machine's GPU, or the default, saying so."""
    from flashgen.cli.machine import gpus

    found = gpus()
    if found:
        return found[0].architecture
    note(f"no GPU here: this is for {DEFAULT_TARGET}; choose another with --target")
    return DEFAULT_TARGET


def rendered(spec: AttentionSpec, target: str, part: Part) -> RenderedKernel:
    from flashgen.codegen.forward import render_forward
    from flashgen.codegen.lists import render_lists
    from flashgen.codegen.targets import target_named

    forward = render_forward(spec, target_named(target))
    if part is Part.lists and not forward.uses_lists:
        raise ArgumentError(f"--kernel lists: {spec.mask.name} needs none, closed forms say which tiles to visit")
    if part is Part.lists:
        return render_lists(spec, forward.target, forward.plan)
    if forward.uses_lists:
        note("a second kernel lists the tiles that this one visits: --kernel lists shows it")
    return forward


def compiled(kernel: RenderedKernel) -> Entry:
    """The kernel from the cache, compiled into it where it was not there."""
    from flashgen.build.cache import default_cache

    return default_cache().load_or_compile(kernel.name, kernel.source, kernel.target.architecture)


def machine_code(kernel: RenderedKernel, what: What) -> str:
    from flashgen.build import inspect

    if what is What.ptx:
        return inspect.ptx(kernel.source, kernel.target.architecture, kernel.name)
    return inspect.sass(compiled(kernel).cubin_path)


def show_resources(kernel: RenderedKernel, json: bool) -> None:
    """What the compiler reports and the launch takes."""
    entry = compiled(kernel)
    facts: dict[str, Any] = {
        "kernel": kernel.name,
        "target": kernel.target.name,
        **entry.resources.to_dict(),
        "dynamic_shared": kernel.shared_bytes,
        "threads": kernel.threads,
        "nvrtc": ".".join(str(part) for part in entry.meta["nvrtc_version"]),
        "cubin": str(entry.cubin_path),
    }
    if json:
        print_json(facts)
    else:
        print_table(("what", "value"), [(name.replace("_", " "), str(value)) for name, value in facts.items()])
