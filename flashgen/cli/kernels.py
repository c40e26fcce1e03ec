"""Prints the kernels of a pass for `flashgen show`: their sources, their resources, and their costs."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from flashgen.cli.console import note, print_code, print_json, print_table
from flashgen.cli.writing import check_folder, check_output, check_unedited, write_output, writing
from flashgen.errors import ArgumentError

if TYPE_CHECKING:
    from flashgen.analysis.tile_classes import TileMap
    from flashgen.build.cache import Entry
    from flashgen.codegen.rendered_kernel import RenderedKernel
    from flashgen.language import AttentionSpec


NO_OPTIONS: Mapping[str, Any] = {}
_SUFFIXES = (".cu", ".ptx", ".sass", ".svg", ".png")  # suffixes of files, to detect a file name given as a folder


class Pass(StrEnum):
    """The values of --pass."""

    forward = "forward"
    decode = "decode"
    backward = "backward"


class What(StrEnum):
    """The values of --what."""

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
    spec: AttentionSpec, target: str, pass_: Pass, deterministic: bool, forward: Mapping[str, Any] = NO_OPTIONS
) -> tuple[int, int]:
    """Returns the tile size (queries, keys) of a pass. forward: options of the forward kernels."""
    from flashgen.codegen.stages import backward_kernels, decode_kernels, forward_kernels
    from flashgen.codegen.targets import target_named

    architecture = target_named(target)
    if pass_ is Pass.forward:
        plan = forward_kernels(spec, architecture, **forward)["forward"].plan
    elif pass_ is Pass.decode:
        plan = decode_kernels(spec, architecture)["decode"].plan
    else:
        plan = backward_kernels(spec, architecture, deterministic)["dkdv"].plan
    return plan.tile_q, plan.tile_k


def render_kernels(
    spec: AttentionSpec,
    target: str,
    pass_: Pass,
    name: str | None,
    deterministic: bool,
    forward: Mapping[str, Any] = NO_OPTIONS,
    heads_apart: bool = False,
    apart: bool = False,
) -> dict[str, RenderedKernel]:
    """Returns the kernels of a pass by role, in launch order, or only the kernel of the role `name`.

    forward: options of the forward kernels. apart: use the names of a release instead of those of the launch code.
    """
    from flashgen.codegen.stages import RENAMED_ROLES, kernels_of
    from flashgen.codegen.targets import target_named

    if name in RENAMED_ROLES:
        note(f"--kernel {name} is named {RENAMED_ROLES[name]} now")
        name = RENAMED_ROLES[name]
    options = {"deterministic": deterministic, "heads_apart": heads_apart, "unique_names": apart, **forward}
    kernels = dict(kernels_of(spec, target_named(target), (pass_.value,), **options))
    if name is None:
        return kernels
    if name not in kernels:
        closed = f"{spec.mask.name} needs none, as its tiles follow from closed forms"
        why = closed if name.endswith("lists") else f"there is none in this {pass_.value} pass"
        raise ArgumentError(f"--kernel {name}: {why}; its kernels are {', '.join(kernels)}")
    return {name: kernels[name]}


def to_print(kernels: dict[str, RenderedKernel], pass_: Pass) -> dict[str, RenderedKernel]:
    """Returns the kernels of a pass that are printed by default, and prints a note about the others."""
    if pass_ is Pass.backward:
        note(
            f"{len(kernels)} kernels, in launch order: {', '.join(kernels)}. Each is a translation unit of its own: "
            "--output DIR/ writes the files, --kernel NAME shows one"
        )
        return kernels
    if pass_ is Pass.decode:
        others = ", ".join(name for name in kernels if name != "decode")
        if others:
            note(f"other kernels of this pass: {others}; --kernel NAME shows one, --output DIR/ writes all")
        return {"decode": kernels["decode"]}
    if "lists" in kernels:
        note("a second kernel lists the tiles to visit: --kernel lists shows it, --output DIR/ writes both")
    if "few" in kernels:
        note(
            "this kernel computes prefill; a second kernel computes the sequences with few queries: --kernel few shows "
            "it, --output DIR/ writes both"
        )
    return {"forward": kernels["forward"]}


def compiled(kernel: RenderedKernel) -> Entry:
    """Returns the cache entry of a kernel, which is compiled if it is missing."""
    from flashgen.build.cache import default_cache

    return default_cache().load_or_compile(kernel.name, kernel.source, kernel.target.architecture)


def show_texts(kernels: Mapping[str, RenderedKernel], what: What) -> None:
    """Prints the code of one kernel as it is, or of several kernels, each below a line with its role and name."""
    texts = []
    for number, (part, kernel) in enumerate(kernels.items(), start=1):
        title = f"// ==== {part}: file {number} of {len(kernels)}, {kernel.name} "
        texts.append((f"{title:=<120}\n\n" if len(kernels) > 1 else "") + text_of(kernel, what))
    print_code("\n".join(texts), "cuda" if what is What.cuda else "nasm")


def check_path(path: Path, what: What, force: bool) -> None:
    """Raises ArgumentError, before anything is generated, for a path that does not suit what is shown."""
    if what in (What.tiles, What.svg, What.timeline):
        if path.suffix != ".svg":
            raise ArgumentError(f"--output {path}: pictures are written as SVG, to a file whose name ends in .svg")
        check_output(path, force)
        return
    if path.suffix in _SUFFIXES and not path.is_dir():
        raise ArgumentError(
            f"--output {path} must be a folder, in which each kernel gets a file of its own; "
            "--kernel NAME > FILE writes one kernel"
        )
    check_folder(path)


def write_texts(kernels: Mapping[str, RenderedKernel], what: What, folder: Path, force: bool) -> None:
    """Writes each kernel to a file with the name that a release gives it, and prints the role and path of each file.

    The code of all kernels is generated before the first file is written, and each file is replaced atomically.
    """
    paths = [folder / file_name(kernel, what) for kernel in kernels.values()]
    check_unedited(paths, force)
    texts = [text_of(kernel, what) for kernel in kernels.values()]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for path, text in zip(paths, texts, strict=True):
        write_output(path, text)
    for part, path in zip(kernels, paths, strict=True):
        typer.echo(f"{part}\t{path}")


def file_name(kernel: RenderedKernel, what: What) -> str:
    """Returns the name that a release gives to the kernel's file."""
    from flashgen.build.keys import readable_name

    return f"{readable_name(kernel.name)}{'.cu' if what is What.cuda else f'.{what.value}'}"


def text_of(kernel: RenderedKernel, what: What) -> str:
    """Returns the kernel as CUDA, PTX or SASS, ending with a newline."""
    text = kernel.source if what is What.cuda else machine_code(kernel, what)
    return text if text.endswith("\n") else f"{text}\n"


def machine_code(kernel: RenderedKernel, what: What) -> str:
    from flashgen.build import inspect

    if what is What.ptx:
        return inspect.ptx(kernel.source, kernel.target.architecture, kernel.name)
    return inspect.sass(compiled(kernel).cubin)


def show_resources(kernels: Mapping[str, RenderedKernel], json: bool) -> None:
    """Prints the resources of each kernel as reported by the compiler, its launch parameters and its cost."""
    facts = {part: resources_of(kernel) for part, kernel in kernels.items()}
    if len(facts) == 1:
        (only,) = facts.values()
        if json:
            print_json(only)
        else:
            print_table(("what", "value"), [(name.replace("_", " "), str(value)) for name, value in only.items()])
    elif json:
        print_json([{"part": part, **values} for part, values in facts.items()])
    else:
        names = [name for name in next(iter(facts.values())) if name not in ("kernel", "target", "nvrtc", "cubin")]
        heading = ("kernel", *(name.replace("_", " ") for name in names))
        print_table(heading, [(part, *(str(values[name]) for name in names)) for part, values in facts.items()])


def resources_of(kernel: RenderedKernel) -> dict[str, Any]:
    entry = compiled(kernel)
    return {
        "kernel": kernel.name,
        "target": kernel.target.name,
        **entry.resources.to_dict(),
        "dynamic_shared": kernel.shared_bytes,
        "threads": kernel.threads,
        "flops": kernel.cost.flops_text if kernel.cost else "",
        "hbm_bytes": kernel.cost.hbm_text if kernel.cost else "",
        "nvrtc": ".".join(str(part) for part in entry.meta["nvrtc_version"]),
        "cubin": str(entry.cubin_path or "in memory"),
    }


def show_traffic(
    spec: AttentionSpec, target: str, pass_: Pass, deterministic: bool, tiles: TileMap, heads: int, json: bool
) -> None:
    """Prints the HBM bytes of a pass, of standard attention and of the papers' algorithms for the lengths of a map."""
    from flashgen.codegen.stages import backward_kernels
    from flashgen.codegen.targets import target_named
    from flashgen.report.sizes import CallSizes
    from flashgen.report.traffic import backward_traffic, forward_traffic

    architecture = target_named(target)
    if pass_ is Pass.decode:
        raise ArgumentError(
            "--what traffic supports --pass forward and --pass backward, not decode; --what resources supports it"
        )
    sizes = CallSizes(tiles.len_q, tiles.len_k, tiles.classes.shape[0], heads, heads)
    if pass_ is Pass.forward:
        rows = forward_traffic(spec, architecture, tiles, sizes)
    else:
        rows = backward_traffic(spec, architecture, backward_kernels(spec, architecture, deterministic), sizes)
    if json:
        print_json([row.to_dict() for row in rows])
    else:
        cells = [(row.name, f"{row.bytes / 1e6:.1f}", f"{row.times:.1f}", row.source) for row in rows]
        print_table(("algorithm", "MB of HBM", "times fewer", "counted by"), cells)


def write_timeline(
    spec: AttentionSpec, target: str, pass_: Pass, name: str | None, deterministic: bool, path: Path | None
) -> None:
    """Runs a kernel of a pass, by default the main one, on the emulator, and draws the timeline of its first block."""
    from flashgen.report.runs import run_once, short_shape
    from flashgen.report.timeline import timeline_of, to_svg

    if pass_ is Pass.decode:
        raise ArgumentError("--what timeline supports --pass forward and --pass backward, not decode")
    kernels = render_kernels(spec, target, pass_, name, deterministic)
    role = next(iter(kernels)) if name else "forward" if pass_ is Pass.forward else "dkdv"
    plan, is_forward = kernels[role].plan, pass_ is Pass.forward
    shape = short_shape(plan.tile_q, plan.tile_k, along_keys=is_forward)
    # The plan of the forward is given, because a call of this length would choose smaller tiles.
    given = plan if is_forward else None
    run = run_once(
        spec, target, ("forward" if is_forward else "backward",), shape, deterministic=deterministic, plan=given
    )
    events = run.events[kernels[role].entry]
    timeline = timeline_of(events, kernels[role])
    if not timeline.spans:
        raise ArgumentError(f"--kernel {role} has no timeline: it neither copies nor multiplies nor waits")
    drawn = to_svg(timeline, f"{spec.mask.name}, {role} on {target}, {shape.len_q} queries and keys")
    if path is None:
        print_code(drawn, "xml")
        return
    write_output(path, drawn)
    note(f"{kernels[role].name} -> {path}, {timeline.cycles:.0f} cycles of the model")
