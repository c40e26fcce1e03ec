"""`flashgen release`: kernels built beforehand, for machines that compile nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashgen.cli.console import fail, note, paragraphs, print_json, progress
from flashgen.cli.options import Json

BUILD_EXAMPLES = """[bold]Example[/]

flashgen release build release.toml --out kernels

FLASHGEN_RELEASE=kernels FLASHGEN_JIT=0 python serve.py

A manifest is TOML or JSON, each [cyan][[kernels]][/] the product of its lists:

mask = ["causal()", "full()"]

head_dim = [64, 128]

dtype = "bfloat16"

target = ["sm_80", "sm_90a"]
"""

app = typer.Typer(no_args_is_help=True, help="Kernels built beforehand, for machines that compile nothing.")

Manifest = Annotated[Path, typer.Argument(help="What to build: a .toml or .json file.", show_default=False)]


def build(
    manifest: Manifest,
    out: Annotated[Path, typer.Option("--out", help="The folder to write or bring up to date.")],
    sources_only: Annotated[bool, typer.Option("--sources-only", help="Emit the CUDA and compile nothing.")] = False,
    json: Json = False,
) -> None:
    """Emit and compile everything that MANIFEST asks for, for any architectures, with no GPU.

    The folder holds the sources, the cubins, a C++ header beside each cubin, and manifest.json: the sha256 of each, its
    spec, target, NVRTC version, resources, and how it is launched. Name the folder in [cyan]FLASHGEN_RELEASE[/], and
    kernels are looked up there before anything is compiled; or launch them from C++, as examples/launch_from_cpp/ does.
    """
    from flashgen import release

    with progress("building", None) as bar:

        def advance(done: int, total: int, name: str) -> None:
            bar.update(bar.task_ids[0], completed=done, total=total, description=name)

        written = release.build(manifest, out, sources_only=sources_only, progress=advance)
    if json:
        print_json(dict(written))
    else:
        note(f"{len(written['kernels'])} kernels in {out}")


def check(
    folder: Annotated[Path, typer.Argument(help="A folder that `flashgen release build` wrote.", show_default=False)],
    manifest: Annotated[
        Path | None, typer.Option("--manifest", help="Also compare the sources with what this emits now.")
    ] = None,
    json: Json = False,
) -> None:
    """Verify a release folder: every file there and unaltered, and nothing beside them. Exit 1 where that is not so."""
    from flashgen import release

    findings = release.check(folder) + (release.stale(manifest, folder) if manifest else [])
    if json:
        print_json({"ok": not findings, "findings": [{"path": f.path, "problem": f.problem} for f in findings]})
    elif findings:
        for finding in findings:
            fail(f"{folder / finding.path} {finding.problem}")
    else:
        note(f"{folder} is what was built")
    if findings:
        raise typer.Exit(1)


app.command(help=paragraphs(build.__doc__), epilog=BUILD_EXAMPLES.replace("[[kernels]]", r"\[\[kernels]]"))(build)
app.command(help=paragraphs(check.__doc__))(check)
