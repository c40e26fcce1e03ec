"""Pictures of `flashgen show --what tiles` and `--what svg`: the tile map of a spec, or the elements of one tile."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from flashgen.cli.arrays import load_arrays
from flashgen.cli.console import note, print_code, print_json, stdout
from flashgen.cli.writing import write_output
from flashgen.errors import ArgumentError

if TYPE_CHECKING:
    from flashgen.analysis.tile_classes import TileMap
    from flashgen.analysis.tile_elements import TileElements
    from flashgen.language import AttentionSpec

WIDTH = 480  # pixels of a picture's longer side


@dataclass(frozen=True)
class Selection:
    """The sequence of the batch and the head to draw; None selects the first."""

    batch: int | None = None
    head: int | None = None

    @property
    def numbers(self) -> tuple[int, int]:
        return self.batch or 0, self.head or 0


@dataclass(frozen=True)
class Drawing:
    """A tile map, the sequence and head to draw, and the elements of one of its tiles if --zoom asks for them."""

    title: str
    tiles: TileMap
    selection: Selection = Selection()
    zoomed: TileElements | None = None

    @property
    def shown(self) -> TileMap | TileElements:
        return self.tiles if self.zoomed is None else self.zoomed


def drawing_of(
    spec: AttentionSpec,
    tile: tuple[int, int],
    len_q: int,
    len_k: int,
    zoom: str | None,
    captures: Path | None,
    selection: Selection = Selection(),
) -> Drawing:
    """Returns the map in tiles of (queries, keys), and the elements of the tile that `zoom` names as "ROW,COLUMN".

    The captured arrays determine the batch size and the number of heads. If they do not, the map has as many as
    `selection` needs.
    """
    from flashgen.analysis.captured_extents import captured_extent
    from flashgen.analysis.tile_classes import tile_map
    from flashgen.analysis.tile_elements import tile_elements
    from flashgen.language.operations import BATCH, HEAD

    arrays, mask = captures_for(spec, captures), spec.mask.expression
    number, head = selection.numbers
    batch = captured_extent(mask, BATCH, arrays) or number + 1
    heads = captured_extent(mask, HEAD, arrays) or head + 1
    tiles = tile_map(mask, tile, len_q, len_k, batch, heads, arrays)
    tiles.of(number, head)  # raises if the map has no such sequence or head
    if zoom is None:
        return Drawing(spec.mask.name, tiles, selection)
    row, column = parse_tile(zoom)
    zoomed = tile_elements(mask, tiles, row, column, number, head, arrays)
    return Drawing(spec.mask.name, tiles, selection, zoomed)


def captures_for(spec: AttentionSpec, path: Path | None) -> Mapping[str, Any]:
    """Returns the arrays that the mask captures. Arrays of the file replace those that its function closed over.

    Raises ArgumentError with the names of missing arrays.
    """
    given: Mapping[str, Any] = {name: array.on_host() for name, array in spec.bound.items()}
    given = {**given, **(load_arrays(path, "--captures") if path else {})}
    missing = [capture for capture in spec.mask.captures if capture.name not in given]
    if missing:
        wanted = ", ".join(f"{capture.name!r} ({capture.dtype}, ndim {capture.ndim})" for capture in missing)
        where = f"--captures {path} holds {', '.join(sorted(given)) or 'nothing'}" if path else "give --captures FILE"
        raise ArgumentError(f"the mask {spec.mask.name} captures {wanted}, which is missing: {where}")
    return {capture.name: given[capture.name] for capture in spec.mask.captures}


def parse_tile(zoom: str) -> tuple[int, int]:
    """Parses "ROW,COLUMN", the position of a tile."""
    parts = zoom.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise ArgumentError(
            f"--zoom {zoom!r} must be ROW,COLUMN: the number of a query tile and of a key tile, such as 3,2"
        )
    return int(parts[0]), int(parts[1])


def show_drawing(drawing: Drawing, as_svg: bool, path: Path | None, json: bool) -> None:
    """Writes the drawing to an SVG file if a path is given, else prints it as SVG, as JSON, or in characters."""
    if path is not None:
        write_drawing(drawing, path)
    elif as_svg:
        print_code(svg(drawing), "xml")
    else:
        (print_numbers if json else print_drawing)(drawing)


def write_drawing(drawing: Drawing, path: Path) -> None:
    """Writes an SVG file, and prints the share of the tiles that are visited."""
    from flashgen.analysis.drawing.tile_maps import summary

    write_output(path, svg(drawing))
    typer.echo(summary(drawing.tiles, *drawing.selection.numbers))
    if drawing.zoomed is not None:
        typer.echo(f"{summary(drawing.zoomed)}: {drawing.zoomed.share:.1%} kept")
    note(f"{drawing.title} -> {path}")


def print_drawing(drawing: Drawing) -> None:
    """Prints the drawing in characters at the width of the terminal, and the share of the tiles that are visited."""
    from flashgen.analysis.drawing.tile_maps import summary, to_text

    width = shutil.get_terminal_size().columns
    if drawing.zoomed is None:
        coloured(to_text(drawing.tiles, width, *drawing.selection.numbers))
    else:
        typer.echo(to_text(drawing.zoomed, width - 2))  # the frame takes 2
        typer.echo(summary(drawing.tiles, *drawing.selection.numbers))


def coloured(text: str) -> None:
    """Prints a tile map; on a terminal it has the colours of the SVG."""
    if not sys.stdout.isatty():
        typer.echo(text)
        return
    from rich.text import Text

    from flashgen.analysis.drawing import palette

    shown = Text(text)
    for glyph, colour in (("█", palette.FULL), ("▒", palette.PARTIAL), ("·", palette.RULE)):
        shown.highlight_regex(f"{glyph}+", style=colour)
    stdout().print(shown)


def svg(drawing: Drawing) -> str:
    from flashgen.analysis.drawing.tile_maps import to_svg

    return to_svg(drawing.shown, drawing.title, WIDTH, *drawing.selection.numbers)


def print_numbers(drawing: Drawing) -> None:
    """Prints JSON: the class of every tile, the share of tiles that are visited, and the elements of the zoomed tile.

    It describes the chosen sequence and head, or all of them if none was chosen.
    """
    tiles, zoomed = drawing.tiles.at(drawing.selection.batch, drawing.selection.head), drawing.zoomed
    numbers: dict[str, Any] = {
        "tile": list(tiles.tile),
        "len_q": tiles.len_q,
        "len_k": tiles.len_k,
        "share": tiles.share,
        "classes": tiles.classes.tolist(),
    }
    if zoomed is not None:
        first = {"first_q": zoomed.first_q, "first_k": zoomed.first_k}
        numbers["zoom"] = {"row": zoomed.row, "column": zoomed.column} | first | {"kept": zoomed.kept.tolist()}
    print_json(numbers)
