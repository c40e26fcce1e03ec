"""Converts names and objects of element types to NumPy's names."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashgen.errors import SpecError

# fmt: off
_ALIASES = {
    "fp16": "float16", "half": "float16", "f16": "float16", "bf16": "bfloat16", "fp32": "float32", "f32": "float32",
    "float": "float32", "int": "int32", "long": "int64", "bool_": "bool",
    "fp8": "float8_e4m3fn", "float8_e4m3": "float8_e4m3fn", "e4m3": "float8_e4m3fn",
}
# fmt: on
ELEMENTS = ("float16", "bfloat16")
CACHED = ("float8_e4m3fn", "int8")
CAPTURES = ("bool", "int8", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32")
SCALARS = ("int32", "float32")


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
        raise SpecError(f"{argument}={value!r} is not supported: give one of {', '.join(allowed)}")
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
