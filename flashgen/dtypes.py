"""Element types: what is known of each, and how names and objects of other libraries are converted to them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from flashgen.errors import SEE_LIMITS, SpecError


@dataclass(frozen=True)
class DType:
    """An element type of arrays that kernels read or write.

    Attributes:
        name: The name in NumPy, which torch and JAX use as well.
        bits: The size of an element.
        c_type: How CUDA text declares an element; 16-bit floats are declared as their bits.
        suffix: Ends the names of the primitives that convert it (`pack_f16`, `unpack_f16`) and of the MMA instructions
            that multiply it; "" if there are none.
        short_name: In the names of specs and kernels.
        epsilon: The largest relative rounding error, half the distance from 1 to the next number; 0 for integers.
        tensor_map: The value of CUtensorMapDataType (cuda.h); None if no tensor map has this type.
    """

    name: str
    bits: int
    c_type: str
    suffix: str = ""
    short_name: str = ""
    epsilon: float = 0.0
    tensor_map: int | None = None

    @property
    def bytes(self) -> int:
        return self.bits // 8

    @property
    def pack(self) -> str:
        """The primitive that rounds two float32 numbers to this type."""
        return f"pack_{self.suffix}"

    @property
    def unpack(self) -> str:
        """The primitive that converts an element to float32."""
        return f"unpack_{self.suffix}"

    @cached_property
    def numpy(self) -> np.dtype[Any]:
        """NumPy's dtype; bfloat16 and the float8 types come from ml_dtypes."""
        if self.name.startswith(("bfloat16", "float8")):
            import ml_dtypes

            return np.dtype(getattr(ml_dtypes, self.name))
        return np.dtype(self.name)


DTYPES = {
    dtype.name: dtype
    for dtype in (
        DType("bool", 8, "unsigned char"),
        DType("int8", 8, "signed char", short_name="int8"),
        DType("uint8", 8, "unsigned char"),
        DType("int16", 16, "short"),
        DType("int32", 32, "int"),
        DType("int64", 64, "long long"),
        DType("float8_e4m3fn", 8, "unsigned char", short_name="fp8", epsilon=2.0**-4),
        DType("float16", 16, "unsigned short", "f16", "fp16", 2.0**-11, tensor_map=6),
        DType("bfloat16", 16, "unsigned short", "bf16", "bf16", 2.0**-8, tensor_map=9),
        DType("float32", 32, "float", short_name="fp32", epsilon=2.0**-24, tensor_map=7),
    )
}
"""By the name. Products of all types are accumulated in float32."""

ELEMENTS = ("float16", "bfloat16")
"""The types of q, k and v."""
RESULTS = (*ELEMENTS, "float32")
"""The types of the output and of gradients: that of q, or float32."""
CACHED = ("float8_e4m3fn", "int8")
"""The types of quantized k and v, beside those of q."""
CAPTURES = ("bool", "int8", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32")
SCALARS = ("int32", "float32")

# fmt: off
_ALIASES = {
    "fp16": "float16", "half": "float16", "f16": "float16", "bf16": "bfloat16", "fp32": "float32", "f32": "float32",
    "float": "float32", "int": "int32", "long": "int64", "bool_": "bool",
    "fp8": "float8_e4m3fn", "float8_e4m3": "float8_e4m3fn", "e4m3": "float8_e4m3fn",
}
# fmt: on


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Returns NumPy's dtype of that name, also for types that no kernel reads, such as float64."""
    return DTYPES[name].numpy if name in DTYPES else np.dtype(name)


def dtype_name(value: Any, allowed: tuple[str, ...], argument: str) -> str:
    """Returns NumPy's name of a dtype.

    Args:
        value: A name ("bf16", "torch.float16"), a NumPy dtype or scalar type, or a torch dtype.
        allowed: The accepted names.
        argument: The argument's name in messages.

    Raises:
        SpecError: The dtype is not in `allowed`.
    """
    name = written_name(value)
    name = _ALIASES.get(name, name)
    if name not in allowed:
        raise SpecError(f"{argument}={value!r} is not supported: give one of {', '.join(allowed)} {SEE_LIMITS}")
    return name


def written_name(value: Any) -> str:
    """Returns a dtype's name in its own library: "bfloat16" for "torch.bfloat16", np.float32 or a dtype object."""
    if isinstance(value, str):
        return value.lower().removeprefix("torch.")
    text = str(value)
    if text.startswith("torch."):
        return text.removeprefix("torch.")
    if value is None or isinstance(value, (dict, list, tuple)):  # NumPy would make structured dtypes of these
        return text
    try:
        return np.dtype(value).name
    except (TypeError, ValueError):
        return text
