"""Draws the gallery: the cells of examples/gallery.py as docs/gallery.md, with tile maps in docs/gallery/.

`docs/refresh.py` writes the page and the tile maps, and a test compares them. The kernels are rendered when the site is
built (hooks.py).
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import flashgen as fg
from flashgen.analysis.drawing.tile_maps import to_svg
from flashgen.analysis.tile_classes import TileMap, tile_map
from flashgen.codegen.dispatch import render_forward
from flashgen.codegen.targets import TARGETS

DOCS = Path(__file__).parent
ROOT = DOCS.parent
SOURCE = ROOT / "examples" / "gallery.py"
TABLES = runpy.run_path(str(DOCS / "measured_tables.py"))
BEGIN, END = "<!-- gallery -->", "<!-- end of gallery -->"
LENGTH = 2048
SIZE = 200  # pixels
TARGET_OF = {"documents": "sm_90a"}
"""The target of a variant's kernel, if it is not sm_80."""
MEASURED = {
    "causal": "causal",
    "window": "window 1024",
    "prefix": "prefix 4096",
    "documents": "16 documents",
    "neighbourhood": "neighbourhood 13x13",
    "alibi": "alibi causal",
    "softcap": "softcap 20 causal",
    "relative": "relative table",
}
"""The row of docs/measured/variants.json that is nearest to a variant."""


@dataclass(frozen=True)
class Variant:
    """A cell of examples/gallery.py: its title, prose and code, and the spec that it declares last, with its name."""

    title: str
    prose: str
    code: str
    name: str
    spec: fg.AttentionSpec


@cache
def variants() -> tuple[Variant, ...]:
    """Returns the variants in the order of the file."""
    declared = runpy.run_path(str(SOURCE))
    _, *cells = re.split(r"^# %% ", SOURCE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return tuple(_variant(cell, declared) for cell in cells)


def _variant(cell: str, declared: dict[str, Any]) -> Variant:
    title, _, rest = cell.partition("\n")
    lines = rest.strip().splitlines()
    prose = [line for line in lines if line.startswith("# ")]
    code = "\n".join(lines[len(prose) :]).strip()
    name = re.findall(r"^(\w+) = fg\.AttentionSpec\(", code, flags=re.MULTILINE)[-1]
    return Variant(title, " ".join(line[2:] for line in prose), code, name, declared[name])


def captures_of(name: str, length: int) -> dict[str, np.ndarray]:
    """Returns the captures of a variant's mask for a sequence of this length."""
    position = np.arange(length)
    if name == "documents":
        ends = np.array([0.09, 0.34, 0.41, 0.69, 0.83]) * length
        return {"ids": np.searchsorted(ends, position, side="right").astype(np.int32)}
    if name == "padding":
        return {"lengths": np.array([length * 5 // 8], np.int32)}
    if name == "text_and_pictures":
        within = position % (length // 2)
        picture = (within >= length // 8) & (within < length * 3 // 8)
        return {"picture": (picture * (1 + position // (length // 2))).astype(np.int32)}
    if name == "selected":
        blocks = -(-length // 64)
        row, column = np.mgrid[:blocks, :blocks]
        return {"layout": (abs(row - column) <= 1) | (column == 0) | ((row * 7 + column * 5) % 11 == 0)}
    if name == "tree":
        tokens = lengths_of(name, length)[0]
        return {"bits": fg.tree_bits((np.arange(tokens) - 1) // 2)[None]}  # a binary tree; its root is token 0
    return {}


def lengths_of(name: str, length: int) -> tuple[int, int]:
    """Returns the numbers of queries and keys. The queries of a drafted tree are an eighth of the keys."""
    return (length // 8 if name == "tree" else length), length


def _kernel(variant: Variant) -> Any:
    return render_forward(variant.spec, TARGETS[TARGET_OF.get(variant.name, "sm_80")])


@cache
def tiles_of(variant: Variant) -> TileMap:
    """Returns the tile map of a variant, in the tiles of its kernel."""
    plan = _kernel(variant).plan
    captures = captures_of(variant.name, LENGTH)
    expression = variant.spec.mask.expression
    return tile_map(expression, (plan.tile_q, plan.tile_k), *lengths_of(variant.name, LENGTH), captures=captures)


def files() -> Iterator[tuple[Path, str]]:
    """Yields the file of each variant's tile map, and its content."""
    for variant in variants():
        yield DOCS / "gallery" / f"{variant.name}.svg", to_svg(tiles_of(variant), variant.title, SIZE)


def kernels() -> dict[str, str]:
    """Returns the sources of the variants' kernels by file name."""
    rendered = map(_kernel, variants())
    return {f"{kernel.name}.cu": kernel.source for kernel in rendered}


@cache
def measured() -> dict[str, tuple[str, str]]:
    """Returns (milliseconds, those of FlexAttention) by the names of measured variants."""
    rows = TABLES["Files"].read().rows("variants")
    shown = TABLES["milliseconds"]
    return {row["name"]: (shown(row["milliseconds"]), shown(row["flex_ms"])) for row in rows}


def page() -> str:
    """Returns a table of all variants, and a section for each."""
    table = ["| variant | tiles visited | ms | FlexAttention ms |", "|---|---|---|---|"]
    for variant in variants():
        times = measured().get(MEASURED.get(variant.name, ""), ("", ""))
        anchor = re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", variant.title.lower()))
        table.append(f"| [{variant.title}](#{anchor}) | {tiles_of(variant).share:.1%} | {' | '.join(times)} |")
    return "\n\n".join(["\n".join(table), *map(_section, variants())])


def _section(variant: Variant) -> str:
    share = f"{tiles_of(variant).share:.1%}"
    rows, columns = tiles_of(variant).tile
    facts = f"{share} of the tiles of {rows} × {columns} are visited. Kernel: `{_kernel(variant).name}.cu`."
    if MEASURED.get(variant.name) in measured():
        facts += f" Measured as “{MEASURED[variant.name]}”: {measured()[MEASURED[variant.name]][0]} ms."
    picture = f"![Tile map of {variant.title.lower()}: {share} of the tiles are visited](gallery/{variant.name}.svg)"
    return f"## {variant.title}\n\n{variant.prose}\n\n```python\n{variant.code}\n```\n\n{picture}\n\n{facts}"
