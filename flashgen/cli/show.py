"""`flashgen show`: what is generated for a spec, with no GPU and without running it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashgen.cli.arrays import load_arrays
from flashgen.cli.console import note, print_code, print_json, print_table
from flashgen.cli.options import Json, Spec, SpecOptions, Target, with_spec_options
from flashgen.cli.specs import load_spec
from flashgen.errors import ArgumentError

if TYPE_CHECKING:
    from flashgen.analysis.tiles import TileMap
    from flashgen.build.cache import Entry
    from flashgen.codegen.kernel import RenderedKernel
    from flashgen.language import AttentionSpec

EXAMPLES = """[bold]Examples[/]

flashgen show "causal() & sliding_window(1024)" --head-dim 128 --dtype bfloat16 --target sm_80

flashgen show "causal()" --what sass --target sm_90 | less

flashgen show "causal() & sliding_window(300)" --what tiles --len-q 1024
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
    input: Annotated[
        Path | None, typer.Option("--input", "-i", help="A file with the mask's captures, for the tile map.")
    ] = None,
    json: Json = False,
) -> None:
    """Show the CUDA of a spec, its PTX or SASS, its resources, its tile map (drawn, or as SVG), or the spec as JSON.

    Nothing is run, so no GPU is needed; without one and without --target, [cyan]sm_80[/] is shown.
    """
    declared = load_spec(spec, options)
    if what is What.spec:
        print_code(declared.to_json(), "json")
        return
    architecture = target or target_here()
    if what in (What.tiles, What.svg):
        captures = load_arrays(input) if input else {}
        tiles = tiles_of(declared, architecture, len_q, len_q if len_k is None else len_k, captures)
        show_tiles(tiles, declared.mask.name, what, json)
        return
    chosen = rendered(declared, architecture, kernel)
    if what is What.cuda:
        print_code(chosen.source, "cuda")
    elif what is What.resources:
        show_resources(chosen, json)
    else:
        print_code(machine_code(chosen, what), "nasm")


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


def tiles_of(spec: AttentionSpec, target: str, len_q: int, len_k: int, captures: Mapping[str, Any]) -> TileMap:
    """The tile map of batch 0 and head 0, in the tiles of the target's plan."""
    from flashgen.analysis.tiles import tile_map
    from flashgen.codegen.plans import choose_forward_plan
    from flashgen.codegen.targets import target_named

    plan = choose_forward_plan(spec, target_named(target))
    needed = {capture.name: captures[capture.name] for capture in spec.mask.captures if capture.name in captures}
    return tile_map(spec.mask.expression, (plan.tile_q, plan.tile_k), len_q, len_k, captures=needed)


def show_tiles(tiles: TileMap, title: str, what: What, json: bool) -> None:
    from flashgen.analysis.draw import to_svg, to_text

    if what is What.svg:
        print_code(to_svg(tiles, title=title), "xml")
    elif json:
        size = {"tile": list(tiles.tile), "len_q": tiles.len_q, "len_k": tiles.len_k}
        print_json(size | {"classes": tiles.classes.tolist()})
    else:
        typer.echo(to_text(tiles))
