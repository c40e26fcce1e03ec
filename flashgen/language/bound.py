"""Arrays that a traced function closes over: captures that calls need not supply."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
import sympy

from flashgen.dtypes import CAPTURES, numpy_dtype, written_name
from flashgen.errors import SpecError
from flashgen.language.declarations import MAX_NDIM
from flashgen.language.operations import Capture, captures_of

# Arrays of other dtypes than kernels read are converted if their values allow it.
_CONVERTED = {"uint16": "int32", "uint32": "int64", "uint64": "int64", "float64": "float32"}


class BoundArray:
    """An array of NumPy, CuPy, torch or JAX that a mask or score function closes over, as kernels read it.

    The array is referenced, not copied, and each call reads its current values. If kernels read another dtype, each
    call converts it: float64 to float32, unsigned integers to wider signed ones, and int64 in host memory to int32 if
    the values fit when the function is traced, because int32 takes half the instructions. int64 on a GPU is not
    narrowed, because looking at its values would synchronize with the GPU.

    Attributes:
        original: The array.
        given_dtype: NumPy's name of the array's dtype.
        dtype: NumPy's name of the dtype that kernels read.
        ndim: The number of dimensions that kernels read, at least 1.
        grad: Whether it is a torch tensor that requires a gradient, or an array that JAX traces.
    """

    def __init__(self, array: Any, name: str) -> None:
        self.original, self._name = array, name
        self.given_dtype = written_name(array.dtype)
        self.dtype, self.ndim = _dtype_read(array, self.given_dtype, name), array.ndim or 1
        self.grad = "float" in self.dtype and wants_gradient(array)
        self._copies: dict[Hashable, tuple[np.ndarray[Any, Any], Any]] = {}

    @property
    def converts(self) -> bool:
        """Whether kernels read another dtype than that of the array."""
        return self.given_dtype != self.dtype

    def current(self) -> Any:
        """Returns the array as kernels read it now. Raises SpecError if converted values no longer fit."""
        array = self.original
        if not array.ndim:
            array = array.reshape(1)
        if not self.converts:
            return array
        if self.dtype.startswith("int") and not _fits(array, np.iinfo(self.dtype)) and not _is_jax_tracer(array):
            raise SpecError(
                f"the array {self._name!r} had values that fit in {self.dtype} when its function was traced, and "
                "now has others: create the mask again"
            )
        return _converted(array, self.dtype)

    def on_host(self) -> np.ndarray[Any, Any]:
        """Returns the array as a NumPy array."""
        array = self.current()
        if isinstance(array, np.ndarray):
            return array
        if hasattr(array, "detach"):
            array = array.detach().cpu()
            if self.dtype == "bfloat16":
                return np.asarray(array.view(sys.modules["torch"].int16).numpy().view(numpy_dtype(self.dtype)))
        return np.asarray(array.get() if hasattr(array, "get") else array)

    def moved(self, device: Hashable, copy: Callable[[np.ndarray[Any, Any], Any], Any]) -> Any:
        """Returns a copy of the host's array on a device, which is updated if the values have changed.

        `copy(array, previous)` allocates a copy if `previous` is None. Otherwise it writes into `previous`, so that a
        captured graph that reads that memory stays valid.
        """
        values = self.on_host()
        copied, result = self._copies.get(device, (None, None))
        if copied is None or not _same_bytes(copied, values):
            result = copy(values, result if copied is not None and copied.shape == values.shape else None)
            self._copies[device] = values.copy(), result
        return result

    def __repr__(self) -> str:
        return f"BoundArray({self._name!r}, {self.dtype}, {tuple(self.original.shape) or (1,)})"


def is_array(value: Any) -> bool:
    """Returns whether a value is an array of some library, not a NumPy scalar."""
    if isinstance(value, (np.generic, type)):
        return False
    if not (hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "ndim")):
        return False
    return hasattr(value, "__array__") or hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")


def is_on_host(array: Any) -> bool:
    """Returns whether an array is in host memory: a NumPy array, or a torch or JAX array on the CPU."""
    if isinstance(array, np.ndarray):
        return True
    if hasattr(array, "is_cuda"):
        return not array.is_cuda
    if _is_jax_tracer(array):
        return False
    return hasattr(array, "devices") and all(device.platform == "cpu" for device in array.devices())


def is_torch(array: Any) -> bool:
    """Returns whether an array is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def wants_gradient(array: Any) -> bool:
    """Returns whether an array has a gradient, if its dtype is floating."""
    required = getattr(array, "requires_grad", None)  # an attribute of torch's tensors
    return _is_jax_tracer(array) if required is None else bool(required)


def dtype_read(given: str, name: str) -> str:
    """Returns the dtype in which kernels read arrays of a dtype. Raises SpecError if there is none."""
    read = _CONVERTED.get(given, given)
    if read not in CAPTURES:
        raise SpecError(f"the array {name!r} is of {given}; a function may read one of {', '.join(CAPTURES)}")
    return read


def _dtype_read(array: Any, given: str, name: str) -> str:
    """Returns the dtype in which kernels read this array: int32 for int64 values on the host that fit in it."""
    if array.ndim > MAX_NDIM:
        raise SpecError(f"the array {name!r} has {array.ndim} dimensions; a function may read at most {MAX_NDIM}")
    read = dtype_read(given, name)
    if given == "int64" and is_on_host(array) and _fits(array, np.iinfo(np.int32)):
        return "int32"
    if given == "uint64" and not _fits(array, np.iinfo(np.int64)):
        raise SpecError(f"the array {name!r} is of uint64, with values that int64 does not hold")
    return read


def _fits(array: Any, limits: Any) -> bool:
    """Returns whether the values are within the limits; False if they are unknown, as for JAX tracers."""
    try:
        return 0 in array.shape or (int(array.min()) >= limits.min and int(array.max()) <= limits.max)
    except Exception:  # each library has its own error for values that are not available yet
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


def unused_name(name: str, taken: Any) -> str:
    """Returns the name, or the first of name_2, name_3, ... that is not taken."""
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate


def merge_bound(
    left: sympy.Basic, bound_left: Bound, right: sympy.Basic, bound_right: Bound
) -> tuple[sympy.Basic, sympy.Basic, dict[str, BoundArray]]:
    """Returns two expressions that can be combined, and the arrays of both.

    A capture is renamed if two different arrays have its name, or an array and a capture that calls supply.
    """
    if not bound_left and not bound_right:
        return left, right, {}
    named_left, named_right = ({capture.name for capture in captures_of(node)} for node in (left, right))
    taken = named_left | named_right
    for name in sorted(bound_left.keys() & (named_right - bound_right.keys())):
        other = unused_name(name, taken)
        left, bound_left = rename_capture(left, name, other), _rename_key(bound_left, name, other)
        taken.add(other)
    for name in sorted(bound_right.keys() & named_left):
        if name in bound_left and bound_left[name].original is bound_right[name].original:
            continue
        other = unused_name(name, taken)
        right, bound_right = rename_capture(right, name, other), _rename_key(bound_right, name, other)
        taken.add(other)
    return left, right, {**bound_left, **bound_right}


def rename_capture(node: sympy.Basic, name: str, other: str) -> sympy.Basic:
    """Returns the expression with a capture renamed."""
    return node.xreplace(
        {
            capture: Capture(other, capture.dtype, capture.ndim, capture.grad)
            for capture in captures_of(node)
            if capture.name == name
        }
    )


def _rename_key(bound: Bound, name: str, other: str) -> Bound:
    return {other if key == name else key: array for key, array in bound.items()}
