"""The notebook runs on a CPU, and keeps what its cells print."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RUN: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "notebook.py"))
TEXT = RUN["NOTEBOOK"].read_text(encoding="utf-8")


def without_threads(text: str) -> str:
    """The threads of a race depend on the compiler of the emulator; its lines do not."""
    return re.sub(r"thread T\d+|cp\.async T\d+", "thread", text)


@pytest.mark.rotated(8)
def test_cells_print_what_the_notebook_keeps() -> None:
    assert without_threads(RUN["refreshed_notebook"](TEXT)) == without_threads(TEXT), "run: python docs/refresh.py"


def test_it_shows_a_mask_tiles_a_kernel_an_edit_and_a_race() -> None:
    printed = "".join(line for cell in json.loads(TEXT)["cells"] for o in cell.get("outputs", ()) for line in o["text"])
    for shown in ("█", "mask_mod(", "the same result: True", "ThreadSanitizer: data race", "the same bits: True"):
        assert shown in printed
    assert "within the bound: True" in printed and "/" not in printed.replace("//", "")


def test_a_cell_that_fails_is_reported() -> None:
    notebook = {"cells": [{"cell_type": "code", "source": ["print(1)\n", "1 / 0"], "outputs": []}]}
    with pytest.raises(SystemExit, match="ZeroDivisionError"):
        RUN["refreshed_notebook"](json.dumps(notebook))


def test_the_page_has_code_and_output() -> None:
    page = RUN["as_markdown"](TEXT)
    assert page.startswith("# ") and page.count("```python") == sum(
        cell["cell_type"] == "code" for cell in json.loads(TEXT)["cells"]
    )
