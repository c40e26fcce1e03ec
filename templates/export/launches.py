"""The kernels of the folder kernels/, launched as its manifest.json describes.

The manifest has for each kernel the members of its argument struct, its grid, its tensor maps, the workspaces and the
counters that it needs, as formulas of the sizes of a call. `prepare` computes what follows from sizes and strides; a
call writes only addresses, tensor maps of these addresses, and numbers such as a seed.
"""

from __future__ import annotations

import json
import math
import operator
import struct
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import driver
from .formulas import evaluate

FOLDER = Path(__file__).parent / "kernels"
MANIFEST = json.loads((FOLDER / "manifest.json").read_text(encoding="utf-8"))

_FORMATS = {"int": "<i", "unsigned": "<I", "float": "<f", "long long": "<q", "Strides": "<q"}  # of each number
_COUNTERS = ("next_tile", "arrivals")  # members that point to counters, which are 0 before and after a launch
_MIN_COUNTERS = 1024
_ALIGNMENT = 256  # bytes: that of each workspace in the memory of a call
_MAX_MAPS = 256  # sets of maps that a launch keeps: a training step uses other addresses in each layer


class Rows(NamedTuple):
    """The geometry of an array of rows: its rows and heads, and its strides (batch, head, row) in elements."""

    rows: int
    heads: int
    strides: tuple[int, int, int]


class Captured(NamedTuple):
    """The geometry of a captured array: its shape, and its strides in bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


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
    promotion: int
    bytes_before: int

    def encode(self, address: int) -> bytes:
        """Returns the map of the array at an address."""
        first = address - self.bytes_before
        box = self.box, self.swizzle, self.promotion
        return driver.tensor_map(self.dtype, first, self.sizes, self.strides, *box)


class Launch:
    """A launch for calls of the same sizes and strides.

    Attributes:
        grid: the number of blocks along x, y and z.
        pointers: the arrays that the argument struct points to, in order.
    """

    def __init__(
        self,
        function: driver.Function,
        grid: tuple[int, int, int],
        template: bytes,
        pointers: Sequence[tuple[int, str]],
        maps: Sequence[Map],
        numbers: Sequence[tuple[int, str, str]],
    ) -> None:
        """template: the argument struct without what changes from call to call: `pointers` (offset, array), `maps` and
        `numbers` (offset, format, name)."""
        self.grid = grid
        self._function, self._template, self._maps, self._numbers = function, template, maps, numbers
        self.pointers = [name for _, name in pointers]
        self._first_pointer = pointers[0][0]  # the others follow it
        self._pack_pointers = struct.Struct(f"<{len(pointers)}Q").pack_into
        self._encoded: dict[tuple[int, ...], Sequence[tuple[int, bytes]]] = {}
        self._idle: list[driver.Parameters] = []  # one for each thread that launched at the same time

    def bind(self, positions: Mapping[str, int]) -> None:
        """Sets where `run` finds the addresses of arrays; those without a position are null."""
        self._pointers_in = _getter([positions.get(name, 0) for name in self.pointers])
        self._mapped_in = _getter([positions[each.array] for each in self._maps])

    def run(self, addresses: Sequence[int], numbers: Mapping[str, float], index: int, stream: int) -> None:
        """Launches on a stream of the current device, which has this index. The first address is null."""
        try:
            parameters = self._idle.pop()
        except IndexError:
            parameters = self._function.parameters(self._template, self.grid)
        buffer = parameters.struct
        self._pack_pointers(buffer, self._first_pointer, *self._pointers_in(addresses))
        for offset, form, name in self._numbers:
            struct.pack_into(form, buffer, offset, numbers[name])
        if self._maps:
            for offset, encoded in self._encode(addresses):
                buffer[offset : offset + driver.MAP_BYTES] = encoded
        self._function.launch(parameters, index, stream)
        self._idle.append(parameters)

    def _encode(self, addresses: Sequence[int]) -> Sequence[tuple[int, bytes]]:
        """Returns the tensor maps of arrays at these addresses, with their places in the argument struct."""
        key = self._mapped_in(addresses)
        found = self._encoded.get(key)
        if found is None:
            if len(self._encoded) >= _MAX_MAPS:
                self._encoded.clear()
            found = self._encoded[key] = [(each.offset, each.encode(address)) for each, address in zip(self._maps, key)]
        return found


def _getter(positions: Sequence[int]) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """Returns a function that gets the addresses at these positions."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda addresses: tuple([addresses[position] for position in positions])


class Workspace(NamedTuple):
    """Memory that the kernels of a call share, which is set to 0 before the first of them if `zeroed`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    zeroed: bool

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Prepared:
    """All launches of a pass for calls of the same sizes and strides, in order, and the memory that they share.

    Attributes:
        pointers: the names of all arrays that the kernels access through pointers.
    """

    def __init__(
        self,
        launches: Sequence[Launch],
        workspaces: Sequence[Workspace],
        counters: int,
        device: torch.device,
        names: Sequence[str],
    ) -> None:
        """names: those of the arrays with the addresses that `run` takes, in order."""
        self.launches, self.workspaces, self._counters = launches, workspaces, counters
        self.pointers = frozenset(name for launch in launches for name in launch.pointers)
        self._device, self._places, size = device, [], 0
        for space in workspaces:
            self._places.append(size)
            size += -(-space.bytes // _ALIGNMENT) * _ALIGNMENT
        ordered = ["", *names, *(space.name for space in workspaces)]
        positions = {name: position for position, name in enumerate(ordered)}
        positions.update(dict.fromkeys(_COUNTERS, len(ordered) if counters else 0))
        for launch in launches:
            launch.bind(positions)
        self._zeroed = [(place, place + each.bytes) for place, each in zip(self._places, workspaces) if each.zeroed]
        self._allocate = driver.allocator((size,), (1,), torch.uint8, device) if size else None

    def run(self, addresses: Sequence[int], numbers: Mapping[str, float]) -> None:
        """Launches the pass on torch's current stream. The device of the arrays must be the current one."""
        operands = [0, *addresses]
        stream = driver.current_stream(self._device)
        if self._allocate:
            memory = self._allocate()
            first = memory.data_ptr()
            operands += [first + place for place in self._places]
            for begin, end in self._zeroed:
                memory[begin:end].zero_()
        if self._counters:
            _owner, address = _counters(self._device, stream, self._counters)
            operands.append(address)
        for launch in self.launches:
            launch.run(operands, numbers, self._device.index, stream)


_counters_by_stream: dict[tuple[int | None, Hashable], tuple[int, int]] = {}


def _counters(device: torch.device, stream: int, count: int) -> tuple[torch.Tensor | None, int]:
    """Returns counters that are 0: what owns them, if anything does, and their address.

    Launches on a stream follow each other and share counters. They are not torch's memory, which may belong to a pool
    that CUDA graphs reclaim. A launch that is captured into a graph has counters of its own.
    """
    if driver.is_capturing():
        owner = torch.zeros(count, dtype=torch.int32, device=device)
        return owner, owner.data_ptr()
    key = device.index, driver.identity(stream)
    address, size = _counters_by_stream.get(key, (0, 0))
    if size < count:
        size = max(_MIN_COUNTERS, 1 << (count - 1).bit_length())  # calls of growing sizes allocate a few times only
        address = driver.allocate_zeros(size, device, stream)
        _counters_by_stream[key] = address, size
    return None, address


def prepare(
    names: Sequence[str],
    sizes: Mapping[str, int],
    arrays: Mapping[str, Rows],
    captures: Mapping[str, Captured],
    device: torch.device,
    order: Sequence[str],
) -> Prepared:
    """Returns the launches of the kernels with these names for the sizes of a call and the geometry of its arrays.

    order: the names of all arrays of a call, in the order of their addresses in `Prepared.run`.
    """
    kernels = [_KERNELS[name] for name in names]
    launches = [kernel.launch(sizes, arrays, captures) for kernel in kernels]
    spaces = [space for kernel in kernels for space in kernel.workspaces(sizes, captures)]
    counters = max(kernel.counters(sizes) for kernel in kernels)
    return Prepared([each for each in launches if all(each.grid)], spaces, counters, device, order)


class _Kernel:
    """A kernel of the manifest."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._facts = facts
        file = facts["files"]["cubin"]
        launch = facts["threads"], facts["shared_bytes"], facts.get("programmatic_launch", False)
        self._function = driver.Function(FOLDER / file["path"], file["sha256"], facts["entry"], *launch)

    def counters(self, sizes: Mapping[str, int]) -> int:
        return evaluate(self._facts.get("counters", "0"), sizes)

    def workspaces(self, sizes: Mapping[str, int], captures: Mapping[str, Captured]) -> list[Workspace]:
        return [
            Workspace(
                space["name"],
                (*self._shape_of(space, captures), *(evaluate(size, sizes) for size in space["shape"])),
                getattr(torch, space["dtype"]),
                space.get("zeroed", False),
            )
            for space in self._facts.get("workspaces", ())
            if evaluate(space.get("wanted", "1"), sizes)
        ]

    @staticmethod
    def _shape_of(space: Mapping[str, Any], captures: Mapping[str, Captured]) -> tuple[int, ...]:
        return captures[space["of_array"]].shape if "of_array" in space else ()

    def launch(self, sizes: Mapping[str, int], arrays: Mapping[str, Rows], captures: Mapping[str, Captured]) -> Launch:
        for space in self._facts.get("workspaces", ()):
            if "of_array" in space:
                sizes = {**sizes, "count": math.prod(self._shape_of(space, captures))}
        values: dict[str, Sequence[int]] = {f"{name}_strides": each.strides for name, each in arrays.items()}
        values.update({f"{name}_stride": each.strides for name, each in captures.items()})
        values.update({f"{name}_size": each.shape for name, each in captures.items()})
        renamed = self._facts.get("pointers", {})
        template = bytearray(self._facts["argument_bytes"])
        pointers: list[tuple[int, str]] = []
        numbers: list[tuple[int, str, str]] = []
        for member in self._facts["arguments"]:
            name, kind, offset = member["name"], member["type"], member["offset"]
            if kind.endswith("*"):
                pointers.append((offset, renamed.get(name, name)))
            elif "value" in member or name in values:
                given = _values(member["value"], sizes) if "value" in member else values[name]
                size = struct.calcsize(_FORMATS[kind])
                for position, value in enumerate(given):
                    struct.pack_into(_FORMATS[kind], template, offset + position * size, value)
            elif kind != "TensorMap":
                numbers.append((offset, _FORMATS[kind], name))
        offsets = {member["name"]: member["offset"] for member in self._facts["arguments"]}
        maps = [_map(offsets[each["member"]], each, sizes, arrays) for each in self._facts.get("maps", ())]
        x, y, z = (evaluate(self._facts["grid"][axis], sizes) for axis in "xyz")
        return Launch(self._function, (x, y, z), bytes(template), pointers, maps, numbers)


def _values(formulas: str | Sequence[str], sizes: Mapping[str, int]) -> list[int]:
    """Returns the values of the formulas of a member, which has one or several."""
    return [evaluate(each, sizes) for each in ([formulas] if isinstance(formulas, str) else formulas)]


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
        facts["l2_promotion_bytes"],
        facts.get("rows_before", 0) * steps[0],
    )


_KERNELS = {facts["name"]: _Kernel(facts) for facts in MANIFEST["kernels"]}
