"""Arrays that a traced function reads as they stand: captures that need not be given at the call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
import sympy

from flashgen.errors import SpecError
from flashgen.language.dtypes import CAPTURES, written_name
from flashgen.language.operations import Capture, captures_of

MAX_NDIM = 8
# What has another dtype than kernels read is converted, where its values allow.
_NARROWED = {"int64": "int32", "uint16": "int32", "uint32": "int64", "uint64": "int64", "float64": "float32"}


class BoundArray:
    """An array of NumPy, CuPy, torch or JAX that a mask or score function closes over, as kernels read it.

    The array is kept, not copied: what is written to it later is what calls to come read. A copy is taken where it must
    be converted: float64 to float32, integers that have other types than kernels read, and int64 to int32 where the
    values fit, which kernels compute with in half the instructions. Of a torch tensor that is written to later a new
    copy is taken.

    Attributes: `original`, the array; `dtype`, NumPy's name of what is read; `ndim`; `grad`, whether it is a torch
    tensor that wants a gradient, or an array that JAX traces.
    """

    def __init__(self, array: Any, name: str) -> None:
        self.original, self._name = array, name
        self._version = _version(array)
        self.given_dtype = written_name(array.dtype)
        self.array = self._read(array)
        self.dtype, self.ndim = written_name(self.array.dtype), self.array.ndim
        self.grad = "float" in self.dtype and (bool(getattr(array, "requires_grad", False)) or _is_jax_tracer(array))
        self._moved: dict[Hashable, Any] = {}

    def _read(self, array: Any) -> Any:
        """The array itself, or a copy of a dtype that kernels read; a number as an array of one."""
        name, given = self._name, self.given_dtype
        if array.ndim > MAX_NDIM:
            raise SpecError(f"the array {name!r} has {array.ndim} dimensions; a function may read at most {MAX_NDIM}")
        if not array.ndim:
            array = array.reshape(1)
        if given == "int64":
            return _converted(array, "int32") if _fits(array, np.iinfo(np.int32)) else array
        wanted = _NARROWED.get(given, given)
        if wanted not in CAPTURES:
            raise SpecError(f"the array {name!r} is of {given}; a function may read one of {', '.join(CAPTURES)}")
        if given == "uint64" and not _fits(array, np.iinfo(np.int64)):
            raise SpecError(f"the array {name!r} is of uint64, with values that int64 does not hold")
        return array if wanted == given else _converted(array, wanted)

    def current(self) -> Any:
        """The array as kernels read it, converted anew if the torch tensor that it was made of was written to."""
        if self.original is not self.array and (version := _version(self.original)) != self._version:
            array = self._read(self.original)
            if written_name(array.dtype) != self.dtype:
                raise SpecError(
                    f"the array {self._name!r} had values that fit in {self.dtype} when its function was traced, and "
                    "has others now: make the mask anew"
                )
            self.array, self._version = array, version
            self._moved.clear()
        return self.array

    def on_host(self) -> np.ndarray[Any, Any]:
        """The array as one of NumPy."""
        array = self.current()
        if isinstance(array, np.ndarray):
            return array
        if hasattr(array, "detach"):
            array = array.detach().cpu()
            if self.dtype == "bfloat16":
                import ml_dtypes

                return np.asarray(array.view(sys.modules["torch"].int16).numpy().view(ml_dtypes.bfloat16))
        return np.asarray(array.get() if hasattr(array, "get") else array)

    def moved(self, place: Hashable, move: Callable[[Any], Any]) -> Any:
        """The array where `move` puts it, moved once for each place."""
        array = self.current()
        if place not in self._moved:
            self._moved[place] = move(array)
        return self._moved[place]

    def __repr__(self) -> str:
        return f"BoundArray({self._name!r}, {self.dtype}, {tuple(self.array.shape)})"


def is_array(value: Any) -> bool:
    """Whether a value is an array of some library, and not a number of NumPy."""
    if isinstance(value, (np.generic, type)) or not all(hasattr(value, name) for name in ("shape", "dtype", "ndim")):
        return False
    return hasattr(value, "__array__") or hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")


def _version(array: Any) -> int:
    """How often a torch tensor was written to; 0 for what does not say."""
    try:
        return int(getattr(array, "_version", 0))
    except (RuntimeError, TypeError):  # an inference tensor has no version
        return 0


def _fits(array: Any, limits: Any) -> bool:
    """Whether the values are within the limits; False where they are not known, as those of JAX's tracers."""
    try:
        return 0 in array.shape or (int(array.min()) >= limits.min and int(array.max()) <= limits.max)
    except Exception:  # each library has its own error for values that are not there yet
        return False


def _converted(array: Any, dtype: str) -> Any:
    if hasattr(array, "astype"):
        return array.astype(dtype)
    return array.detach().to(getattr(sys.modules["torch"], dtype))


def _is_jax_tracer(array: Any) -> bool:
    return any(cls.__name__ == "Tracer" and cls.__module__.partition(".")[0] == "jax" for cls in type(array).__mro__)


Bound = Mapping[str, BoundArray]


def fresh(name: str, taken: Any) -> str:
    """The name, or with a number behind it the first that is not taken."""
    found, number = name, 1
    while found in taken:
        number += 1
        found = f"{name}_{number}"
    return found


def joined(
    left: sympy.Basic, of_left: Bound, right: sympy.Basic, of_right: Bound
) -> tuple[sympy.Basic, sympy.Basic, dict[str, BoundArray]]:
    """Two expressions that may stand together, and the arrays of both.

    Arrays of one name that are not one array, and an array of the name of a capture that is given at the call, get
    another name.
    """
    if not of_left and not of_right:
        return left, right, {}
    named_left, named_right = ({capture.name for capture in captures_of(node)} for node in (left, right))
    taken = named_left | named_right
    for name in sorted(of_left.keys() & (named_right - of_right.keys())):
        other = fresh(name, taken)
        left, of_left = renamed(left, name, other), {_swapped(key, name, other): of_left[key] for key in of_left}
        taken.add(other)
    for name in sorted(of_right.keys() & named_left):
        if name in of_left and of_left[name].original is of_right[name].original:
            continue
        other = fresh(name, taken)
        right, of_right = renamed(right, name, other), {_swapped(key, name, other): of_right[key] for key in of_right}
        taken.add(other)
    return left, right, {**of_left, **of_right}


def renamed(node: sympy.Basic, name: str, other: str) -> sympy.Basic:
    """The expression with another name of a capture."""
    return node.xreplace(
        {
            capture: Capture(other, capture.dtype, capture.ndim, capture.grad)
            for capture in captures_of(node)
            if capture.name == name
        }
    )


def _swapped(key: str, name: str, other: str) -> str:
    return other if key == name else key
