"""`flashgen export`: writes a Python package with compiled kernels that needs torch only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashgen.cli.console import note, print_json, progress
from flashgen.cli.options import SPEC_HELP, Deterministic, Json, Passes, SpecOptions, known_targets, with_spec_options
from flashgen.cli.specs import load_spec
from flashgen.cli.writing import Force
from flashgen.errors import ArgumentError

EXAMPLES = """[bold]Example[/]

flashgen export "causal()" --head-dim 128 --dtype bfloat16 --target sm_80 --target sm_90a --output causal-attention
"""


@with_spec_options
def export(
    specs: Annotated[list[str], typer.Argument(metavar="SPEC", help=SPEC_HELP, show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The folder to write or update.")],
    options: SpecOptions,
    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            metavar="ARCH",
            help="A target architecture, such as sm_90a; may be repeated. Default: that of this machine's GPU.",
            autocompletion=known_targets,
        ),
    ] = None,
    pass_: Annotated[Passes, typer.Option("--pass", help="forward, or both for gradients.")] = Passes.both,
    deterministic: Deterministic = False,
    name: Annotated[
        str | None, typer.Option("--name", help="The name of the package.", show_default="the name of the folder")
    ] = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Write a Python package with the compiled kernels of each SPEC. It needs torch only.

    The package has attention as operators of torch, with gradients and support for torch.compile, the CUDA sources,
    tests and a README. Its layout is that of Hugging Face's kernels, which can load it. No GPU is needed to write it.
    """
    from flashgen import release

    loaded = tuple(dict.fromkeys(load_spec(text, options) for text in specs))
    targets = target or [_target_of_this_gpu()]
    with progress("exporting", None) as bar:

        def advance(done: int, total: int, kernel: str) -> None:
            bar.update(bar.task_ids[0], completed=done, total=total, description=kernel)

        metadata = release.export(
            loaded,
            output,
            targets=targets,
            passes=pass_.chosen,
            deterministic=deterministic,
            name=name,
            force=force,
            progress=advance,
        )
    if json:
        print_json(dict(metadata))
    else:
        note(f"{metadata['name']} with {len(loaded)} spec{'s' if len(loaded) > 1 else ''} in {output}")


def _target_of_this_gpu() -> str:
    from flashgen.cli.machine import gpus
    from flashgen.codegen.targets import target_of_capability

    if not gpus():
        raise ArgumentError("--target is missing, and this machine has no GPU: name the architectures to export for")
    return target_of_capability(*gpus()[0].compute_capability).name
