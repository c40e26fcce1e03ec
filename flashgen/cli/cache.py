"""`flashgen cache`: where compiled kernels are kept, which there are, and how to remove them."""

from __future__ import annotations

from typing import Annotated

import typer

from flashgen.cli.console import note, print_json, print_table
from flashgen.cli.options import Json

app = typer.Typer(
    no_args_is_help=True,
    help=(
        "The compiled kernels on disk. [cyan]FLASHGEN_CACHE_DIR[/] says where; any entry may be removed at any time. "
        "One that others can write to is not used; [cyan]FLASHGEN_CACHE_SHARED=1[/] trusts its owner and its group."
    ),
)


@app.command()
def path() -> None:
    """Print the cache's folder, which may not exist yet."""
    from flashgen.build.cache import KernelCache

    typer.echo(KernelCache.from_environment().path())


@app.command("list")
def list_entries(json: Json = False) -> None:
    """List the entries: name, digits of the key, size in bytes."""
    from flashgen.build.cache import KernelCache

    entries = KernelCache.from_environment().list()
    if json:
        print_json([{"name": e.name, "key": e.key, "bytes": e.bytes, "path": str(e.path)} for e in entries])
        return
    print_table(("name", "key", "bytes"), [(e.name, e.key, str(e.bytes)) for e in entries])
    note(f"{len(entries)} entries, {sum(e.bytes for e in entries)} bytes")


@app.command()
def clear(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove every entry, and nothing else. Kernels are compiled again when they are next called."""
    from flashgen.build.cache import KernelCache

    cache = KernelCache.from_environment()
    entries = cache.list()
    if entries and not yes:
        typer.confirm(f"Remove {len(entries)} entries from {cache.path()}?", abort=True)
    typer.echo(f"removed {cache.clear()} entries from {cache.path()}")
