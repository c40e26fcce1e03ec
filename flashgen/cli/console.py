"""Prints results to stdout and messages to stderr, with colours on a terminal and as plain text in a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

INTERRUPTED = 130  # the exit status after a Ctrl-C


_above_bar: list[Console] = []  # while a progress bar is shown, the console that prints lines above it


def stdout() -> Console:
    """Returns a console that does not wrap or truncate, on the current sys.stdout, which tests replace."""
    return _above_bar[-1] if _above_bar else Console(file=sys.stdout, soft_wrap=True, highlight=False)


def stderr() -> Console:
    return Console(file=sys.stderr, soft_wrap=True, highlight=False)


def note(message: str) -> None:
    """Prints a message on stderr, such as the engine that runs or the files that were written."""
    stderr().print(message, markup=False)


def fail(message: str) -> None:
    """Prints an error on stderr. The caller exits."""
    console = stderr()
    console.print("error: ", style="bold red", end="", markup=False)
    console.print(message, markup=False)


def paragraphs(docstring: str | None) -> str:
    """Converts a docstring to help text with one line per paragraph, which is wrapped at the width of the terminal."""
    return "\n\n".join(" ".join(part.split()) for part in (docstring or "").split("\n\n")).strip()


def print_json(value: Any) -> None:
    """Prints a value as indented JSON on stdout."""
    text = json.dumps(value, indent=2)
    if sys.stdout.isatty():
        stdout().print_json(text)
    else:
        sys.stdout.write(text + "\n")


def print_code(text: str, lexer: str) -> None:
    """Prints source code on stdout, highlighted on a terminal and unchanged in a pipe.

    lexer: the Pygments name of its language.
    """
    if sys.stdout.isatty():
        from rich.syntax import Syntax

        stdout().print(Syntax(text, lexer, theme="ansi_dark", background_color="default"))
    else:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """Prints a table on stdout; in a pipe, lines of tab-separated cells with a heading. Cells may have rich markup."""
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


class Rows:
    """A table on stdout whose rows are printed one by one; in a pipe, as lines of tab-separated cells.

    widths: minimum widths of columns in characters on a terminal, for columns whose heading is narrower than the cells.
    """

    def __init__(self, columns: Sequence[str], widths: Mapping[str, int] | None = None) -> None:
        self.columns = tuple(columns)
        self._widths = [max(len(column), (widths or {}).get(column, 0)) for column in columns]
        self._begun = False

    def add(self, cells: Sequence[str]) -> None:
        """Prints a row, after the heading if it is the first one. Cells may have rich markup."""
        if not self._begun:
            self._print([f"[bold]{column}[/]" for column in self.columns])
        self._begun = True
        self._print(cells)

    def _print(self, cells: Sequence[str]) -> None:
        from rich.text import Text

        texts = [Text.from_markup(cell) for cell in cells]
        if sys.stdout.isatty():
            for text, width in zip(texts[:-1], self._widths, strict=False):
                text.pad_right(max(width - text.cell_len, 0))
            stdout().print(Text("  ").join(texts))
        else:
            sys.stdout.write("\t".join(text.plain for text in texts) + "\n")
            sys.stdout.flush()  # so that the reader of a pipe gets each row at once


@contextmanager
def progress(description: str, total: int | None) -> Iterator[Progress]:
    """Shows a progress bar on stderr with one task, number 0, if stderr is a terminal."""
    left = (TextColumn("left"), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), *left)
    # If stdout and stderr are the same terminal, the bar's console prints the lines of stdout above the bar.
    shared, drawn = sys.stdout.isatty(), sys.stderr.isatty()
    console = stderr()
    with Progress(*columns, console=console, disable=not drawn, transient=True, redirect_stdout=shared) as bar:
        bar.add_task(description, total=total)
        if shared and drawn:
            _above_bar.append(console)
        try:
            yield bar
        finally:
            _above_bar.clear()
