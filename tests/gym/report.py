"""A table of the suite: range or lists, remaining work, and what is proven of the tiles.

python tests/gym/report.py [LENGTH] [--tile ROWSxCOLUMNS]
"""

from __future__ import annotations

import argparse

from families import entries
from families.entry import Entry
from flashgen.analysis.intervals.evaluation import EMPTY, FULL
from flashgen.verify import Case, Shape, spec_of, verify
from gym_shapes import DTYPES, EMULATED_SHAPES, LARGE_LENGTH, LENGTH
from tile_proofs import by_intervals, mapped, transposed

HEADER = ("variant", "keys", "queries", "work", "EMPTY", "FULL", "EMPTY by intervals", "FULL by intervals", "lies")


def row(entry: Entry, shape: Shape, tile: tuple[int, int]) -> tuple[str, ...]:
    tiles, back, rough = mapped(entry, shape, tile), transposed(entry, shape, tile), by_intervals(entry, shape, tile)
    lies = tiles.lies + rough.lies + (back.lies if back else 0)
    shares = (tiles.share_left, tiles.found(EMPTY), tiles.found(FULL), rough.found(EMPTY), rough.found(FULL))
    return (entry.name, tiles.kind, back.kind if back else "lists", *(f"{share:.1%}" for share in shares), str(lies))


def proofs(length: int, tile: tuple[int, int]) -> list[tuple[str, ...]]:
    shape = Shape(length, length, 1, 2, 2)
    masked = [entry for entry in entries(length) if entry.mask is not None and "+" not in entry.name]
    print(f"{shape}, tiles of {tile[0]} x {tile[1]}; shares of the tiles that are EMPTY (FULL) and are called so")
    return [HEADER, *(row(entry, shape, tile) for entry in masked)]


def errors() -> list[tuple[str, ...]]:
    """Returns the largest fraction of its bound that a kernel's error reaches, over the shapes of the tests."""
    table = [("variant", *(f"{dtype} error / bound" for dtype in DTYPES), "LSE error")]
    for entry in entries(LENGTH):
        shares, of_lse = [], 0.0
        for dtype in DTYPES:
            spec = spec_of(entry.variant, 16, dtype)
            results = list(verify([Case(spec, shape, entry.captures) for shape in EMULATED_SHAPES], emulate=True))
            failed = [result.problem for result in results if result.verdict is None]
            verdicts = [result.verdict for result in results if result.verdict is not None]
            shares.append(str(failed[0]) if failed else f"{max(v.error / v.bound for v in verdicts):.2f}")
            of_lse = max([of_lse, *(v.lse_error or 0.0 for v in verdicts)])
        table.append((entry.name, *shares, f"{of_lse:.1e}"))
    return table


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("length", nargs="?", type=int, default=LARGE_LENGTH)
    arguments.add_argument("--tile", default="128x64")
    arguments.add_argument("--errors", action="store_true")
    given = arguments.parse_args()
    rows, columns = map(int, given.tile.split("x"))
    table = errors() if given.errors else proofs(given.length, (rows, columns))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
