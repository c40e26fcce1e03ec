"""Traced values encoded as strings, for functions that Dynamo traces.

`placeholders.Recording` calls `composed` once for each operation on placeholders. Dynamo runs `composed` during tracing
and takes its result as a constant, which must consist of strings and numbers. Dynamo therefore traces and guards the
user's function, but not the code that builds expressions. Arrays and numbers are inputs of the graph and have no values
during tracing. An encoded value refers to them by their positions in `Recording.arrays` and `Recording.numbers`.
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
from flashgen.language.protocols import call_torch_named, is_supported, plain_name
from flashgen.language.rows import ComputedRow, Row
from flashgen.language.trace import Traced, lift
from flashgen.torch.call_keys import ABSENT, call_key, distinct
from flashgen.torch.table import constant

AT, RESULT = "a mask or a score at operands", "the result"
"""Names for `composed`: the call of a named mask or score, and the conversion of a function's result."""
OF_LANGUAGE = "flashgen."
"""The prefix of the names of flashgen's own functions in `composed`."""
_DTYPES = {"bool": torch.bool, "int": torch.int32, "float": torch.float32}
Values = tuple[tuple[int, int | float], ...]
"""The numbers with known values, each as (position, value). Dynamo guards these values."""


class Composed(NamedTuple):
    """The encoded result of an operation.

    Attributes:
        value: the traced value or the row as JSON; "" if the operation failed.
        dtype: the dtype of the placeholder for the result: bool, int32 or float32.
        columns: the number of columns of a computed row; None for other results.
        array: the position of a partly indexed array, and the number of its indices; None for other results.
        error: the error message if the operation failed; "" if it may succeed with the values of more numbers.
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
    """Applies an operation to traced values. Returns the fields of a `Composed` as a plain tuple.

    Args:
        name: the name of a torch function, OF_LANGUAGE followed by the name of a flashgen function, AT, or RESULT.
        arguments: the operands as `Recording` encodes them.
        keywords: the keyword arguments as pairs of a name and an encoded operand.
        values: the numbers with known values. All other numbers stay symbolic.
        detaches: whether gradients are disabled at the operation, so that its result has a derivative of 0.
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
    """Returns the names of the torch functions and tensor methods that the language supports, by function."""
    found: dict[Any, str] = {}
    for home in (torch, torch.special, torch.nn.functional, torch.Tensor):
        for name in dir(home):
            function = getattr(home, name)
            if is_supported(plain_name(name)[0]) and callable(function) and function.__hash__ is not None:
                found.setdefault(function, name)
    found[torch.Tensor.where] = "tensor_where"  # its first argument is a value, not the condition
    return found


_NAMES = _names()


@constant
def name_of(function: Any) -> str:
    """Returns the name of a torch function for `composed`."""
    return _NAMES.get(function) or str(getattr(function, "__name__", function))


@constant
def leaf(name: str) -> tuple[str, torch.dtype]:
    """Returns the encoded value of the score or of an index, and its dtype. name: "score", "b", "h", "q" or "k"."""
    kind: Kind = "float" if name == "score" else "int"
    return json.dumps(_data(Traced(f'"{name}"', kind))), _DTYPES[kind]


@constant
def opened(value: str) -> tuple[Any, ...]:
    """Returns the text, the kind, the positions of the arrays, and the numbers of an encoded value.

    A number is represented by its value, or by a tuple with its position if the value is unknown.
    """
    data = json.loads(value)
    return data["text"], data["kind"], tuple(data["arrays"]), tuple(map(_decoded_number, data["numbers"]))


@constant
def key_of(score: str, score_name: str, mask: str, mask_name: str, spec: str) -> tuple[Any, ...]:
    """Returns the key of a call (`call_key`), the positions of its distinct arrays, its integers, and its floats.

    Numbers are represented as in `opened`. If `call_key` raises a SpecError, returns a tuple with its message only.

    Args:
        score, mask: the encoded results of the functions; "" for a function that the call does not have.
        score_name, mask_name: the names of the functions in kernels.
        spec: the other fields of the spec (`variants.spec_text`).
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
    """An array without values, with the attributes that the language reads. `position` identifies it."""

    __array__ = None  # `bound.is_array` looks for this attribute

    def __init__(self, position: int, dtype: Any = None, ndim: int = 0, requires_grad: bool = False) -> None:
        self.position, self.dtype, self.ndim, self.requires_grad = position, dtype, ndim, requires_grad
        self.shape: tuple[int | None, ...] = (None,) * ndim

    def reshape(self, _size: int) -> Array:
        """Returns itself, because `Recording` flattens the array of `torch.take` before it encodes the operation."""
        return self


class Number:
    """A number without a value, identified by `position`. Operations on it raise SpecError."""

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
    """Converts a number to JSON: its value, or a list with the fields of a `Number`."""
    return [number.position, number.is_float] if isinstance(number, Number) else number


def _decoded_number(number: Any) -> Any:
    """Converts a number from JSON to its representation in `opened`."""
    return (number[0],) if isinstance(number, list) else number


class _Reader:
    """Decodes operands.

    Attributes:
        has_open_numbers: whether a number without a known value has been decoded.
    """

    def __init__(self, values: Values) -> None:
        self._values = dict(values)
        self._arrays: dict[int, Array] = {}
        self.has_open_numbers = False

    def operand(self, encoded: tuple[Any, ...]) -> Any:
        """Decodes an operand: the name of a method of this class without its underscore, and the arguments."""
        kind, *given = encoded
        return getattr(self, f"_{kind}")(*given)

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
        """Decodes a traced value or a row. columns: the last dimension of a partly indexed array, if it has one."""
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
    """Encodes the result of an operation."""
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
    """Converts a traced value to data for JSON."""
    return {
        "text": value.text, "kind": value.kind, "arrays": [array.position for array in value.arrays],
        "numbers": [_encoded_number(number) for number in value.numbers],
    }  # fmt: skip
