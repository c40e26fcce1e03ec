"""`flashgen cache`: shows the folder of compiled kernels and its entries, and removes them."""

from __future__ import annotations

from typing import Annotated

import typer

from flashgen.cli.console import note, print_json, print_table
from flashgen.cli.options import Json

app = typer.Typer(
    no_args_is_help=True,
    help=(
        "Manage the compiled kernels on disk. They are in the folder [cyan]FLASHGEN_CACHE_DIR[/]; any entry may be "
        "removed at any time. A folder that other users can write to is not used; with "
        "[cyan]FLASHGEN_CACHE_SHARED=1[/] its owner and its group are trusted."
    ),
)


@app.command()
def path() -> None:
    """Print the folder of the cache, which may not exist yet."""
    from flashgen.build.cache import KernelCache

    typer.echo(KernelCache.from_environment().path())


@app.command("list")
def list_entries(json: Json = False) -> None:
    """List the entries with their names, the digits of their keys, and their sizes in bytes."""
    from flashgen.build.cache import KernelCache

    entries = KernelCache.from_environment().list()
    if json:
        print_json([{"name": e.name, "key": e.key, "bytes": e.bytes, "path": str(e.path)} for e in entries])
        return
    print_table(("name", "key", "bytes"), [(e.name, e.key, str(e.bytes)) for e in entries])
    note(f"{len(entries)} entries, {sum(e.bytes for e in entries)} bytes")


@app.command()
def clear(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove every entry and no other file. Kernels are compiled again when they are next called."""
    from flashgen.build.cache import KernelCache

    cache = KernelCache.from_environment()
    entries = cache.list()
    if entries and not yes:
        typer.confirm(f"Remove {len(entries)} entries from {cache.path()}?", abort=True)
    typer.echo(f"removed {cache.clear()} entries from {cache.path()}")
