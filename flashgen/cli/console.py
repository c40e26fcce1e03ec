"""Where output goes: results to stdout, words about the work to stderr; colours on a terminal, plain text in a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

Item = TypeVar("Item")


def stdout() -> Console:
    """A console on today's sys.stdout (tests and pipes replace it), that wraps and shortens nothing."""
    return Console(file=sys.stdout, soft_wrap=True, highlight=False)


def stderr() -> Console:
    return Console(file=sys.stderr, soft_wrap=True, highlight=False)


def note(message: str) -> None:
    """A line about the work, on stderr: which engine runs, where files went."""
    stderr().print(message, markup=False)


def fail(message: str) -> None:
    """An error, on stderr. The caller exits."""
    console = stderr()
    console.print("error: ", style="bold red", end="", markup=False)
    console.print(message, markup=False)


def paragraphs(docstring: str | None) -> str:
    """A docstring as help text: each paragraph one line, which the terminal's width breaks."""
    return "\n\n".join(" ".join(part.split()) for part in (docstring or "").split("\n\n")).strip()


def print_json(value: Any) -> None:
    """A value for a program to read: indented JSON on stdout."""
    text = json.dumps(value, indent=2)
    if sys.stdout.isatty():
        stdout().print_json(text)
    else:
        sys.stdout.write(text + "\n")


def print_code(text: str, lexer: str) -> None:
    """Source text on stdout, byte for byte in a pipe, highlighted on a terminal. `lexer` is a Pygments name."""
    if sys.stdout.isatty():
        from rich.syntax import Syntax

        stdout().print(Syntax(text, lexer, theme="ansi_dark", background_color="default"))
    else:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """A table on stdout; in a pipe a header and a line per row, parted by tabs. Cells may hold rich's markup."""
    if sys.stdout.isatty():
        table = Table(title=title, title_justify="left", header_style="bold")
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*row)
        Console(file=sys.stdout).print(table)
    else:
        from rich.text import Text

        for row in (columns, *rows):
            sys.stdout.write("\t".join(Text.from_markup(cell).plain for cell in row) + "\n")


@contextmanager
def progress(description: str, total: int | None) -> Iterator[Progress]:
    """A progress bar on stderr with one task, number 0; nothing is drawn where stderr is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # While a bar is drawn, rich sends what is printed through its own console: right for a terminal, wrong for a file.
    options: dict[str, Any] = {"transient": True, "redirect_stdout": sys.stdout.isatty()}
    with Progress(*columns, console=stderr(), disable=not sys.stderr.isatty(), **options) as bar:
        bar.add_task(description, total=total)
        yield bar


def track(items: Iterable[Item], description: str, total: int | None) -> Iterator[Item]:
    """The items, with a progress bar on stderr that moves on after each."""
    with progress(description, total) as bar:
        for item in items:
            yield item
            bar.advance(bar.task_ids[0])
