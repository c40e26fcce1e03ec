"""Where output goes: results to stdout, notes on the work to stderr; in colour on a terminal, plain in a pipe."""

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


_above_bar: list[Console] = []  # takes a terminal's lines while a progress bar stands below them


def stdout() -> Console:
    """A console that wraps and shortens nothing, on the present sys.stdout, which tests and pipes replace."""
    return _above_bar[-1] if _above_bar else Console(file=sys.stdout, soft_wrap=True, highlight=False)


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
    """A table on stdout; in a pipe a header and a line per row, cells parted by tabs. Cells may hold rich's markup."""
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
    """A table on stdout whose rows are printed as they come; in a pipe a line per row, its cells parted by tabs.

    widths: a column's least characters on a terminal, where its heading is narrower than the cells to come.
    """

    def __init__(self, columns: Sequence[str], widths: Mapping[str, int] | None = None) -> None:
        self.columns = tuple(columns)
        self._widths = [max(len(column), (widths or {}).get(column, 0)) for column in columns]
        self._begun = False

    def add(self, cells: Sequence[str]) -> None:
        """Print a row, and before the first one the heading. Cells may hold rich's markup."""
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
            sys.stdout.flush()  # a reader of the pipe sees each row when it is there


@contextmanager
def progress(description: str, total: int | None) -> Iterator[Progress]:
    """A progress bar on stderr with one task, number 0; nothing is drawn where stderr is no terminal."""
    left = (TextColumn("left"), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), *left)
    # On one terminal, lines go above the bar through the bar's own console. A file gets its lines as they are.
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
