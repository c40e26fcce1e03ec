"""Runs the cells of examples/first_kernel.ipynb, and shows the notebook as a page of the site.

The notebook keeps the text that its cells print. `docs/refresh.py` writes it, and a test compares it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "first_kernel.ipynb"
_END = "\0"  # printed after each cell


def refreshed_notebook(text: str) -> str:
    """Returns the notebook with what its cells print today. Raises SystemExit if a cell fails."""
    notebook = json.loads(text)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, output) in enumerate(zip(cells, _printed(cells), strict=True), start=1):
        lines = output.splitlines(keepends=True)
        cell["execution_count"] = number
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _printed(cells: list[dict[str, Any]]) -> list[str]:
    """Returns what each cell prints if all run in order, in one process and an empty folder."""
    program = "".join(f"{''.join(cell['source'])}\nprint({_END!r}, end='')\n" for cell in cells)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise SystemExit(f"{NOTEBOOK.name}: {done.stderr}")
    return done.stdout.split(_END)[:-1]


def as_markdown(text: str) -> str:
    """Returns the notebook as a page: text, code, and below it what it prints."""
    parts: list[str] = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts.extend(f"```text\n{''.join(output['text'])}```" for output in cell.get("outputs", ()))
    return "\n\n".join(parts) + "\n"
