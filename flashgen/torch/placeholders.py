"""Tracing of functions under Dynamo: 0-dimensional tensors stand for indices, and a mode records the operations.

When Dynamo compares an object with a dynamic number, it ignores the operators of the object and yields a constant. For
tensors it calls torch function modes. The placeholders are on the meta device, so that the result of an operation that
the mode did not see cannot be mistaken for a value.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode

from flashgen.errors import SpecError
from flashgen.language.modifiers import Mask, Score
from flashgen.language.trace import MAX_INT, PLACEHOLDERS, Traced
from flashgen.language.well_formed import FLOAT32_MAX
from flashgen.torch import encoded_values as encoded
from flashgen.torch.table import constant, specialized
from flashgen.torch.tensors import operands

TracedCall: TypeAlias = tuple[str, list[torch.Tensor], list[int], list[float]]
"""The key of a call, its arrays, integers and floats. Not a named tuple: Dynamo would guard its class in every call."""


@constant
def _patch_abs_of_dynamo() -> None:
    """Makes the built-in abs() of a tensor call torch function modes, which Dynamo omits from torch 2.12 on.

    It runs while Dynamo traces.
    """
    from torch._dynamo.variables import tensor
    from torch._dynamo.variables.torch_function import can_dispatch_torch_function

    known = getattr(tensor.TensorVariable, "nb_absolute_impl", None)
    if known is None or hasattr(known, "asks_modes"):
        return

    def nb_absolute_impl(self: Any, tx: Any) -> Any:
        return self.call_method(tx, "abs", [], {}) if can_dispatch_torch_function(tx, (self,), {}) else known(self, tx)

    nb_absolute_impl.asks_modes = True  # type: ignore[attr-defined]
    vars_of_tensors: Any = tensor.TensorVariable
    vars_of_tensors.nb_absolute_impl = nb_absolute_impl


class Recording(TorchFunctionMode):
    """Records the operations of a function on placeholders. All other operations run normally.

    Dynamo traces this class too, and each line adds compilation time. Whatever can be done in `encoded_values` is done
    there. Each call of a compiled function checks that the globals that Dynamo read are still the same objects. It does
    not check methods of an object that was created while Dynamo traced. So functions that are used here are static
    methods.

    Attributes:
        values: the encoded value of each placeholder, as `Composed.value`.
        arrays, numbers: the operands that encoded values refer to by position.
    """

    _composed = staticmethod(encoded.composed)
    _leaf = staticmethod(encoded.leaf)
    _key_of = staticmethod(encoded.key_of)
    _opened = staticmethod(encoded.opened)
    _name_of = staticmethod(encoded.name_of)
    _fixed = staticmethod(specialized)
    _operands = staticmethod(operands)
    _patch_abs = staticmethod(_patch_abs_of_dynamo)

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[torch.Tensor, str] = {}
        self.arrays: list[torch.Tensor] = []
        self.numbers: list[Any] = []
        self._positions: dict[torch.Tensor, int] = {}
        self._had_gradients = torch.is_grad_enabled()

    def run(self, name: str, arguments: Any, keywords: Any = None) -> torch.Tensor:
        """Records an operation and returns the placeholder of its result. name: see `composed`."""
        before = len(self.numbers)
        given = tuple([self._operand(each) for each in arguments])
        named = tuple([(key, self._operand(each)) for key, each in (keywords or {}).items()])
        detaches = self._had_gradients and not torch.is_grad_enabled()
        value, dtype, columns, array, error = "", None, None, None, ""
        # First without values of numbers, then with those of this operation's numbers, then with all values.
        for first in (len(self.numbers), before, 0):
            known = tuple([(number, self._fixed(self.numbers[number])) for number in range(first, len(self.numbers))])
            value, dtype, columns, array, error = self._composed(name, given, named, known, detaches)
            if value or error:
                break
        if not value:
            raise SpecError(error)
        shape = () if columns is None else (columns,)
        if array is not None:
            shape = self.arrays[array[0]].shape[array[1] :]
        placeholder = torch.empty(shape, dtype=dtype, device="meta")
        self.values[placeholder] = value
        return placeholder

    def leaf(self, name: str) -> torch.Tensor:
        """Returns the placeholder of an index or of the score."""
        value, dtype = self._leaf(name)
        placeholder = torch.empty((), dtype=dtype, device="meta")
        self.values[placeholder] = value
        return placeholder

    def call(self, name: str, operands: Any, options: Any) -> torch.Tensor:
        """Records a function of flashgen's language."""
        return self.run(encoded.OF_LANGUAGE + name, operands, options)

    def at(self, template: Traced, operands: Any) -> torch.Tensor:
        """Records a named mask or score that is called at operands."""
        return self.run(encoded.AT, (template, *operands))

    def _operand(self, given: Any) -> tuple[Any, ...]:
        """Encodes an operand for `composed`."""
        if isinstance(given, torch.Tensor):
            if given in self.values:
                return "value", self.values[given], self._fixed(given.shape[-1]) if given.ndim == 1 else None
            if given.device.type == "meta":
                raise SpecError(
                    "torch.compile traced an operation on an index or a score that flashgen did not see: write it with "
                    "operators or functions of torch, or call the function outside of torch.compile"
                )
            return "array", self._array(given), given.dtype, given.ndim, given.requires_grad
        if isinstance(given, int) and not isinstance(given, bool):
            if not -MAX_INT <= given < MAX_INT:
                return "constant", self._fixed(given)
            return "number", self._number(given), False
        if isinstance(given, float):
            # Infinities, NaN and zeros stay constants.
            if given == 0 or not -FLOAT32_MAX <= given <= FLOAT32_MAX:
                return "constant", self._fixed(given)
            return "number", self._number(given), True
        if isinstance(given, Traced):
            arrays = tuple([self._array(each) for each in given.arrays])
            numbers = tuple([(self._number(each), isinstance(each, float)) for each in given.numbers])
            return "traced", given.text, given.kind, arrays, numbers
        if isinstance(given, (tuple, list)):
            return "items", tuple([self._operand(each) for each in given])
        return "constant", given

    def _array(self, array: torch.Tensor) -> int:
        if array not in self._positions:
            self._positions[array] = len(self.arrays)
            self.arrays.append(array)
        return self._positions[array]

    def _number(self, number: Any) -> int:
        self.numbers.append(number)
        return len(self.numbers) - 1

    def traced(self, given: Any) -> Any:
        """Returns the traced value of a placeholder; anything else unchanged."""
        if not isinstance(given, torch.Tensor) or given not in self.values:
            return given
        text, kind, arrays, numbers = self._opened(self.values[given])
        return Traced(
            text, kind, tuple([self.arrays[position] for position in arrays]), tuple(self.numbers_at(numbers))
        )

    def numbers_at(self, encoded: tuple[Any, ...]) -> list[Any]:
        """Returns the values of encoded numbers, looking up positions."""
        return [self.numbers[each[0]] if isinstance(each, tuple) else each for each in encoded]

    def __torch_function__(self, function: Any, _types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if not self._has_placeholders(arguments) and not self._has_placeholders(tuple((keywords or {}).values())):
            return function(*arguments, **(keywords or {}))
        name = self._name_of(function)
        if name == "__getitem__":
            arguments = (arguments[0], self._non_negative_index(arguments[0], arguments[1]))
        if name == "take":
            arguments = (arguments[0].reshape(-1), *arguments[1:])
        return self.run(name, arguments, keywords)

    def _has_placeholders(self, given: Any) -> bool:
        for each in given:
            if isinstance(each, torch.Tensor):
                if each in self.values or each.device.type == "meta":
                    return True
            elif isinstance(each, Traced) or (isinstance(each, (tuple, list)) and self._has_placeholders(each)):
                return True
        return False

    @staticmethod
    def _non_negative_index(tensor: torch.Tensor, index: Any) -> tuple[Any, ...]:
        """Converts negative numbers of an index, which count from the end, to positions from the beginning."""
        items = index if isinstance(index, tuple) else (index,)
        return tuple(
            [
                item + tensor.shape[axis] if isinstance(item, int) and item < 0 and axis < tensor.ndim else item
                for axis, item in enumerate(items)
            ]
        )

    def _trace(self, function: Any, leaves: tuple[str, ...]) -> str:
        """Traces a function. Returns its result as `Composed.value`; "" for None."""
        if function is None:
            return ""
        placeholders = [self.leaf(leaf) for leaf in leaves]
        PLACEHOLDERS.append(self)
        with self:
            result = function(*placeholders)
            if isinstance(result, (Mask, Score)):
                result = result(*placeholders)
        PLACEHOLDERS.pop()
        return self.values[self.run("the result", (result,))]

    def trace_call(self, score_mod: Any, mask_mod: Any, spec: str, device: torch.device) -> TracedCall:
        """Traces the functions of a call. Without Dynamo, `functional.run_functions` does this."""
        self._patch_abs()
        score = self._trace(score_mod, ("score", "b", "h", "q", "k"))
        mask = self._trace(mask_mod, ("b", "h", "q", "k"))
        score_name = score_mod.name if isinstance(score_mod, Score) else "score_mod"
        mask_name = mask_mod.name if isinstance(mask_mod, Mask) else "mask_mod"
        found = self._key_of(score, score_name, mask, mask_name, spec)
        if len(found) == 1:
            raise SpecError(found[0])
        key, positions, integers, floats = found
        arrays = self._operands([self.arrays[position] for position in positions], device)
        return key, arrays, self.numbers_at(integers), self.numbers_at(floats)
