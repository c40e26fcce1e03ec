"""The values of captures in a call: sizes that fit how they are read, and contents that a named way of filling makes.

A `Fill` is a few words and numbers instead of an array, so that a printed case stays short.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashgen.dtypes import numpy_dtype
from flashgen.verify.problems import Shape
from random_variants.constants import FINITE, INT32_MAX
from random_variants.definitions import walk_defined
from random_variants.grammar import BIAS, BLOCKS, CAP, DISTANCE, IDS, POSITIVE, Grammar, Source
from random_variants.terms import INDICES, Declarations, Declared, Term

Array = np.ndarray[Any, Any]

# Ways to fill an array, by the kind of its numbers; "beyond", for int64, holds numbers that int32 cannot.
WAYS = {
    "int": ("few", "steps", "positions", "ends", "mixed"),
    "float": ("small", "normal", "positions", "ends"),
    "bool": ("always", "often", "rarely", "never"),
}
VIEWS = ("plain", "plain", "plain", "spread", "reversed")
_MAX_ELEMENTS = 2**17
_BEYOND = (0, 1, 1 + 2**32, 2**31, -(2**31) - 1, 2**33 + 5, 5, 2**63 - 1, -(2**63), 2**62)


@dataclass(frozen=True)
class Fill:
    """An array: its shape, how it is filled and from which seed, and the kind of view that the call gets."""

    way: str
    shape: tuple[int, ...]
    seed: int = 0
    view: str = "plain"

    def array(self, declared: Declared) -> Array:
        """The array in the dtype declared: with gaps between the elements ("spread"), or stored backwards."""
        rng = np.random.default_rng(self.seed)
        array = _FILLERS[declared.kind](self.way, self.shape, rng, declared.dtype)
        if self.view == "spread":
            return np.repeat(array, 2, axis=-1)[..., ::2]
        return np.flip(np.flip(array).copy()) if self.view == "reversed" else array


Values = Mapping[str, int | float | Fill]


def draw_values(grammar: Grammar, terms: Sequence[Term], shape: Shape) -> dict[str, int | float | Fill]:
    """A value for each capture that the grammar has declared, for one call; terms: the mask and the score function."""
    values: dict[str, int | float | Fill] = {}
    for name, each in sorted(grammar.declared.items(), key=lambda item: item[1].ndim):  # sizes may depend on Scalars
        role = grammar.roles[name]
        if each.ndim:
            size = _draw_size(grammar, name, each, terms, shape, values)
            way = _draw_way(grammar, each, role)
            values[name] = Fill(way, size, grammar.seed(), grammar.pick(*VIEWS))
        else:
            values[name] = _draw_number(grammar, each, role, shape)
    return values


def materialized(values: Values, declared: Declarations) -> dict[str, Any]:
    """The arrays and numbers of a call, by name."""
    return {name: value.array(declared[name]) if isinstance(value, Fill) else value for name, value in values.items()}


def _draw_number(source: Source, declared: Declared, role: str, shape: Shape) -> int | float:
    if role == CAP:
        return source.pick(2.0, 5.0, 20.0, 1 / 3)
    if declared.kind == "float":
        return source.pick(*FINITE)
    if role == POSITIVE:
        return source.pick(1, 2, 3, 5, 64, INT32_MAX)
    if role == DISTANCE:
        return source.pick(0, 1, 3, 17)
    if source.chance(30):
        return source.pick(*range(max(shape.len_q, shape.len_k) + 2), -1, -2)
    return source.scalar_integer()


def _draw_way(source: Source, declared: Declared, role: str) -> str:
    if role == BIAS:
        return "small"
    if role == IDS:
        return source.pick("few", "steps", "steps", "ends")
    if role == BLOCKS:
        return source.pick("often", "rarely") if declared.kind == "bool" else "few"
    if declared.dtype == "int64" and source.chance(10):
        return "beyond"
    return source.pick(*WAYS[declared.kind])


# Sizes ---------------------------------------------------------------------------------------------------------------


def _draw_size(
    source: Source, name: str, declared: Declared, terms: Sequence[Term], shape: Shape, values: Values
) -> tuple[int, ...]:
    """An axis that a plain index reads has the extent of that index, or 1 for all; any other axis has any size."""
    extents = dict(zip(INDICES, (shape.batch, shape.heads_q, shape.len_q, shape.len_k), strict=True))
    longest = max(shape.len_q, shape.len_k)
    sizes = [0] * declared.ndim
    for part in (part for term in terms for part in term.walk()):
        if part.op == "relative_bias" and part.args[1] == name:  # these sizes are documented to the element
            distance = part.args[2]
            reach = values[distance.args[0]] if distance.op == "scalar" else distance.args[0]
            return (shape.heads_q, 2 * reach + 1)[-declared.ndim :]
    for part in (part for term in terms for part in walk_defined(term, lambda _: declared.ndim)):
        if part.op == "load" and part.args[0] == name:
            needed = [_needed(index, extents) or source.pick(1, 5, longest, 2 * longest + 1) for index in part.args[1:]]
            sizes = list(map(max, sizes, needed))
    # An axis of size 1 broadcasts: it is read at 0 whatever the index.
    sizes = [1 if source.chance(15) else max(1, size) for size in sizes]
    while math.prod(sizes) > _MAX_ELEMENTS:
        sizes[sizes.index(max(sizes))] = 1
    return tuple(sizes)


def _needed(index: Term, extents: Mapping[str, int]) -> int | None:
    """How many elements a call must give along an axis that an index reads: one for each position or block.

    None for an index that may mistake anywhere, which is clamped.
    """
    if index.op in INDICES:
        return extents[index.op]
    if index.op == "//" and index.args[0].op in INDICES and index.args[1].op == "int" and index.args[1].args[0] > 0:
        return -(-extents[index.args[0].op] // index.args[1].args[0])
    return None


# Contents ------------------------------------------------------------------------------------------------------------


def _integers(way: str, shape: tuple[int, ...], rng: np.random.Generator, dtype: str) -> Array:
    kind = numpy_dtype(dtype)
    narrow = np.dtype(np.int32) if dtype == "int64" else kind  # int64 holds int32's numbers unless filled "beyond"
    lowest, highest = np.iinfo(narrow).min, np.iinfo(narrow).max
    if way == "beyond":
        return rng.choice(np.array(_BEYOND, np.int64), shape).astype(kind)
    if way == "ends":
        values = rng.choice(np.array([lowest, highest, lowest + 1, highest - 1, 0, 1], np.int64), shape)
    elif way == "positions":
        values = rng.integers(-3, max(shape) + 3, shape)
    elif way == "few":
        values = rng.integers(0, 3, shape)
    elif way == "mixed":
        extremes = rng.choice(np.array([lowest, highest]), shape)
        values = np.where(rng.random(shape) < 0.05, extremes, rng.integers(0, 9, shape))
    else:
        values = np.sort(rng.integers(0, 4, shape), axis=-1) * max(1, shape[-1] // 4)
    return np.clip(values, lowest, highest).astype(kind)


def _reals(way: str, shape: tuple[int, ...], rng: np.random.Generator, dtype: str) -> Array:
    if way == "small":
        values = rng.uniform(0.01, 0.1, shape)
    elif way == "positions":
        values = rng.integers(-3, max(shape) + 3, shape).astype(np.float64)
    elif way == "ends":
        values = rng.choice(np.array([np.inf, -np.inf, 3e38, -3e38, 65504, 6e-8, 1e-40, 0.0, -0.0, 1.0]), shape)
    else:
        values = rng.standard_normal(shape)
    with np.errstate(over="ignore", under="ignore"):
        return values.astype(np.float32).astype(numpy_dtype(dtype))


def _booleans(way: str, shape: tuple[int, ...], rng: np.random.Generator, dtype: str) -> Array:
    return rng.random(shape) < {"often": 0.8, "rarely": 0.1, "always": 2.0, "never": -1.0}[way]


_FILLERS = {"int": _integers, "float": _reals, "bool": _booleans}
