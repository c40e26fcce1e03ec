"""`flashgen show`: what is generated for a spec, with no GPU and without running it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashgen.cli.console import note, print_code, print_json, print_table
from flashgen.cli.options import Json, Spec, SpecOptions, Target, with_spec_options
from flashgen.cli.specs import load_spec

if TYPE_CHECKING:
    from flashgen.build.cache import Entry
    from flashgen.codegen.render import RenderedKernel
    from flashgen.language import AttentionSpec

EXAMPLES = """[bold]Examples[/]

flashgen show "causal() & sliding_window(1024)" --head-dim 128 --dtype bfloat16 --target sm_80

flashgen show "causal()" --what sass --target sm_90 | less

flashgen show "causal() & sliding_window(300)" --what tiles --len-q 1024 --len-k 1024
"""

DEFAULT_TARGET = "sm_80"


class What(StrEnum):
    """What to show of a kernel."""

    cuda = "cuda"
    ptx = "ptx"
    sass = "sass"
    resources = "resources"
    tiles = "tiles"
    spec = "spec"


@with_spec_options
def show(
    spec: Spec,
    options: SpecOptions,
    target: Target = None,
    what: Annotated[
        What, typer.Option("--what", help="The source, what it compiles to, or what is known of it.")
    ] = What.cuda,
    len_q: Annotated[int, typer.Option("--len-q", min=0, help="Queries, for the tile map.")] = 1024,
    len_k: Annotated[int | None, typer.Option("--len-k", min=0, help="Keys. Default: as many as queries.")] = None,
    json: Json = False,
) -> None:
    """Show the CUDA of a spec, its PTX or SASS, its resources, its tile map, or the spec itself as JSON.

    Nothing is run, so no GPU is needed; without one and without --target, [cyan]sm_80[/] is shown.
    """
    declared = load_spec(spec, options)
    if what is What.spec:
        print_code(declared.to_json(), "json")
        return

    kernel = render(declared, target or target_here())
    if what is What.cuda:
        print_code(kernel.source, "cuda")
    elif what is What.tiles:
        show_tiles(kernel, declared, len_q, len_q if len_k is None else len_k, json)
    elif what is What.resources:
        show_resources(kernel, json)
    else:
        print_code(machine_code(kernel, what), "nasm")


def target_here() -> str:
    """This machine's GPU, or the default, saying so."""
    from flashgen.cli.machine import gpus

    found = gpus()
    if found:
        return found[0].architecture
    note(f"no GPU here: this is the kernel for {DEFAULT_TARGET}; choose another with --target")
    return DEFAULT_TARGET


def render(spec: AttentionSpec, target: str) -> RenderedKernel:
    from flashgen.codegen.render import render_forward
    from flashgen.codegen.targets import target_named

    return render_forward(spec, target_named(target))


def compiled(kernel: RenderedKernel) -> Entry:
    """The kernel from the cache, compiled into it where it was not there."""
    from flashgen.build.cache import KernelCache

    cache = KernelCache.from_environment()
    return cache.load_or_compile(kernel.name, kernel.source, kernel.target.architecture)


def machine_code(kernel: RenderedKernel, what: What) -> str:
    from flashgen.build import inspect

    if what is What.ptx:
        return inspect.ptx(kernel.source, kernel.target.architecture, kernel.name)
    return inspect.sass(Path(compiled(kernel).cubin_path))


def show_resources(kernel: RenderedKernel, json: bool) -> None:
    """What the compiler reports, and what the plan takes."""
    entry = compiled(kernel)
    facts: dict[str, Any] = {
        "kernel": kernel.name,
        "target": kernel.target.name,
        **entry.resources.to_dict(),
        "dynamic_shared": kernel.shared_bytes,
        "threads": kernel.threads,
        "tile_q": kernel.plan.tile_q,
        "tile_k": kernel.plan.tile_k,
        "stages": kernel.plan.stages,
        "nvrtc": ".".join(str(part) for part in entry.meta["nvrtc_version"]),
        "cubin": str(entry.cubin_path),
    }
    if json:
        print_json(facts)
    else:
        print_table(("what", "value"), [(name.replace("_", " "), str(value)) for name, value in facts.items()])


def show_tiles(kernel: RenderedKernel, spec: AttentionSpec, len_q: int, len_k: int, json: bool) -> None:
    """The class of each tile, drawn: `.` empty, `+` partial, `#` full."""
