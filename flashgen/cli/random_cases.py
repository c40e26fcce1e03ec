"""`flashgen verify --random`, which is deprecated: prints the command of the test suite that replaces it."""

from __future__ import annotations

import shlex
from typing import Annotated, NoReturn

import typer

from flashgen.cli.console import note

Random = Annotated[
    bool, typer.Option("--random", help="Deprecated: print the command of the test suite that replaces this.")
]
Cases = Annotated[int | None, typer.Option("--cases", min=1, help="Deprecated, with --random.", show_default=False)]
Minutes = Annotated[float | None, typer.Option("--minutes", min=0.0, help="Deprecated, with --random.")]
Jobs = Annotated[int, typer.Option("--jobs", min=1, help="Deprecated, with --random.")]

_DEFAULT_MINUTES = 5.0


def refuse_random(
    *, emulate: bool, minutes: float | None, jobs: int, seed: int, pass_: str, target: str | None, sanitize: str | None
) -> NoReturn:
    """Prints the command of the test suite that corresponds to these options, and exits with status 2."""
    command = ["pytest", "tests/random_variants/test_search.py", "-m", "not gpu" if emulate else "gpu"]
    command += ["--random-minutes", f"{_DEFAULT_MINUTES if minutes is None else minutes:g}", "-n", str(jobs)]
    command += ["--hypothesis-seed", str(seed)] if seed else []
    options = {"--random-pass": None if pass_ == "both" else pass_, "--random-target": target}
    for name, value in (options | {"--random-sanitize": sanitize}).items():
        command += [name, value] if value else []
    note("--random is deprecated and ran nothing: random variants are now part of the test suite (docs/testing.md).")
    note("In a checkout of flashgen, with its extra 'test' installed, run:")
    typer.echo(shlex.join(command))
    raise typer.Exit(2)
