"""Keys of calls with traced functions: the text of the functions and the other fields of a spec."""

from __future__ import annotations

from typing import Any, NamedTuple

from flashgen.errors import SpecError
from flashgen.language import operations as ops
from flashgen.language.trace import Traced, apply


class CallKey(NamedTuple):
    """A key, and the operands of its text.

    Attributes:
        key: JSON that `variants.Variant` reads.
        arrays: the distinct arrays that the text reads.
        numbers: the numbers that are placeholders in the text, in its order.
    """

    key: str
    arrays: list[Any]
    numbers: tuple[Any, ...]


def call_key(score: Traced | None, score_name: str, mask: Traced | None, mask_name: str, spec: str) -> CallKey:
    """Returns the key of traced functions. Raises SpecError for results of a wrong kind.

    score_name, mask_name: the names of the functions in kernels.
    spec: the other fields of the spec as JSON without brackets (`variants.spec_text`).
    """
    if mask is not None and mask.kind != "bool":
        raise SpecError(f"mask_mod must return a boolean, got {mask.kind}: compare it, e.g. return x != 0")
    if score is not None and score.kind == "bool":
        raise SpecError("score_mod must return a number, got bool: a condition belongs in the mask")
    if score is not None and score.kind == "int":
        score = apply(ops.ToFloat, score)
    held: tuple[Any, ...] = ()
    numbers: tuple[Any, ...] = ()
    texts = spec
    for traced, name in ((score, score_name), (mask, mask_name)):
        if traced is None:
            texts += ",null"
        else:
            texts += f',["{name}",{traced.text}]'
            held, numbers = held + traced.arrays, numbers + traced.numbers
    arrays, slots = distinct(held)
    return CallKey(f"[{texts},{slots}]", arrays, numbers)


def distinct(held: tuple[Any, ...]) -> tuple[list[Any], list[int]]:
    """Returns the distinct arrays, and for each array of `held` its position among them."""
    arrays: list[Any] = []
    slots: list[int] = []
    positions: dict[int, int] = {}
    for array in held:
        slot = positions.setdefault(id(array), len(arrays))
        if slot == len(arrays):
            arrays.append(array)
        slots.append(slot)
    return arrays, slots
