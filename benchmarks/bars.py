"""Draws bar charts of saved measurements with matplotlib: `python -m benchmarks plot`."""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from flashgen.analysis.drawing import palette
from flashgen.errors import ArgumentError, LaunchError
from flashgen.remedies import install

Rows = Sequence[Mapping[str, Any]]
FORMATS = ("svg", "png")
_FIRST = ("flashgen", "deterministic")
_COLOURS = (palette.FULL, palette.PARTIAL, palette.COPY, palette.STORE, "#b45f5f", "#7a8794", "#5ba3b0", "#3d4450")
_MOST_FLAT = 5  # maximum number of bars in a group with horizontal numbers; more have vertical numbers
_WIDEST_PANEL = 12  # maximum number of groups of bars in a row of the picture
_LEAST_WIDTH = 6  # inches
_KEY_WIDTH = 0.95  # inches per entry of the legend


@dataclass(frozen=True)
class Panel:
    """A bar chart: groups from left to right, and for each implementation a value per group, or None."""

    title: str
    unit: str
    groups: Sequence[str]
    bars: Mapping[str, Sequence[float | None]]


def panels(saved: Mapping[str, Any]) -> list[Panel]:
    """Returns the panels of saved JSON. Raises ArgumentError if it does not hold rows of a known benchmark."""
    rows = saved.get("rows") if isinstance(saved, Mapping) else None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        raise ArgumentError("it holds no rows; give JSON that `flashgen bench` or `python -m benchmarks` has saved")
    kind = next((kind for kind in _KINDS if kind <= rows[0].keys()), None)
    if kind is None:
        raise ArgumentError(f"its rows hold {', '.join(rows[0])}, which no `flashgen bench` with a chart saves")
    try:
        return _KINDS[kind](rows)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArgumentError(f"a row is not as `flashgen bench` saves it: {error!r}") from None


def draw(saved: Mapping[str, Any], form: str) -> bytes:
    """Returns a picture of the panels as "svg" or "png". Raises LaunchError if matplotlib is not installed."""
    found = panels(saved)
    if importlib.util.find_spec("matplotlib") is None:
        raise LaunchError(f"bars are drawn by matplotlib, which is not installed: {install('plot')}")
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    width = min(max(len(panel.groups) for panel in found), _WIDEST_PANEL)
    columns = 2 if len(found) > 3 and width <= _WIDEST_PANEL // 2 else 1
    lines = -(-len(found) // columns)
    with matplotlib.rc_context({"svg.hashsalt": "flashgen", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(max(columns * (3 + 0.75 * width), _LEAST_WIDTH), 3.1 * lines), layout="constrained")
        places = figure.subplots(lines, columns, squeeze=False).ravel()
        names = _ordered(name for panel in found for name in panel.bars)
        colours = dict(zip(names, cycle(_COLOURS), strict=False))
        for axes, panel in zip(places, found, strict=False):
            _draw_panel(axes, panel, colours)
        keys = [Patch(color=colour, label=name) for name, colour in colours.items()]
        rows = -(-len(keys) // max(1, int(figure.get_figwidth() / _KEY_WIDTH)))
        ncols = -(-len(keys) // rows)
        figure.legend(handles=keys, ncols=ncols, fontsize=7, frameon=False, loc="outside lower center")
        for axes in places[len(found) :]:
            axes.set_axis_off()
        figure.suptitle(str((saved.get("environment") or {}).get("gpu", "")))
        buffer = io.BytesIO()
        figure.savefig(buffer, format=form, dpi=150, metadata={"Date": None} if form == "svg" else None)
    return buffer.getvalue()


def number(value: float | None) -> str:
    """Formats the number above a bar."""
    return "" if value is None else f"{value:.0f}" if value >= 10 else f"{value:.3g}"


def _draw_panel(axes: Any, panel: Panel, colours: Mapping[str, str]) -> None:
    thick = 0.8 / max(len(panel.bars), 1)
    for place, (name, values) in enumerate(panel.bars.items()):
        at = [group + (place - (len(panel.bars) - 1) / 2) * thick for group in range(len(values))]
        drawn = axes.bar(at, [value or 0 for value in values], thick, color=colours[name])
        upright = 90 if len(panel.bars) > _MOST_FLAT else 0
        axes.bar_label(drawn, [number(value) for value in values], fontsize=6, padding=1, rotation=upright)
    axes.set_title(panel.title, loc="left", fontsize=10)
    axes.set_xticks(range(len(panel.groups)), panel.groups)
    axes.set_ylabel(panel.unit)
    axes.spines[["top", "right"]].set_visible(False)


def _speed_panels(rows: Rows) -> list[Panel]:
    """Returns a panel per spec and pass, with a group per length, or per length and number of key heads."""
    found: list[Panel] = []
    for (spec, timed), mine in _grouped(rows, "spec", "timed"):
        groups = [" ".join([str(row["length"]), *([row["name"]] if "heads_kv" in row else [])]) for row in mine]
        bars = _by_implementation(mine, "tflops")
        found.append(Panel(f"{_without_hash(spec)}, {timed}, by tokens of a sequence", "TFLOP/s", groups, bars))
    return found


def _grouped(rows: Rows, *columns: str) -> Iterator[tuple[tuple[Any, ...], Rows]]:
    """Yields each distinct tuple of values in these columns, with the rows that have these values."""
    held = [tuple(row[column] for column in columns) for row in rows]
    for values in dict.fromkeys(held):
        yield values, [row for row, its in zip(rows, held, strict=True) if its == values]


def _without_hash(spec: str) -> str:
    """Returns the name of a spec without its hash."""
    return re.sub(r"-[0-9a-f]{8}$", "", spec)


def _varlen_panels(rows: Rows) -> list[Panel]:
    found = []
    for (spec, timed), mine in _grouped(rows, "spec", "timed"):
        bars = _by_implementation(mine, "tflops")
        groups = [f"{row['documents']} in\n{row['tokens']}" for row in mine]
        found.append(Panel(f"{_without_hash(spec)}, {timed}, documents in tokens", "TFLOP/s", groups, bars))
    return found


def _decode_panels(rows: Rows) -> list[Panel]:
    found = []
    for (spec,), mine in _grouped(rows, "spec"):
        groups = ["\n".join(str(row["size"]).split(", ")) for row in mine]
        bars = _by_implementation(mine, "terabytes")
        found.append(Panel(f"{_without_hash(spec)}, by batch, heads, keys", "TB/s of K and V", groups, bars))
    return found


def _context_panels(rows: Rows) -> list[Panel]:
    found = []
    for (ranks, timed), mine in _grouped(rows, "ranks", "timed"):
        groups = [str(row["name"]).replace(" ", "\n", 1) for row in mine]
        title = f"{ranks} GPUs, forward{' and backward' if timed == 'both' else ''}, by tokens of a GPU"
        found.append(Panel(title, "TFLOP/s of a GPU", groups, _by_implementation(mine, "tflops")))
    return found


def _by_implementation(rows: Rows, figure: str) -> dict[str, list[float | None]]:
    """Returns a figure of each row by implementation."""
    names = _ordered(name for row in rows for name in row[figure])
    return {name: [row[figure].get(name) for row in rows] for name in names}


def _variant_panels(rows: Rows) -> list[Panel]:
    columns = {"flashgen": "milliseconds", "deterministic": "deterministic_ms", "Flex": "flex_ms"}
    bars = {name: [row[column] for row in rows] for name, column in columns.items()}
    shown = {name: values for name, values in bars.items() if any(value is not None for value in values)}
    groups = [str(row["name"]).replace(", ", ",\n") for row in rows]
    starts = range(0, len(rows), _WIDEST_PANEL // 2)
    return [
        Panel(
            f"Variants, {rows[0]['timed']}",
            "ms",
            groups[start : start + _WIDEST_PANEL // 2],
            {name: values[start : start + _WIDEST_PANEL // 2] for name, values in shown.items()},
        )
        for start in starts
    ]


def _paper_panels(rows: Rows) -> list[Panel]:
    passes = ("forward_ms", "backward_ms", "both_ms")
    bars = {row["name"]: [row[each] for each in passes] for row in rows}
    return [Panel("The FlashAttention paper's problem", "ms", [each.removesuffix("_ms") for each in passes], bars)]


def _training_panels(rows: Rows) -> list[Panel]:
    found: list[Panel] = []
    for (batch, length), mine in _grouped(rows, "batch", "length"):
        modes = list(dict.fromkeys(row["mode"] for row in mine))
        names = _ordered(row["name"] for row in mine)
        bars: dict[str, list[float | None]] = {name: [None] * len(modes) for name in names}
        for row in mine:
            bars[row["name"]][modes.index(row["mode"])] = row["ms"]
        found.append(Panel(f"GPT-2 124M, {batch} × {length} tokens", "ms a step", modes, bars))
    return found


def _ordered(names: Any) -> list[str]:
    """Returns distinct names, those of flashgen first."""
    found = list(dict.fromkeys(names))
    return [name for name in _FIRST if name in found] + [name for name in found if name not in _FIRST]


# Columns that identify a kind of rows, and the function that makes its panels.
_KINDS = {
    frozenset({"spec", "timed", "length", "tflops"}): _speed_panels,
    frozenset({"spec", "timed", "documents", "tokens", "tflops"}): _varlen_panels,
    frozenset({"spec", "size", "terabytes"}): _decode_panels,
    frozenset({"ranks", "timed", "name", "tflops"}): _context_panels,
    frozenset({"name", "timed", "flex_ms", "milliseconds"}): _variant_panels,
    frozenset({"name", "forward_ms", "backward_ms", "both_ms"}): _paper_panels,
    frozenset({"name", "mode", "batch", "length", "ms"}): _training_panels,
}
