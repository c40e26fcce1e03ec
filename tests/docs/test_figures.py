"""The cost of deterministic gradients is stated once, and agrees with the measurements."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PERFORMANCE = (DOCS / "performance.md").read_text(encoding="utf-8")
OTHERS = [page for page in (*DOCS.glob("*.md"), ROOT / "README.md") if page.name != "performance.md"]
WITH_LISTS = ("16 documents, causal", "13 × 13 neighbourhood")


def table(heading: str) -> list[dict[str, str]]:
    """Returns the rows of the table whose heading begins so, by column."""
    lines = PERFORMANCE[PERFORMANCE.index(f"| {heading}") :].partition("\n\n")[0].splitlines()
    columns, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(columns, row, strict=True)) for row in rows]


def measured() -> dict[str, list[float]]:
    """Returns the times of the deterministic mode relative to the default's, by the first two cells of the table."""
    ratios: dict[str, list[float]] = {"sm_90a closed": [], "sm_90a lists": [], "mma": []}
    for row in json.loads((DOCS / "measured" / "backward.json").read_text(encoding="utf-8"))["rows"]:
        times = row["milliseconds"]
        ratios["sm_90a closed"].append(times["deterministic"] / times["flashgen"])
    for row in table("variant | ms | Flex ms | times Flex | deterministic ms"):
        kind = "sm_90a lists" if row["variant"] in WITH_LISTS else "sm_90a closed"
        ratios[kind].append(float(row["deterministic ms"]) / float(row["ms"]))
    for row in table("variant | backward ms"):
        ratios["mma"].append(float(row["deterministic ms"]) / float(row["backward ms"]))
    for row in table("head dim | flashgen | deterministic"):
        speeds = [[float(speed) for speed in row[column].split(" / ")] for column in ("flashgen", "deterministic")]
        ratios["mma"] += [default / other for default, other in zip(*speeds, strict=True)]
    return ratios


def test_the_stated_range_is_that_of_the_tables() -> None:
    stated = [row["time of the default"] for row in table("kernels | masks | time of the default")]
    assert stated == [f"{min(each):.2f} to {max(each):.2f}" for each in measured().values()]


@pytest.mark.parametrize("page", OTHERS, ids=lambda page: page.name)
def test_other_pages_link_to_it(page: Path) -> None:
    for sentence in re.split(r"(?<=[.:;])\s", page.read_text(encoding="utf-8")):
        if "deterministic" in sentence:
            assert not re.search(r"\b[01]\.\d", sentence), f"state the cost in performance.md alone: {sentence}"
