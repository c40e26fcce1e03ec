"""What `flashgen show` prints of a pass's kernels: their texts, the compiler's report, and their costs."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from flashgen.cli.console import note, print_code, print_json, print_table
from flashgen.cli.writing import writing
from flashgen.errors import ArgumentError
from flashgen.files import write_file

if TYPE_CHECKING:
    from flashgen.analysis.tile_classes import TileMap
    from flashgen.build.cache import Entry
    from flashgen.codegen.rendered_kernel import RenderedKernel
    from flashgen.language import AttentionSpec


NO_OPTIONS: Mapping[str, Any] = {}
_SUFFIXES = (".cu", ".ptx", ".sass", ".svg", ".png")  # endings of files, which the folder of --output must not have


class Pass(StrEnum):
    """Whose kernels to show."""

    forward = "forward"
    decode = "decode"
    backward = "backward"


class What(StrEnum):
    """What to show of a kernel."""

    cuda = "cuda"
    ptx = "ptx"
    sass = "sass"
    resources = "resources"
    tiles = "tiles"
    svg = "svg"
    traffic = "traffic"
    timeline = "timeline"
    spec = "spec"


def tile_of(
    spec: AttentionSpec, target: str, of: Pass, deterministic: bool, forward: Mapping[str, Any] = NO_OPTIONS
) -> tuple[int, int]:
    """(queries, keys) of a tile of a pass; forward: options of the forward's kernels."""
    from flashgen.codegen.stages import backward_kernels, decode_kernels, forward_kernels
    from flashgen.codegen.targets import target_named

    architecture = target_named(target)
    if of is Pass.forward:
        plan = forward_kernels(spec, architecture, **forward)["forward"].plan
    elif of is Pass.decode:
        plan = decode_kernels(spec, architecture)["decode"].plan
    else:
        plan = backward_kernels(spec, architecture, deterministic)["keys"].plan
    return plan.tile_q, plan.tile_k


def rendered(
    spec: AttentionSpec,
    target: str,
    of: Pass,
    name: str | None,
    deterministic: bool,
    forward: Mapping[str, Any] = NO_OPTIONS,
    heads_apart: bool = False,
    apart: bool = False,
) -> dict[str, RenderedKernel]:
    """A pass's kernels, or the named one alone, by the part that each plays, in the order of their launches.

    forward: as above. apart: give them the names of a release in place of those that launches know.
    """
    from flashgen.codegen.stages import kernels_of
    from flashgen.codegen.targets import target_named

    options = {"deterministic": deterministic, "heads_apart": heads_apart, "unique_names": apart, **forward}
    kernels = dict(kernels_of(spec, target_named(target), (of.value,), **options))
    if name is None:
        return kernels
    if name not in kernels:
        closed = f"{spec.mask.name} needs none, closed forms say which tiles to visit"
        why = closed if name.endswith("lists") else f"there is none in this {of.value} pass"
        raise ArgumentError(f"--kernel {name}: {why}; its kernels are {', '.join(kernels)}")
    return {name: kernels[name]}


def to_print(kernels: dict[str, RenderedKernel], of: Pass) -> dict[str, RenderedKernel]:
    """The kernels of a pass that are printed where none is named; a note says which there are."""
    if of is Pass.backward:
        note(
            f"{len(kernels)} kernels, in the order of their launches: {', '.join(kernels)}. Each is a file of its own, "
            "together they do not compile: --output DIR/ writes the files, --kernel NAME shows one"
        )
        return kernels
    if of is Pass.decode:
        others = ", ".join(name for name in kernels if name != "decode")
        if others:
            note(f"beside this one: {others}; --kernel NAME shows one, --output DIR/ writes all")
        return {"decode": kernels["decode"]}
    if "lists" in kernels:
        note("a second kernel lists the tiles that this one visits: --kernel lists shows it, --output DIR/ writes both")
    if "few" in kernels:
        note(
            "this one has the prompts; a second kernel has the sequences of few queries: --kernel few shows it, "
            "--output DIR/ writes both"
        )
    return {"forward": kernels["forward"]}


def compiled(kernel: RenderedKernel) -> Entry:
    """The kernel from the cache, which gets it where it was missing."""
    from flashgen.build.cache import default_cache

    return default_cache().load_or_compile(kernel.name, kernel.source, kernel.target.architecture)


def show_texts(kernels: Mapping[str, RenderedKernel], what: What) -> None:
    """Prints one kernel's text as it is, or several, each below a line with its part and name."""
    texts = []
    for number, (part, kernel) in enumerate(kernels.items(), start=1):
        title = f"// ==== {part}: file {number} of {len(kernels)}, {kernel.name} "
        texts.append((f"{title:=<120}\n\n" if len(kernels) > 1 else "") + text_of(kernel, what))
    print_code("\n".join(texts), "cuda" if what is What.cuda else "nasm")


def write_texts(kernels: Mapping[str, RenderedKernel], what: What, folder: Path) -> None:
    """Writes each kernel to a file of its own, named as in a release if it has such a name, and prints a line for each.

    All texts are made before the first is written, and a file is replaced whole or not at all.
    """
    if folder.suffix in _SUFFIXES and not folder.is_dir():
        raise ArgumentError(
            f"--output {folder} must be a folder, in which each kernel gets a file of its own; "
            "--kernel NAME > FILE keeps one kernel"
        )
    texts = {folder / file_name(kernel, what): text_of(kernel, what) for kernel in kernels.values()}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            write_file(path, text)
    for part, path in zip(kernels, texts, strict=True):
        typer.echo(f"{part}\t{path}")


def file_name(kernel: RenderedKernel, what: What) -> str:
    """The name that a release gives to the kernel's file."""
    from flashgen.build.keys import readable_name

    return f"{readable_name(kernel.name)}{'.cu' if what is What.cuda else f'.{what.value}'}"


def text_of(kernel: RenderedKernel, what: What) -> str:
    """The kernel as CUDA, PTX or SASS, ending in a newline."""
    text = kernel.source if what is What.cuda else machine_code(kernel, what)
    return text if text.endswith("\n") else f"{text}\n"


def machine_code(kernel: RenderedKernel, what: What) -> str:
    from flashgen.build import inspect

    if what is What.ptx:
        return inspect.ptx(kernel.source, kernel.target.architecture, kernel.name)
    return inspect.sass(compiled(kernel).cubin)


def show_resources(kernels: Mapping[str, RenderedKernel], json: bool) -> None:
    """What the compiler reports of each kernel and what its launch takes and costs."""
    facts = {part: resources_of(kernel) for part, kernel in kernels.items()}
    if len(facts) == 1:
        (only,) = facts.values()
        if json:
            print_json(only)
        else:
            print_table(("what", "value"), [(name.replace("_", " "), str(value)) for name, value in only.items()])
    elif json:
        print_json([{"part": part, **known} for part, known in facts.items()])
    else:
        names = [name for name in next(iter(facts.values())) if name not in ("kernel", "target", "nvrtc", "cubin")]
        heading = ("kernel", *(name.replace("_", " ") for name in names))
        print_table(heading, [(part, *(str(known[name]) for name in names)) for part, known in facts.items()])


def resources_of(kernel: RenderedKernel) -> dict[str, Any]:
    entry = compiled(kernel)
    return {
        "kernel": kernel.name,
        "target": kernel.target.name,
        **entry.resources.to_dict(),
        "dynamic_shared": kernel.shared_bytes,
        "threads": kernel.threads,
        "flops": kernel.cost.flops if kernel.cost else "",
        "hbm_bytes": kernel.cost.hbm if kernel.cost else "",
        "nvrtc": ".".join(str(part) for part in entry.meta["nvrtc_version"]),
        "cubin": str(entry.cubin_path or "in memory"),
    }


def show_traffic(
    spec: AttentionSpec, target: str, of: Pass, deterministic: bool, tiles: TileMap, heads: int, json: bool
) -> None:
    """The HBM bytes of a pass beside standard attention's and the papers', counted for the map's lengths."""
    from flashgen.codegen.stages import backward_kernels
    from flashgen.codegen.targets import target_named
    from flashgen.report.sizes import CallSizes
    from flashgen.report.traffic import backward_traffic, forward_traffic

    architecture = target_named(target)
    if of is Pass.decode:
        raise ArgumentError(
            "--what traffic has --pass forward and --pass backward, not decode; --what resources has it"
        )
    sizes = CallSizes(tiles.len_q, tiles.len_k, tiles.classes.shape[0], heads, heads)
    if of is Pass.forward:
        rows = forward_traffic(spec, architecture, tiles, sizes)
    else:
        rows = backward_traffic(spec, architecture, backward_kernels(spec, architecture, deterministic), sizes)
    if json:
        print_json([row.to_dict() for row in rows])
    else:
        cells = [(row.name, f"{row.bytes / 1e6:.1f}", f"{row.times:.1f}", row.source) for row in rows]
        print_table(("algorithm", "MB of HBM", "times fewer", "counted by"), cells)


def write_timeline(
    spec: AttentionSpec, target: str, of: Pass, name: str | None, deterministic: bool, path: Path | None
) -> None:
    """Runs a pass's main kernel, or the named one, once on the emulator, and draws what its first block did."""
    from flashgen.report.runs import run_once, short_shape
    from flashgen.report.timeline import timeline_of, to_svg

    if of is Pass.decode:
        raise ArgumentError("--what timeline has --pass forward and --pass backward, not decode; leave --pass out")
    kernels = rendered(spec, target, of, name, deterministic)
    role = name or ("forward" if of is Pass.forward else "keys")
    plan = kernels[role].plan
    shape = short_shape(plan.tile_q, plan.tile_k, along_keys=of is Pass.forward)
    run = run_once(spec, target, ("forward" if of is Pass.forward else "backward",), shape, deterministic=deterministic)
    events = run.events[kernels[role].entry]
    timeline = timeline_of(events, kernels[role])
    if not timeline.spans:
        raise ArgumentError(f"--kernel {role} neither copies nor multiplies nor waits: it has no timeline")
    drawn = to_svg(timeline, f"{spec.mask.name}, {role} on {target}, {shape.len_q} queries and keys")
    if path is None:
        print_code(drawn, "xml")
        return
    if path.suffix != ".svg":
        raise ArgumentError(f"--output {path}: a timeline is written to a .svg file")
    with writing(path):
        write_file(path, drawn)
    note(f"{kernels[role].name} -> {path}, {timeline.cycles:.0f} cycles of the model")
