"""The typer application: its commands and its error handling."""

from __future__ import annotations

import errno
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from flashgen.cli import bench, cache, demo, doctor, export, release, report, run, show, tune, verify
from flashgen.cli.console import fail, note, paragraphs
from flashgen.cli.user_files import describe_error
from flashgen.cli.writing import stdout_problem
from flashgen.errors import FlashgenError

EXIT_ERROR = 2  # exit status for invalid input; 1 is that of a failed check


class ErrorsWithoutTraceback(TyperGroup):
    """Shows a message without a traceback, and exits with status 2, for errors that are not bugs of flashgen.

    These are flashgen's own exceptions, errors in a user's file (shown with the user's source lines), files that cannot
    be read or written, and a standard output that cannot be written. --debug shows the tracebacks of all but the last.
    """

    def invoke(self, ctx: Any) -> Any:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_where: note(f"warning: {message}")
            try:
                return super().invoke(ctx)
            except Exception as error:
                message = None if ctx.params.get("debug") else without_traceback(error)
                if message is None:
                    raise
                fail(message)
                raise typer.Exit(EXIT_ERROR) from None

    def main(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().main(*arguments, **options)
        except (OSError, SystemExit) as error:
            unwritten = stdout_problem()
            # Unbuffered output raises when it is written. An error in writing a file names that file.
            problem = unwritten or (error if isinstance(error, OSError) else None)
            if problem is None or problem.filename is not None:
                raise
            if problem.errno != errno.EPIPE:  # a pipe that its reader closed, as `head` does, is no error
                fail(f"the output cannot be written: {problem.strerror or problem}")
            sys.exit(EXIT_ERROR)


def without_traceback(error: Exception) -> str | None:
    """Returns the message to show instead of a traceback; None for an unexpected error, whose traceback is shown."""
    if isinstance(error, FlashgenError):
        return str(error)
    message = describe_error(error)
    if message is None and isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror or error}"
    return message


app = typer.Typer(
    cls=ErrorsWithoutTraceback,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def print_version(wanted: bool) -> None:
    if wanted:
        from flashgen import __version__

        typer.echo(f"flashgen {__version__}")
        raise typer.Exit


SUMMARY = """Generate readable CUDA kernels for the attention variants that you declare.

A SPEC is an expression of named masks such as [cyan]"causal() & sliding_window(1024)"[/], a name in your own Python
file such as [cyan]variants.py:near[/], or the JSON of a spec (as text, or as a .json file).
"""


@app.callback(
    help=paragraphs(SUMMARY),
    epilog="Start with [bold]flashgen demo[/]; [bold]flashgen doctor[/] reports what works on this machine.",
)
def flashgen(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=print_version, is_eager=True)
    ] = False,
) -> None:
    """Takes the options before the command."""


COMMANDS: tuple[tuple[Callable[..., None], str | None], ...] = (
    (demo.demo, demo.EXAMPLES),
    (run.run, run.EXAMPLES),
    (show.show, show.EXAMPLES),
    (report.report, report.EXAMPLES),
    (verify.verify, verify.EXAMPLES),
    (tune.tune, tune.EXAMPLES),
    (export.export, export.EXAMPLES),
    (doctor.doctor, None),
)
for command, examples in COMMANDS:
    app.command(help=paragraphs(command.__doc__), epilog=examples)(command)
app.add_typer(bench.app, name="bench")
app.add_typer(release.app, name="release")
app.add_typer(cache.app, name="cache")
