"""Every variant of the suite by name, for the command line: `flashgen verify tests/gym/suite.py:flamingo`.

A combination is named with _with_, document_causal_with_alibi; `python tests/gym/report.py` lists all.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from families import entries
from gym_shapes import EMULATED_SHAPES, LENGTH

LENGTHS = tuple((shape.len_q, shape.len_k) for shape in EMULATED_SHAPES)

globals().update(
    {entry.name.replace("+", "_with_"): replace(entry.variant, lengths=LENGTHS) for entry in entries(LENGTH)}
)
