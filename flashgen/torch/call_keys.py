"""Keys of calls with traced functions: the text of the functions and the other fields of a spec."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

from flashgen.errors import SpecError
from flashgen.language import operations as ops
from flashgen.language.trace import Traced, apply

CallKey: TypeAlias = tuple[str, list[Any], tuple[Any, ...]]
"""JSON that `variants.Variant` reads, the distinct arrays that it reads, and the numbers that it leaves open."""


NamedTrace: TypeAlias = tuple[Traced, str]
"""The result of a traced function, and the name of the function in kernels."""


def call_key(score: NamedTrace | None, mask: NamedTrace | None, spec: str) -> CallKey:
    """Returns the key of traced functions, and the operands of its text. Raises SpecError for results of a wrong kind.

    spec: the other fields of the spec as JSON without brackets (`variants.spec_text`).
    """
    if mask is not None and mask[0].kind != "bool":
        raise SpecError(f"mask_mod must return a boolean, got {mask[0].kind}: compare it, e.g. return x != 0")
    if score is not None and score[0].kind != "float":
        score = (_float_of(score[0]), score[1])
    arrays: tuple[Any, ...] = ()
    numbers: tuple[Any, ...] = ()
    texts = spec
    for function in (score, mask):
        if function is None:
            texts += ",null"
        else:
            traced, name = function
            texts += f',["{name}",{traced.text}]'
            arrays, numbers = arrays + traced.arrays, numbers + traced.numbers
    found, slots = distinct(arrays)
    return f"[{texts},{_list_text(slots)}]", found, numbers


def _float_of(score: Traced) -> Traced:
    if score.kind == "bool":
        raise SpecError("score_mod must return a number, got bool: a condition belongs in the mask")
    return apply(ops.ToFloat, score)


@lru_cache(1024)
def _list_text(numbers: tuple[int, ...]) -> str:
    """Returns numbers as JSON. Looking them up takes half the time."""
    return str([*numbers])


def distinct(held: tuple[Any, ...]) -> tuple[list[Any], tuple[int, ...]]:
    """Returns the distinct arrays, and for each array of `held` its position among them."""
    arrays: list[Any] = []
    slots: list[int] = []
    positions: dict[int, int] = {}
    for array in held:
        slot = positions.setdefault(id(array), len(arrays))
        if slot == len(arrays):
            arrays.append(array)
        slots.append(slot)
    return arrays, tuple(slots)
