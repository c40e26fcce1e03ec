"""`flashgen release`: builds kernels ahead of time, for machines without a compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashgen.cli.console import fail, note, paragraphs, print_json, progress
from flashgen.cli.options import Json
from flashgen.cli.writing import Force

BUILD_EXAMPLES = """[bold]Example[/]

flashgen release build release.toml --out kernels

FLASHGEN_RELEASE=kernels FLASHGEN_JIT=0 python serve.py

A manifest is TOML or JSON. Each [cyan][[kernels]][/] table stands for all combinations of the values in its lists:

mask = ["causal()", "full()"]

head_dim = [64, 128]

dtype = "bfloat16"

target = ["sm_80", "sm_90a"]
"""

app = typer.Typer(no_args_is_help=True, help="Build kernels ahead of time, for machines without a compiler.")

Manifest = Annotated[Path, typer.Argument(help="The .toml or .json file that lists the kernels.", show_default=False)]


def build(
    manifest: Manifest,
    out: Annotated[Path, typer.Option("--out", help="The folder to write or update.")],
    sources_only: Annotated[
        bool, typer.Option("--sources-only", help="Write the CUDA sources and compile nothing.")
    ] = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Generate and compile all kernels of MANIFEST, for any architectures. No GPU is needed.

    The folder gets the sources, the cubins, a C++ header for each cubin, and manifest.json, which has for each kernel
    its sha256, spec, target, NVRTC version, resources and launch parameters. If [cyan]FLASHGEN_RELEASE[/] names the
    folder, kernels are looked up there before anything is compiled. The cubins can also be launched from C++, as in
    examples/launch_from_cpp/.
    """
    from flashgen import release

    with progress("building", None) as bar:

        def advance(done: int, total: int, name: str) -> None:
            bar.update(bar.task_ids[0], completed=done, total=total, description=name)

        written = release.build(manifest, out, sources_only=sources_only, force=force, progress=advance)
    if json:
        print_json(dict(written))
    else:
        note(f"{len(written['kernels'])} kernels in {out}")


def check(
    folder: Annotated[Path, typer.Argument(help="A folder that `flashgen release build` wrote.", show_default=False)],
    manifest: Annotated[
        Path | None,
        typer.Option("--manifest", help="Also compare the sources with those generated now from this manifest."),
    ] = None,
    json: Json = False,
) -> None:
    """Check that all files of a release folder are present and unaltered, and that there are no others.

    The exit status is 1 if the check fails.
    """
    from flashgen import release

    findings = release.check(folder) + (release.stale(manifest, folder) if manifest else [])
    if json:
        print_json({"ok": not findings, "findings": [{"path": f.path, "problem": f.problem} for f in findings]})
    elif findings:
        for finding in findings:
            fail(f"{folder / finding.path} {finding.problem}")
    else:
        note(f"{folder} is unaltered")
    if findings:
        raise typer.Exit(1)


app.command(help=paragraphs(build.__doc__), epilog=BUILD_EXAMPLES.replace("[[kernels]]", r"\[\[kernels]]"))(build)
app.command(help=paragraphs(check.__doc__))(check)
