"""Arrays that a traced function reads as they stand: captures that need not be given at the call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
import sympy

from flashgen.errors import SpecError
from flashgen.language.declarations import MAX_NDIM
from flashgen.language.dtypes import CAPTURES, written_name
from flashgen.language.operations import Capture, captures_of

# What has another dtype than kernels read is converted, where its values allow.
_CONVERTED = {"uint16": "int32", "uint32": "int64", "uint64": "int64", "float64": "float32"}


class BoundArray:
    """An array of NumPy, CuPy, torch or JAX that a mask or score function holds, as kernels read it.

    The array is kept, not copied, and each call reads what it holds then. Where kernels read another dtype, each
    call converts it: float64 to float32, unsigned integers to wider ones, and int64 in the host's memory to int32, with
    which kernels compute in half the instructions, where the values fit when the function is traced. int64 on a GPU
    stays int64, as to look at its values would wait for the GPU.

    Attributes: `original`, the array; `dtype`, NumPy's name of what is read; `ndim`; `grad`, whether it is a torch
    tensor that wants a gradient, or an array that JAX traces.
    """

    def __init__(self, array: Any, name: str) -> None:
        self.original, self._name = array, name
        self.given_dtype = written_name(array.dtype)
        self.dtype, self.ndim = _dtype_read(array, self.given_dtype, name), array.ndim or 1
        self.grad = wants_gradient(array, self.dtype)
        self._moved: dict[Hashable, tuple[np.ndarray[Any, Any], Any]] = {}

    @property
    def converts(self) -> bool:
        """Whether kernels read another dtype than the array has."""
        return self.given_dtype != self.dtype

    def current(self) -> Any:
        """The array as kernels read it now. SpecError where values that were converted fit no longer."""
        array = self.original
        if not array.ndim:
            array = array.reshape(1)
        if not self.converts:
            return array
        if self.dtype.startswith("int") and not _fits(array, np.iinfo(self.dtype)) and not _is_jax_tracer(array):
            raise SpecError(
                f"the array {self._name!r} had values that fit in {self.dtype} when its function was traced, and has "
                "others now: make the mask again"
            )
        return _converted(array, self.dtype)

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

    def moved(self, place: Hashable, move: Callable[[np.ndarray[Any, Any], Any], Any]) -> Any:
        """A copy of the host's array at another place, which is updated where the values have changed.

        move(array, copy) allocates the copy where `copy` is None. Otherwise it writes into it, so that a captured graph
        that reads that memory stays valid.
        """
        here = self.on_host()
        seen, there = self._moved.get(place, (None, None))
        if seen is None or not _same_bytes(seen, here):
            there = move(here, there if seen is not None and seen.shape == here.shape else None)
            self._moved[place] = here.copy(), there
        return there

    def __repr__(self) -> str:
        return f"BoundArray({self._name!r}, {self.dtype}, {tuple(self.original.shape) or (1,)})"


def is_array(value: Any) -> bool:
    """Whether a value is an array of some library, and not a number of NumPy."""
    if isinstance(value, (np.generic, type)) or not all(hasattr(value, name) for name in ("shape", "dtype", "ndim")):
        return False
    return hasattr(value, "__array__") or hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")


def is_on_host(array: Any) -> bool:
    """Whether an array is in the host's memory: NumPy's, or one of torch or JAX on the CPU."""
    if isinstance(array, np.ndarray):
        return True
    if hasattr(array, "is_cuda"):
        return not array.is_cuda
    if _is_jax_tracer(array):
        return False
    return hasattr(array, "devices") and all(device.platform == "cpu" for device in array.devices())


def is_torch(array: Any) -> bool:
    """Whether an array is a tensor of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def wants_gradient(array: Any, dtype: str) -> bool:
    """Whether an array that is read as this dtype has a gradient."""
    return "float" in dtype and (bool(getattr(array, "requires_grad", False)) or _is_jax_tracer(array))


def dtype_read(given: str, name: str) -> str:
    """The dtype that kernels read of an array of a dtype, whatever its values. SpecError where there is none."""
    read = _CONVERTED.get(given, given)
    if read not in CAPTURES:
        raise SpecError(f"the array {name!r} is of {given}; a function may read one of {', '.join(CAPTURES)}")
    return read


def _dtype_read(array: Any, given: str, name: str) -> str:
    """The same, for the values that the array holds now: int64's are int32's where they fit."""
    if array.ndim > MAX_NDIM:
        raise SpecError(f"the array {name!r} has {array.ndim} dimensions; a function may read at most {MAX_NDIM}")
    read = dtype_read(given, name)
    if given == "int64" and is_on_host(array) and _fits(array, np.iinfo(np.int32)):
        return "int32"
    if given == "uint64" and not _fits(array, np.iinfo(np.int64)):
        raise SpecError(f"the array {name!r} is of uint64, with values that int64 does not hold")
    return read


def _fits(array: Any, limits: Any) -> bool:
    """Whether the values are within the limits; False where they are not known, as those of JAX's tracers."""
    try:
        return 0 in array.shape or (int(array.min()) >= limits.min and int(array.max()) <= limits.max)
    except Exception:  # each library has its own error for values that are not there yet
        return False


def _same_bytes(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    one, other = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b))
    return a.shape == b.shape and np.array_equal(one, other)


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
