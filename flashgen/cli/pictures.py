"""What `flashgen show --what tiles` and `--what svg` draw: a spec's tile map, or the elements of one tile of it."""

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
from flashgen.cli.writing import writing
from flashgen.errors import ArgumentError
from flashgen.files import write_file

if TYPE_CHECKING:
    from flashgen.analysis.tile_classes import TileMap
    from flashgen.analysis.tile_elements import TileElements
    from flashgen.language import AttentionSpec

SUFFIXES = (".svg", ".png")
WIDTH = 480  # pixels of a picture's longer side


@dataclass(frozen=True)
class Place:
    """Which sequence of the batch, and which head; None is the first."""

    batch: int | None = None
    head: int | None = None

    @property
    def numbers(self) -> tuple[int, int]:
        return self.batch or 0, self.head or 0


@dataclass(frozen=True)
class Drawing:
    """A tile map, the sequence and head to draw, and one tile of these if asked for."""

    title: str
    tiles: TileMap
    place: Place = Place()
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
    place: Place = Place(),
) -> Drawing:
    """The map in tiles of (queries, keys), and the tile that `zoom` names, "ROW,COLUMN".

    The captures give its batch and heads; where they do not, there are as many as `place` needs.
    """
    from flashgen.analysis.captured_extents import captured_extent
    from flashgen.analysis.tile_classes import tile_map
    from flashgen.analysis.tile_elements import tile_elements
    from flashgen.language.operations import BATCH, HEAD

    arrays, mask = captures_for(spec, captures), spec.mask.expression
    number, head = place.numbers
    batch = captured_extent(mask, BATCH, arrays) or number + 1
    heads = captured_extent(mask, HEAD, arrays) or head + 1
    tiles = tile_map(mask, tile, len_q, len_k, batch, heads, arrays)
    tiles.of(number, head)  # raises where the map has no such sequence or head
    if zoom is None:
        return Drawing(spec.mask.name, tiles, place)
    row, column = place_of(zoom)
    zoomed = tile_elements(mask, tiles, row, column, number, head, arrays)
    return Drawing(spec.mask.name, tiles, place, zoomed)


def captures_for(spec: AttentionSpec, path: Path | None) -> Mapping[str, Any]:
    """The mask's captures: arrays that its function closed over, and those of the file, which win.

    Raises ArgumentError, naming what is missing.
    """
    given: Mapping[str, Any] = {name: array.on_host() for name, array in spec.bound.items()}
    given = {**given, **(load_arrays(path, "--captures") if path else {})}
    missing = [capture for capture in spec.mask.captures if capture.name not in given]
    if missing:
        wanted = ", ".join(f"{capture.name!r} ({capture.dtype}, ndim {capture.ndim})" for capture in missing)
        where = f"--captures {path} holds {', '.join(sorted(given)) or 'nothing'}" if path else "give --captures FILE"
        raise ArgumentError(f"the mask {spec.mask.name} captures {wanted}, which is missing: {where}")
    return {capture.name: given[capture.name] for capture in spec.mask.captures}


def place_of(zoom: str) -> tuple[int, int]:
    """The row and column of a tile from "ROW,COLUMN"."""
    parts = zoom.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise ArgumentError(f"--zoom {zoom!r} must be ROW,COLUMN: a tile of queries and one of keys, such as 3,2")
    return int(parts[0]), int(parts[1])


def write_drawing(drawing: Drawing, path: Path) -> None:
    """Writes an .svg or .png file, and prints the share of the work."""
    from flashgen.analysis.drawing.tile_maps import summary, to_png

    if path.suffix not in SUFFIXES:
        raise ArgumentError(f"--output {path} has the suffix {path.suffix!r}; {' and '.join(SUFFIXES)} are known")
    if path.suffix == ".png":
        content = to_png(drawing.shown, drawing.title, WIDTH, *drawing.place.numbers)
    else:
        content = svg(drawing).encode()
    with writing(path):
        write_file(path, content)
    typer.echo(summary(drawing.tiles, *drawing.place.numbers))
    if drawing.zoomed is not None:
        typer.echo(f"{summary(drawing.zoomed)}: {drawing.zoomed.share:.1%} kept")
    note(f"{drawing.title} -> {path}")


def print_drawing(drawing: Drawing) -> None:
    """Prints characters, as many as the terminal is wide, and the share of the work."""
    from flashgen.analysis.drawing.tile_maps import summary, to_text

    width = shutil.get_terminal_size().columns
    if drawing.zoomed is None:
        coloured(to_text(drawing.tiles, width, *drawing.place.numbers))
    else:
        typer.echo(to_text(drawing.zoomed, width - 2))  # the frame takes 2
        typer.echo(summary(drawing.tiles, *drawing.place.numbers))


def coloured(text: str) -> None:
    """Prints a tile map, on a terminal in the colours of its SVG."""
    if not sys.stdout.isatty():
        typer.echo(text)
        return
    from rich.text import Text

    from flashgen.analysis.drawing import palette

    shown = Text(text)
    for glyph, colour in (("█", palette.FULL), ("▒", palette.PARTIAL), ("·", palette.RULE)):
        shown.highlight_regex(f"{glyph}+", style=colour)
    stdout().print(shown)


def print_svg(drawing: Drawing) -> None:
    print_code(svg(drawing), "xml")


def svg(drawing: Drawing) -> str:
    from flashgen.analysis.drawing.tile_maps import to_svg

    return to_svg(drawing.shown, drawing.title, WIDTH, *drawing.place.numbers)


def print_numbers(drawing: Drawing) -> None:
    """Prints JSON: the class of every tile, the share of the work, and the elements of the zoomed tile.

    It is about the chosen place, or about every sequence and head where none was chosen.
    """
    tiles, zoomed = drawing.tiles.at(drawing.place.batch, drawing.place.head), drawing.zoomed
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
