"""Prints measured rows as a table while they are measured, and saves them as JSON."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from flashgen.cli import bench_tables
from flashgen.cli.console import INTERRUPTED, Rows, note, print_json, progress
from flashgen.cli.writing import check_output, write_output
from flashgen.errors import LaunchError

WIDEST_NAME = 48  # maximum width in characters that is reserved for the first cell of a row on a terminal


def require_gpu() -> None:
    """Raises LaunchError if this machine has no GPU."""
    from flashgen.cli.machine import gpus

    if not gpus():
        raise LaunchError("there is no GPU here to measure on; `flashgen verify --emulate` runs kernels without one")


def report(
    measured: Iterator[Any],
    names: Sequence[str],
    columns: bench_tables.Columns,
    output: Path,
    json: bool,
    summary: Callable[[list[Any]], list[str]],
    force: bool = False,
) -> None:
    """Prints and saves each row as soon as it is measured, then prints a summary of all rows, also after Ctrl-C.

    Args:
        measured: yields the rows; a row has a method `to_dict`.
        names: the names of the rows in order, for the progress bar.
        columns: the columns of the printed table.
        output: the JSON file to write.
        json: print the JSON instead of the table.
        summary: returns the lines that summarise the rows.
        force: replace the file even if it was edited or flashgen did not write it.
    """
    check_output(output, force)
    from flashgen.bench import environment

    saved: dict[str, Any] = {"environment": environment(), "rows": [], "interrupted": False}
    rows: list[Any] = []
    shown = Rows(tuple(columns), {next(iter(columns)): min(WIDEST_NAME, max(map(len, names), default=0))})
    with progress(names[0] if names else "", len(names)) as bar:
        try:
            for row in measured:
                rows.append(row)
                saved["rows"].append(row.to_dict())
                if not json:
                    shown.add(bench_tables.cells(columns, row))
                save(saved | {"summary": summary(rows)}, output)  # an error in a later row loses no earlier row
                bar.update(bar.task_ids[0], advance=1, description=names[min(len(rows), len(names) - 1)])
        except KeyboardInterrupt:
            saved["interrupted"] = True
    saved["summary"] = summary(rows)
    if rows:
        save(saved, output)
    if json:
        print_json(saved)
    else:
        lines = [f"interrupted after {len(rows)} of {len(names)} rows"] if saved["interrupted"] else []
        lines += [*saved["summary"], f"saved to {output}"] if rows else []
        for line in lines:
            note(line)
    if saved["interrupted"]:
        raise typer.Exit(INTERRUPTED)


def save(measured: dict[str, Any], output: Path) -> None:
    """Writes JSON to a file atomically."""
    write_output(output, json_module.dumps(measured, indent=2) + "\n")
