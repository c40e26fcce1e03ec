"""Traced values encoded as strings, for functions that Dynamo traces: only strings and numbers can be constants there.

Each operation on placeholders is one call of `composed`, which Dynamo runs while it traces. So Dynamo traces and guards
the user's function, but not the code that builds expressions. Arrays and numbers are inputs of the graph without values
at that time. They are represented by their positions in the lists of the mode that records them
(`placeholders.Recording`).
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple, NoReturn

import torch

from flashgen.errors import SpecError
from flashgen.language import functions
from flashgen.language.captures import Leaf, PartlyIndexed
from flashgen.language.expression_json import FLOAT, INTEGER
from flashgen.language.modifiers import at_operands
from flashgen.language.operations import Kind
from flashgen.language.protocols import call_torch_named, is_supported
from flashgen.language.rows import ComputedRow, Row
from flashgen.language.trace import Traced, lift
from flashgen.torch.call_keys import ABSENT, call_key, distinct
from flashgen.torch.table import constant

AT, RESULT = "a mask or a score at operands", "the result"
"""Special function names of `composed`."""
OF_LANGUAGE = "flashgen."
"""The prefix of the names of flashgen's own functions."""
_DTYPES = {"bool": torch.bool, "int": torch.int32, "float": torch.float32}
Values = tuple[tuple[int, int | float], ...]
"""(position, value) of numbers that are passed by value, because an operation depends on them."""


class Composed(NamedTuple):
    """The result of an operation.

    Attributes:
        value: a traced value, or a row of them, as JSON; "" if there is no result.
        dtype: the dtype of a tensor that represents it: bool, int32 or float32.
        columns: the length of a computed row; None for a single value or a part of an array.
        array: for a part of an array, the position of the array and the number of indices given so far.
        error: the message if there is no result; "" if the operation may need the values of numbers.
    """

    value: str
    dtype: torch.dtype | None = None
    columns: int | None = None
    array: tuple[int, int] | None = None
    error: str = ""


@constant
def composed(
    name: str, arguments: tuple[Any, ...], keywords: tuple[Any, ...], values: Values, detaches: bool
) -> tuple[Any, ...]:
    """Applies an operation to traced values. Returns a `Composed` as a plain tuple.

    Args:
        name: the name of a function of torch; OF_LANGUAGE with the name of a function of flashgen; AT or RESULT.
        arguments: operands, as `Recording` encodes them.
        keywords: pairs of a name and an operand.
        values: the values of numbers that must not stay symbolic.
        detaches: whether the function disables gradients.
    """
    reader = _Reader(values)
    enabled = torch.is_grad_enabled()
    torch._C._set_grad_enabled(not detaches)
    try:
        given = tuple(map(reader.operand, arguments))
        return tuple(_result(_run(name, given, {key: reader.operand(each) for key, each in keywords})))
    except Exception as error:
        message = "" if reader.has_open_numbers else str(error) or type(error).__name__
        return tuple(Composed("", error=message))
    finally:
        torch._C._set_grad_enabled(enabled)


def _run(name: str, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    if name == RESULT:
        return given[0] if isinstance(given[0], Row) else lift(given[0])
    if name == AT:
        return at_operands(given[0], given[1:])
    if name.startswith(OF_LANGUAGE):
        return getattr(functions, name.removeprefix(OF_LANGUAGE)).__wrapped__(*given, **named)
    return call_torch_named(name, given, named)


def _names() -> dict[Any, str]:
    """Returns the names of torch's functions and tensor methods that the language supports, by function."""
    found: dict[Any, str] = {}
    for home in (torch, torch.special, torch.nn.functional, torch.Tensor):
        for name in dir(home):
            plain = name.strip("_")
            if not is_supported(plain) and not (plain[:1] in ("r", "i") and is_supported(plain[1:])):
                continue
            function = getattr(home, name)
            if callable(function) and function.__hash__ is not None:
                found.setdefault(function, name)
    found[torch.Tensor.where] = "tensor_where"  # its first argument is a value, not the condition
    return found


_NAMES = _names()


@constant
def name_of(function: Any) -> str:
    """Returns the name of a function of torch in the language."""
    return _NAMES.get(function) or str(getattr(function, "__name__", function))


@constant
def leaf(name: str) -> tuple[str, torch.dtype]:
    """Returns the encoded value of an index or of the score, and its dtype."""
    kind: Kind = "float" if name == "score" else "int"
    return json.dumps(_data(Traced(f'"{name}"', kind))), _DTYPES[kind]


@constant
def opened(value: str) -> tuple[Any, ...]:
    """Decodes a traced value: its text, its kind, the positions of its arrays, and its numbers.

    A number is its value, or a tuple with its position.
    """
    data = json.loads(value)
    return data["text"], data["kind"], tuple(data["arrays"]), tuple(map(_decoded_number, data["numbers"]))


@constant
def key_of(score: str, score_name: str, mask: str, mask_name: str, spec: str) -> tuple[Any, ...]:
    """Returns the key of a call, the positions of its arrays, its integers and its floats. "" stands for no function.

    A number is its value, or a tuple with its position. The result of a SpecError is a tuple with its message alone.
    """
    reader = _Reader(())
    traced_score = reader.value(json.loads(score)) if score else ABSENT
    traced_mask = reader.value(json.loads(mask)) if mask else ABSENT
    arrays, slots = distinct(traced_score.arrays + traced_mask.arrays)
    try:
        key = call_key(traced_score, score_name, traced_mask, mask_name, slots, spec)
    except SpecError as error:
        return (str(error),)
    decoded: tuple[list[Any], list[Any]] = ([], [])
    for number in traced_score.numbers + traced_mask.numbers:
        decoded[_is_float(number)].append(_decoded_number(_encoded_number(number)))
    return key, tuple(array.position for array in arrays), *map(tuple, decoded)


class Array:
    """An array that is known by its position, with the attributes that the language reads."""

    __array__ = None  # marks it as an array for the language

    def __init__(self, position: int, dtype: Any = None, ndim: int = 0, requires_grad: bool = False) -> None:
        self.position, self.dtype, self.ndim, self.requires_grad = position, dtype, ndim, requires_grad
        self.shape: tuple[int | None, ...] = (None,) * ndim

    def reshape(self, _size: int) -> Array:
        """Returns itself: `Recording` has already flattened the array if a function needs that."""
        return self


class Number:
    """A number that is known by its position. Operations that depend on its value raise SpecError."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, position: int, is_float: bool) -> None:
        self.position, self.is_float = position, is_float

    def _unknown(self, *_operands: Any) -> NoReturn:
        raise SpecError("an operation depends on the value of a number that is known only when the graph runs")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _unknown  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __neg__ = __abs__ = _unknown
    __float__ = __int__ = __index__ = __bool__ = _unknown


def _is_float(number: Any) -> bool:
    return number.is_float if isinstance(number, Number) else isinstance(number, float)


def _encoded_number(number: Any) -> Any:
    """Encodes a number for JSON."""
    return [number.position, number.is_float] if isinstance(number, Number) else number


def _decoded_number(number: Any) -> Any:
    """Converts a number of JSON for Dynamo: its value, or a tuple with its position."""
    return (number[0],) if isinstance(number, list) else number


class _Reader:
    """Decodes operands. `has_open_numbers` becomes True when a number without a value was decoded."""

    def __init__(self, values: Values) -> None:
        self._values = dict(values)
        self._arrays: dict[int, Array] = {}
        self.has_open_numbers = False

    def operand(self, written: tuple[Any, ...]) -> Any:
        how, *given = written
        return getattr(self, f"_{how}")(*given)

    def _constant(self, value: Any) -> Any:
        return value

    def _items(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(map(self.operand, items))

    def _array(self, position: int, dtype: torch.dtype, ndim: int, requires_grad: bool) -> Array:
        return self._arrays.setdefault(position, Array(position, dtype, ndim, requires_grad))

    def _number(self, position: int, is_float: bool) -> Any:
        number = self._number_at(position, is_float)
        if not isinstance(number, Number):
            return number
        return Traced(f'"{FLOAT if is_float else INTEGER}"', "float" if is_float else "int", (), (number,))

    def _traced(self, text: str, kind: Any, arrays: tuple[int, ...], numbers: tuple[Any, ...]) -> Traced:
        return self.value({"text": text, "kind": kind, "arrays": arrays, "numbers": [list(each) for each in numbers]})

    def _value(self, value: str, columns: int | None) -> Any:
        return self.value(json.loads(value), columns)

    def value(self, data: dict[str, Any], columns: int | None = None) -> Any:
        """Decodes a traced value or a row. columns: the last dimension of a part of an array."""
        if "row" in data:
            return ComputedRow(tuple(self.value(each) for each in data["row"]))
        if "leaf" in data:
            array = self._arrays.setdefault(data["array"], Array(data["array"]))
            array.shape = (columns,)
            return PartlyIndexed(Leaf(*data["leaf"]), array, tuple(self.value(each) for each in data["indices"]))
        arrays = tuple(self._arrays.setdefault(position, Array(position)) for position in data["arrays"])
        numbers = tuple(self._number_at(*each) if isinstance(each, list) else each for each in data["numbers"])
        return Traced(data["text"], data["kind"], arrays, numbers)

    def _number_at(self, position: int, is_float: bool) -> Any:
        if position in self._values:
            return self._values[position]
        self.has_open_numbers = True
        return Number(position, is_float)


def _result(result: Any) -> Composed:
    if isinstance(result, Traced):
        return Composed(json.dumps(_data(result)), _DTYPES[result.kind])
    if isinstance(result, PartlyIndexed):
        leaf = result.leaf
        data = {
            "leaf": [leaf.text, leaf.kind, leaf.ndim, leaf.shown], "array": result.array.position,
            "indices": [_data(lift(each)) for each in result.indices],
        }  # fmt: skip
        return Composed(json.dumps(data), _DTYPES[leaf.kind], None, (result.array.position, len(result.indices)))
    if isinstance(result, Row):
        elements = result.elements()
        return Composed(
            json.dumps({"row": [_data(each) for each in elements]}), _DTYPES[elements[0].kind], len(elements)
        )
    raise SpecError(f"a function of torch gives {type(result).__name__} of traced values: write the operation out")


def _data(value: Traced) -> dict[str, Any]:
    return {
        "text": value.text, "kind": value.kind, "arrays": [array.position for array in value.arrays],
        "numbers": [_encoded_number(number) for number in value.numbers],
    }  # fmt: skip
