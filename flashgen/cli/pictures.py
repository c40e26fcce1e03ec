"""What `flashgen show --what tiles` and `--what svg` draw: a spec's tile map, or the elements of one tile of it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from flashgen.cli.arrays import load_arrays
from flashgen.cli.console import note, print_code, print_json
from flashgen.cli.writing import writing
from flashgen.errors import ArgumentError

if TYPE_CHECKING:
    from flashgen.analysis.elements import TileElements
    from flashgen.analysis.tiles import TileMap
    from flashgen.language import AttentionSpec

SUFFIXES = (".svg", ".png")


@dataclass(frozen=True)
class Drawing:
    """A tile map, and one tile of it where that is asked for."""

    title: str
    tiles: TileMap
    zoomed: TileElements | None = None

    @property
    def shown(self) -> TileMap | TileElements:
        return self.tiles if self.zoomed is None else self.zoomed


def drawing_of(
    spec: AttentionSpec, tile: tuple[int, int], len_q: int, len_k: int, zoom: str | None, captures: Path | None
) -> Drawing:
    """The map of batch 0 and head 0 in tiles of (queries, keys), and the tile of `zoom`, "ROW,COLUMN"."""
    from flashgen.analysis.elements import tile_elements
    from flashgen.analysis.tiles import tile_map

    arrays = captures_for(spec, captures)
    tiles = tile_map(spec.mask.expression, tile, len_q, len_k, captures=arrays)
    if zoom is None:
        return Drawing(spec.mask.name, tiles)
    row, column = place_of(zoom)
    zoomed = tile_elements(spec.mask.expression, tiles, row, column, captures=arrays)
    return Drawing(spec.mask.name, tiles, zoomed)


def captures_for(spec: AttentionSpec, path: Path | None) -> Mapping[str, Any]:
    """What the mask captures, from the file; ArgumentError naming what is missing."""
    given = load_arrays(path, "--captures") if path else {}
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
    """An .svg or .png file, and the share of the work on stdout."""
    from flashgen.analysis.draw import summary, to_png, to_svg

    if path.suffix not in SUFFIXES:
        raise ArgumentError(f"--output {path} has the suffix {path.suffix!r}; {' and '.join(SUFFIXES)} are known")
    if path.suffix == ".png":
        content = to_png(drawing.shown, title=drawing.title)
    else:
        content = to_svg(drawing.shown, title=drawing.title).encode()
    with writing(path):
        path.write_bytes(content)
    typer.echo(summary(drawing.tiles))
    if drawing.zoomed is not None:
        typer.echo(f"{summary(drawing.zoomed)}: {drawing.zoomed.share:.1%} kept")
    note(f"{drawing.title} -> {path}")


def print_drawing(drawing: Drawing) -> None:
    """Characters, as wide as the terminal has them, and the share of the work."""
    from flashgen.analysis.draw import summary, to_text

    width = shutil.get_terminal_size().columns
    if drawing.zoomed is None:
        typer.echo(to_text(drawing.tiles, width))
    else:
        typer.echo(to_text(drawing.zoomed, width - 2))  # beside it stands its frame
        typer.echo(summary(drawing.tiles))


def print_svg(drawing: Drawing) -> None:
    from flashgen.analysis.draw import to_svg

    print_code(to_svg(drawing.shown, title=drawing.title), "xml")


def print_numbers(drawing: Drawing) -> None:
    """As JSON: the class of every tile, the share of the work, and the elements of the zoomed tile."""
    tiles, zoomed = drawing.tiles, drawing.zoomed
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
