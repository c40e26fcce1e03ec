"""A table of the suite: range or lists, the work that is left, and what is proven of the tiles.

python tests/gym/report.py [LENGTH] [--tile ROWSxCOLUMNS]
"""

from __future__ import annotations

import argparse

from families import entries
from families.entry import Entry
from tile_proofs import by_intervals, mapped, transposed

from flashgen.analysis.intervals import EMPTY, FULL
from flashgen.verify import Shape

HEADER = ("variant", "keys", "queries", "work", "EMPTY", "FULL", "EMPTY by intervals", "FULL by intervals", "lies")


def row(entry: Entry, shape: Shape, tile: tuple[int, int]) -> tuple[str, ...]:
    tiles, back, rough = mapped(entry, shape, tile), transposed(entry, shape, tile), by_intervals(entry, shape, tile)
    lies = tiles.lies + rough.lies + (back.lies if back else 0)
    shares = (tiles.share_left, tiles.found(EMPTY), tiles.found(FULL), rough.found(EMPTY), rough.found(FULL))
    return (entry.name, tiles.kind, back.kind if back else "lists", *(f"{share:.1%}" for share in shares), str(lies))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("length", nargs="?", type=int, default=1999)
    arguments.add_argument("--tile", default="128x64")
    given = arguments.parse_args()
    rows, columns = map(int, given.tile.split("x"))
    shape = Shape(given.length, given.length, 1, 2, 2)
    masked = [entry for entry in entries(given.length) if entry.mask is not None and "+" not in entry.name]
    table = [HEADER, *(row(entry, shape, (rows, columns)) for entry in masked)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print(f"{shape}, tiles of {rows} x {columns}; shares of the tiles that are EMPTY (FULL) and are called so")
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
