"""Writes the bytes of a kernel's argument struct."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from operator import itemgetter
from typing import Any, Self

from flashgen.codegen.arguments import ArgumentLayout

_MAP_WORDS = 16
Value = int | float | Sequence[int]


class Addresses(dict[str, int]):
    """The addresses of a call's arrays on a GPU, by name; null for arrays that the call does not have.

    Attributes:
        owners: arrays that must stay alive until the call is launched, and that have no other reference.
    """

    owners: tuple[Any, ...] = ()

    def __missing__(self, name: str) -> int:
        return 0


class ArgumentWriter:
    """Writes the struct of calls that differ only in their pointers and a few numbers; the rest is packed once.

    Attributes:
        pointer_names: the names of the arrays that the struct holds addresses of.
        offsets: the offsets of the addresses in the struct, 8 bytes each.
        template: the struct with the members that all calls share.
    """

    def __init__(self, layout: ArgumentLayout, values: Mapping[str, Value]) -> None:
        """values: all members except the pointers; numbers that change from call to call may be left out."""
        flat: list[int | float] = []
        self.pointer_names = self._members = pointers = [
            field.name for field in layout.fields if field.type.endswith("*")
        ]
        for field in layout.fields:
            words = _MAP_WORDS if field.type == "TensorMap" else field.count
            value = values.get(field.name, [0] * words if words else 0)  # missing ones are written by `write`
            flat += list(value) if isinstance(value, Sequence) else [value]
        self.template = bytearray(struct.pack(layout.format, *flat))
        self._pointers = getter(pointers)
        self._pack_pointers = struct.Struct(f"<{len(pointers)}Q").pack_into  # they are contiguous in the struct
        self.offsets = {name: layout.offset(name) for name in pointers}
        self._first_pointer = min(self.offsets.values(), default=0)
        self._numbers = {
            field.name: (struct.Struct(f"<{field.format[0]}").pack_into, layout.offset(field.name))
            for field in layout.fields
            if field.name not in values and not field.count and not field.type.endswith(("*", "TensorMap"))
        }

    def write(self, pointers: Mapping[str, int], numbers: Mapping[str, int | float]) -> bytearray:
        """Returns the struct of one call; pointers that are not given are null."""
        struct = self.template.copy()
        self.write_into(struct, Addresses(pointers), numbers)
        return struct

    def write_into(
        self, struct: bytearray | memoryview, pointers: Addresses | list[int], numbers: Mapping[str, int | float]
    ) -> None:
        """Writes the members that change from call to call into a struct of an earlier call or a copied template.

        Args:
            pointers: The addresses by name; for a writer from `by_position`, a list of addresses.
            numbers: The numbers that were not given to the constructor, by name. Raises KeyError if one is missing.
        """
        self._pack_pointers(struct, self._first_pointer, *self._pointers(pointers))
        for name, (pack, offset) in self._numbers.items():
            pack(struct, offset, numbers[name])

    def by_position(self, positions: Mapping[str, int]) -> Self:
        """Returns a writer whose `write_into` takes a list of addresses.

        Element 0 of the list must be a null address: pointers with names that are not in `positions` read it.

        Args:
            positions: The positions of addresses in the list, by the names of pointers.
        """
        other = copy(self)
        other._pointers = getter([positions.get(name, 0) for name in self._members])
        return other

    def write_emulated(self, numbers: Mapping[str, int | float]) -> bytearray:
        """Returns the struct of one call on the emulator, which writes the addresses of the arrays itself."""
        return self.write({}, numbers)


def getter(names: Sequence[Any]) -> Callable[[Any], tuple[int, ...]]:
    """Returns a function that gets the addresses of any number of names; `itemgetter` gives no tuple for one."""
    return itemgetter(*names) if len(names) > 1 else lambda addresses: tuple(addresses[name] for name in names)
