"""Renders a C++ header with all that a program needs to launch a cubin, from a kernel's entry in a release manifest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flashgen.codegen.environment import environment
from flashgen.codegen.sizes import SIZE_NAMES
from flashgen.dtypes import DTYPES, ELEMENTS

_TOTALS = ("total_q", "total_k")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


def launch_header(kernel: Mapping[str, Any]) -> str:
    """Returns the header of a kernel with a cubin, given its entry in the manifest. It includes no CUDA headers."""
    members = kernel["arguments"]
    formulas = " ".join([*kernel["grid"].values(), *(" ".join(_formulas(member)) for member in members)])
    used = set(_IDENTIFIER.findall(formulas))
    sizes = _sizes(kernel, used)
    return (
        environment()
        .get_template("release/launch.h.jinja")
        .render(
            kernel=kernel,
            name=struct_name(kernel["name"]),
            cubin=kernel["files"]["cubin"]["path"],
            dtype=kernel["spec"]["dtype"] if kernel["spec"] else "16-bit float",
            c_type=DTYPES[kernel["spec"]["dtype"] if kernel["spec"] else ELEMENTS[0]].c_type,
            types={member["type"].removeprefix("const ").rstrip("*") for member in members},
            sizes=[*sizes, *(name for name in ("multiprocessors", "splits") if name in used)],
            members=[{"array": f"[{member['count']}]" if "count" in member else "", **member} for member in members],
            assigned=[(member["name"], member["type"], _formulas(member)) for member in members if "value" in member],
            alignment=64 if kernel.get("maps") else 8,
        )
    )


def _sizes(kernel: Mapping[str, Any], used: set[str]) -> tuple[str, ...]:
    """Returns the parameters of a launch: all sizes of a call, or the element count of an array."""
    if kernel["spec"] is None:
        return tuple(name for name in ("batch", "count") if name in used)
    return ("count",) if "count" in used else (*SIZE_NAMES, *(name for name in _TOTALS if name in used))


def struct_name(name: str) -> str:
    """Returns the C++ name of a kernel, such as `fwd_sm80_bf16_d64_causal_1a2b3c4d`."""
    return re.sub(r"\W", "_", name)


def _formulas(member: Mapping[str, Any]) -> list[str]:
    value = member.get("value", [])
    return [value] if isinstance(value, str) else list(value)
