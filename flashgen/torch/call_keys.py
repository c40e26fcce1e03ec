"""Keys of calls with traced functions: the text of the functions and the other fields of a spec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashgen.errors import SpecError
from flashgen.language import operations as ops
from flashgen.language.trace import Traced, apply

ABSENT = Traced("null", "bool")
"""The result of a function that a call does not have."""


def call_key(score: Traced, score_name: str, mask: Traced, mask_name: str, slots: Sequence[int], spec: str) -> str:
    """Returns the key of traced functions: JSON that `variants.Variant` reads.

    Args:
        score, mask: the results of the functions, or `ABSENT`.
        score_name, mask_name: the names of the functions in kernels.
        slots: for each array that the score and then the mask read, its position among the distinct arrays.
        spec: the other fields of the spec as JSON without brackets (`variants.spec_text`).

    Raises:
        SpecError: a result is of the wrong kind.
    """
    if mask is not ABSENT and mask.kind != "bool":
        raise SpecError(f"mask_mod must return a boolean, got {mask.kind}: compare it, e.g. return x != 0")
    if score is not ABSENT and score.kind != "float":
        if score.kind == "bool":
            raise SpecError("score_mod must return a number, got bool: a condition belongs in the mask")
        score = apply(ops.ToFloat, score)
    named = [
        "null" if traced is ABSENT else f'["{name}",{traced.text}]'
        for traced, name in ((score, score_name), (mask, mask_name))
    ]
    return f"[{spec},{named[0]},{named[1]},{[*slots]}]"


def distinct(held: Sequence[Any]) -> tuple[list[Any], tuple[int, ...]]:
    """Returns the distinct arrays, and for each array of `held` its position among them."""
    positions: dict[int, int] = {}
    slots = tuple([positions.setdefault(id(array), len(positions)) for array in held])
    return [*dict(zip(slots, held, strict=True)).values()], slots
