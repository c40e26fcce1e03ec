"""The kernels of the folder kernels/, launched as its manifest.json describes.

The manifest has for each kernel the members of its argument struct, its grid, its tensor maps, the workspaces and the
counters that it needs, as formulas of the sizes of a call. What follows from sizes and strides is computed once and
cached; a call writes only addresses, tensor maps of these addresses, and numbers such as a seed.
"""

from __future__ import annotations

import ctypes
import functools
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Union

import torch

from . import driver
from .formulas import evaluate

FOLDER = Path(__file__).parent / "kernels"
MANIFEST = json.loads((FOLDER / "manifest.json").read_text(encoding="utf-8"))

_FORMATS = {"int": "<i", "unsigned": "<I", "float": "<f", "long long": "<q"}
_COUNTERS = ("next_tile", "arrivals")  # members that point to counters, which are 0 before and after a launch

_MIN_COUNTERS = 1024

Arrays = Mapping[str, Union[torch.Tensor, int, None]]
"""The arrays of a call by the names of the argument structs; some are addresses."""


class Rows(NamedTuple):
    """The geometry of an array of rows: its rows and heads, and its strides (batch, head, row) in elements."""

    rows: int
    heads: int
    strides: tuple[int, int, int]


class Map(NamedTuple):
    """A tensor map of a launch: its place in the argument struct, its array, and what the driver encodes.

    bytes_before: the distance from the address of the map to that of the array.
    """

    offset: int
    array: str
    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    bytes_before: int


class Launch(NamedTuple):
    """A launch for calls of the same sizes and strides.

    template: the argument struct without what changes from call to call: `pointers` (offset, array), `maps` and
    `numbers` (offset, format, name).
    """

    function: driver.Function
    grid: tuple[int, int, int]
    template: bytes
    pointers: tuple[tuple[int, str], ...]
    maps: tuple[Map, ...]
    numbers: tuple[tuple[int, str, str], ...]

    def arguments(self, arrays: Arrays, numbers: Mapping[str, float]) -> Any:
        """Returns the argument struct of one call, as a ctypes buffer. Arrays that are None or missing are null."""
        buffer = ctypes.create_string_buffer(self.template, len(self.template))
        for offset, name in self.pointers:
            struct.pack_into("<Q", buffer, offset, _address(arrays.get(name)))
        for offset, form, name in self.numbers:
            struct.pack_into(form, buffer, offset, numbers[name])
        for each in self.maps:
            address = _address(arrays[each.array]) - each.bytes_before
            encoded = driver.tensor_map(each.dtype, address, each.sizes, each.strides, each.box, each.swizzle)
            buffer[each.offset : each.offset + driver.MAP_BYTES] = encoded
        return buffer


class Workspace(NamedTuple):
    """Memory that a call allocates for its kernels, and sets to 0 if `zeroed`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    zeroed: bool


class Prepared(NamedTuple):
    """All launches of a pass for calls of the same sizes and strides, in order, and the memory that they share."""

    launches: tuple[Launch, ...]
    workspaces: tuple[Workspace, ...]
    counters: int

    def run(self, arrays: Arrays, numbers: Mapping[str, float], device: torch.device) -> None:
        """Launches the pass on torch's current stream."""
        with driver.on(device):
            stream = driver.current_stream(device)
            arrays = dict(arrays)
            for name, shape, dtype, zeroed in self.workspaces:
                arrays[name] = (torch.zeros if zeroed else torch.empty)(shape, dtype=dtype, device=device)
            if self.counters:
                arrays.update(dict.fromkeys(_COUNTERS, _counters(device, stream, self.counters)))
            for launch in self.launches:
                launch.function.launch(launch.grid, launch.arguments(arrays, numbers), device, stream)


def _address(array: torch.Tensor | int | None) -> int:
    return array.data_ptr() if isinstance(array, torch.Tensor) else array or 0


_counters_by_stream: dict[tuple[torch.device, int], tuple[int, int]] = {}


def _counters(device: torch.device, stream: int, count: int) -> torch.Tensor | int:
    """Returns counters that are 0, as a tensor or an address.

    Launches on a stream follow each other and share counters. They are not torch's memory, which may belong to a pool
    that CUDA graphs reclaim. A launch that is captured into a graph has counters of its own.
    """
    if driver.is_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    address, size = _counters_by_stream.get((device, stream), (0, 0))
    if size < count:
        size = max(count, _MIN_COUNTERS)
        address = driver.allocate_zeros(size, device, stream)
        _counters_by_stream[device, stream] = address, size
    return address


@functools.lru_cache(maxsize=1024)
def prepare(
    names: tuple[str, ...],
    sizes: tuple[tuple[str, int], ...],
    rows: tuple[tuple[str, Rows], ...],
) -> Prepared:
    """Returns the launches of the kernels with these names for the sizes of a call and the geometry of its arrays."""
    values, arrays = dict(sizes), dict(rows)
    kernels = [_KERNELS[name] for name in names]
    launches = [kernel.launch(values, arrays) for kernel in kernels]
    spaces = [space for kernel in kernels for space in kernel.workspaces(values)]
    counters = max(kernel.counters(values) for kernel in kernels)
    return Prepared(tuple(each for each in launches if all(each.grid)), tuple(spaces), counters)


class _Kernel:
    """A kernel of the manifest."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._facts = facts
        file = facts["files"]["cubin"]
        block = facts["threads"], facts["shared_bytes"]
        self._function = driver.Function(FOLDER / file["path"], file["sha256"], facts["entry"], *block)

    def counters(self, sizes: Mapping[str, int]) -> int:
        return evaluate(self._facts.get("counters", "0"), sizes)

    def workspaces(self, sizes: Mapping[str, int]) -> list[Workspace]:
        return [
            Workspace(
                space["name"],
                tuple(evaluate(size, sizes) for size in space["shape"]),
                getattr(torch, space["dtype"]),
                space.get("zeroed", False),
            )
            for space in self._facts.get("workspaces", ())
            if evaluate(space.get("wanted", "1"), sizes)
        ]

    def launch(self, sizes: Mapping[str, int], arrays: Mapping[str, Rows]) -> Launch:
        template, pointers, numbers = bytearray(self._facts["argument_bytes"]), [], []
        for member in self._facts["arguments"]:
            name, kind, offset = member["name"], member["type"], member["offset"]
            if kind.endswith("*"):
                pointers.append((offset, name))
            elif kind == "Strides":
                strides = arrays[name[: -len("_strides")]].strides
                struct.pack_into("<qqq", template, offset, *strides)
            elif "value" in member:
                struct.pack_into(_FORMATS[kind], template, offset, evaluate(member["value"], sizes))
            elif kind != "TensorMap":
                numbers.append((offset, _FORMATS[kind], name))
        offsets = {member["name"]: member["offset"] for member in self._facts["arguments"]}
        maps = [_map(offsets[each["member"]], each, sizes, arrays) for each in self._facts.get("maps", ())]
        x, y, z = (evaluate(self._facts["grid"][axis], sizes) for axis in "xyz")
        return Launch(self._function, (x, y, z), bytes(template), tuple(pointers), tuple(maps), tuple(numbers))


def _map(offset: int, facts: Mapping[str, Any], sizes: Mapping[str, int], arrays: Mapping[str, Rows]) -> Map:
    """Returns a tensor map. TMA also checks strides along axes of size 1, which may be anything in a tensor."""
    columns, *extents = (evaluate(size, sizes) for size in facts["sizes"])
    array, (rows, heads, strides) = facts["array"], arrays[facts["array"]]
    element = facts["swizzle_bytes"] // facts["box"][0]
    batch, head, row = strides if rows else (columns, columns, columns)
    row = columns * heads if rows == 1 else row
    by_name = {"row": row, "head": head, "batch": batch}
    dense = -(-columns * element // 16) * 16
    steps = [by_name[name] * element if size > 1 else dense for name, size in zip(facts["strides"], extents)]
    return Map(
        offset,
        array if rows else "o",  # a map needs a valid address
        facts["dtype"],
        (columns, *(max(size, 1) for size in extents)),
        tuple(steps),
        tuple(facts["box"]),
        facts["swizzle_bytes"],
        facts.get("rows_before", 0) * steps[0],
    )


_KERNELS = {facts["name"]: _Kernel(facts) for facts in MANIFEST["kernels"]}
