"""What captures hold in a call: sizes that fit how they are read, and contents that a named fill makes.

A fill is a few words, not numbers, so that a printed case stays short: the same fill is the same array.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashgen.runtime.arrays import numpy_dtype
from flashgen.verify.problems import Shape
from flashgen.verify.random import constants
from flashgen.verify.random.grammar import ANY, BIAS, BLOCKS, CAP, DISTANCE, IDS, POSITIVE
from flashgen.verify.random.terms import INDICES, Declared, Term

Array = np.ndarray[Any, Any]

# Ways to fill an array, by the kind of its numbers; "beyond", for int64, holds numbers that int32 cannot.
WAYS = {
    "int": ("steps", "few", "positions", "ends", "mixed"),
    "float": ("small", "normal", "positions", "ends"),
    "bool": ("often", "rarely", "always", "never"),
}
VIEWS = ("plain", "plain", "plain", "spread", "reversed")
_MOST_ELEMENTS = 2**17
_BEYOND = (0, 1, 1 + 2**32, 2**31, -(2**31) - 1, 2**33 + 5, 5, 2**63 - 1, -(2**63), 2**62)


@dataclass(frozen=True)
class Fill:
    """An array: its shape, how it is filled and from which seed, and which kind of view the call gets."""

    way: str
    shape: tuple[int, ...]
    seed: int = 0
    view: str = "plain"

    def array(self, declared: Declared) -> Array:
        """The array in the dtype declared."""
        rng = np.random.default_rng(self.seed)
        return _viewed(_FILLERS[declared.kind](self.way, self.shape, rng, declared.dtype), self.view)


Values = Mapping[str, int | float | Fill]


def draw_values(
    mask: Term,
    score: Term | None,
    declared: Mapping[str, Declared],
    roles: Mapping[str, str],
    shape: Shape,
    rng: random.Random,
) -> dict[str, int | float | Fill]:
    """A value for each capture, for one call."""
    terms = [term for term in (mask, score) if term is not None]
    values: dict[str, int | float | Fill] = {
        name: _number(each, roles[name], shape, rng) for name, each in declared.items() if not each.ndim
    }
    for name, each in declared.items():
        if each.ndim:
            size = _shape(name, each, terms, shape, values, rng)
            way = _way(each, roles[name], rng)
            values[name] = Fill(way, size, rng.randrange(2**16), rng.choice(VIEWS))
    return values


def materialised(values: Values, declared: Mapping[str, Declared]) -> dict[str, Any]:
    """The arrays and numbers of a call, by name."""
    return {
        name: value.array(declared[name]) if isinstance(value, Fill) else value
        for name, value in values.items()
        if name in declared
    }


# Numbers and ways ----------------------------------------------------------------------------------------------------


def _number(declared: Declared, role: str, shape: Shape, rng: random.Random) -> int | float:
    if role == CAP:
        return rng.choice((2.0, 5.0, 20.0, 1 / 3))
    if declared.kind == "float":
        return rng.choice([value for value in constants.FLOATS if abs(value) != float("inf")])
    if role == POSITIVE:
        return rng.choice((1, 2, 3, 5, 64, constants.INT32_MOST))
    if role == DISTANCE:
        return rng.choice((0, 1, 3, 17))
    if rng.random() < 0.3:
        return rng.randrange(-2, max(shape.len_q, shape.len_k) + 2)
    return constants.scalar_int(rng)


def _way(declared: Declared, role: str, rng: random.Random) -> str:
    if role == BIAS:
        return "small"
    if role == IDS:
        return rng.choice(("steps", "steps", "few", "ends"))
    if role == BLOCKS:
        return rng.choice(("often", "rarely")) if declared.kind == "bool" else "few"
    if role == ANY and declared.dtype == "int64" and rng.random() < 0.1:
        return "beyond"
    return rng.choice(WAYS[declared.kind])


# Sizes ---------------------------------------------------------------------------------------------------------------


def _shape(
    name: str,
    declared: Declared,
    terms: list[Term],
    shape: Shape,
    values: Mapping[str, Any],
    rng: random.Random,
) -> tuple[int, ...]:
    """An axis that a plain index reads has that index's extent, or 1 for all; any other axis has any size."""
    extents = dict(zip(INDICES, (shape.batch, shape.heads_q, shape.len_q, shape.len_k), strict=True))
    longest = max(shape.len_q, shape.len_k)
    sizes = [0] * declared.ndim
    for read in _reads(name, declared, terms, values):
        for axis, needed in enumerate(read):
            if isinstance(needed, str):
                needed = extents[needed] if needed in extents else rng.choice((1, 5, longest, 2 * longest + 1))
            elif isinstance(needed, tuple):
                needed = -(-extents[needed[0]] // needed[1])
            sizes[axis] = max(sizes[axis], needed)
    if any(part.op == "relative_bias" and part.args[1] == name for term in terms for part in term.walk()):
        return tuple(sizes)  # these sizes are documented to the element
    # An axis of size 1 broadcasts: it is read at 0 whatever the index.
    sizes = [1 if rng.random() < 0.15 else max(1, size) for size in sizes]
    while math.prod(sizes) > _MOST_ELEMENTS:
        sizes[sizes.index(max(sizes))] = 1
    return tuple(sizes)


Needed = str | int | tuple[str, int]  # an index or "any", a number of elements, or an index in blocks


def _needed(index: Term) -> Needed:
    """What calls ask of a dimension that an index reads: an element for each position, or for each block."""
    if index.op in INDICES:
        return index.op
    if index.op == "//" and index.args[0].op in INDICES and index.args[1].op == "int" and index.args[1].args[0] > 0:
        return index.args[0].op, index.args[1].args[0]
    return "any"


def _reads(name: str, declared: Declared, terms: list[Term], values: Mapping[str, Any]) -> Iterator[Sequence[Needed]]:
    """What each place that reads the capture needs along its axes."""
    for part in (part for term in terms for part in term.walk()):
        if part.op == "load" and part.args[0] == name:
            yield [_needed(index) for index in part.args[1:]]
        elif part.op == "document" and part.args[0] == name:
            yield from (["b", index][-declared.ndim :] for index in "qk")
        elif part.op == "block_sparse" and part.args[0] == name:
            blocks = [("q", part.args[1].args[0]), ("k", part.args[2].args[0])]
            yield [*["b", "h"][4 - declared.ndim :], *blocks]
        elif part.op == "prefix_lm" and part.args[0] == name:
            yield ["b"]
        elif part.op == "alibi_table" and part.args[0] == name:
            yield ["b", "h"][-declared.ndim :]
        elif part.op == "relative_bias" and part.args[1] == name:
            distance = part.args[2]
            reach = values[distance.args[0]] if distance.op == "scalar" else distance.args[0]
            yield ["h", 2 * reach + 1][-declared.ndim :]


# Contents ------------------------------------------------------------------------------------------------------------


def _integers(way: str, shape: tuple[int, ...], rng: np.random.Generator, dtype: str) -> Array:
    kind = numpy_dtype(dtype)
    narrow = np.dtype(np.int32) if dtype == "int64" else kind  # int64 holds int32's numbers unless filled "beyond"
    least, most = np.iinfo(narrow).min, np.iinfo(narrow).max
    if way == "beyond":
        return rng.choice(np.array(_BEYOND, np.int64), shape).astype(kind)
    if way == "ends":
        values = rng.choice(np.array([least, most, least + 1, most - 1, 0, 1], np.int64), shape)
    elif way == "positions":
        values = rng.integers(-3, max(shape) + 3, shape)
    elif way == "few":
        values = rng.integers(0, 3, shape)
    elif way == "mixed":
        values = np.where(
            rng.random(shape) < 0.05, rng.choice(np.array([least, most]), shape), rng.integers(0, 9, shape)
        )
    else:
        values = np.sort(rng.integers(0, 4, shape), axis=-1) * max(1, shape[-1] // 4)
    return np.clip(values, least, most).astype(kind)


def _reals(way: str, shape: tuple[int, ...], rng: np.random.Generator, dtype: str) -> Array:
    kind = numpy_dtype(dtype)
    if way == "small":
        values = rng.uniform(0.01, 0.1, shape)
    elif way == "positions":
        values = rng.integers(-3, max(shape) + 3, shape).astype(np.float64)
    elif way == "ends":
        values = rng.choice(np.array([np.inf, -np.inf, 3e38, -3e38, 65504, 6e-8, 1e-40, 0.0, -0.0, 1.0]), shape)
    else:
        values = rng.standard_normal(shape)
    with np.errstate(over="ignore", under="ignore"):
        return values.astype(np.float32).astype(kind)


def _booleans(way: str, shape: tuple[int, ...], rng: np.random.Generator, dtype: str) -> Array:
    return rng.random(shape) < {"often": 0.8, "rarely": 0.1, "always": 2.0, "never": -1.0}[way]


_FILLERS = {"int": _integers, "float": _reals, "bool": _booleans}


def _viewed(array: Array, view: str) -> Array:
    """The same elements with gaps between them, or stored backwards."""
    if view == "spread":
        return np.repeat(array, 2, axis=-1)[..., ::2]
    return np.flip(np.flip(array).copy()) if view == "reversed" else array
