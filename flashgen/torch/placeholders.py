"""Functions that Dynamo traces: 0-dimensional tensors in place of indices, and a mode that records what is done.

Dynamo compares an object with a number that it has made dynamic by Python's defaults, and so gets a constant, whatever
the object's own operators say; of tensors it asks the torch function modes. The tensors are on the meta device, so that
an operation which the mode was not asked about cannot be taken for a value.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from flashgen.errors import SpecError
from flashgen.language.bound import dtype_read
from flashgen.language.captures import array_leaf, element
from flashgen.language.modifiers import Mask, Score
from flashgen.language.protocols import call_torch_named, is_known
from flashgen.language.rows import Row
from flashgen.language.trace import PLACEHOLDERS, Traced, lift
from flashgen.torch.table import constant
from flashgen.torch.tensors import dtype_of

_DTYPES = {"bool": torch.bool, "int": torch.int32, "float": torch.float32}


def _names() -> dict[Any, str]:
    """The names of torch's functions and of tensors' methods that the language knows, by function."""
    found: dict[Any, str] = {}
    homes = (torch, torch.special, torch.nn.functional, torch.Tensor)
    for home in homes:
        for name in dir(home):
            plain = name.strip("_")
            if not is_known(plain) and not (plain[:1] in ("r", "i") and is_known(plain[1:])):
                continue
            function = getattr(home, name)
            if callable(function) and function.__hash__ is not None:
                found.setdefault(function, name)
    found[torch.Tensor.where] = "tensor_where"  # whose first argument is the choice, not the condition
    return found


_NAMES = _names()


def _name_of(function: Any) -> str:
    """The name of a function, by which the language knows it."""
    if isinstance(function, types.FunctionType):  # which Dynamo does not find among a dict's keys
        return function.__name__
    if function in _NAMES:
        return _NAMES[function]
    raise SpecError("a function of torch cannot be traced on indices or scores of a mask or score function")


class Recording(TorchFunctionMode):
    """Records what a function does to placeholders; everything else runs as it stands.

    Attributes: `values`, the traced value of each placeholder.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[torch.Tensor, Any] = {}

    def placeholder(self, value: Any) -> torch.Tensor:
        """A tensor that stands for a traced value, or for a row of them."""
        if isinstance(value, Row):
            elements = value.elements()
            tensor = torch.empty((len(elements),), dtype=_DTYPES[elements[0].kind], device="meta")
        else:
            tensor = torch.empty((), dtype=_DTYPES[value.kind], device="meta")
        self.values[tensor] = value
        return tensor

    def value_of(self, given: Any) -> Any:
        """The traced value that a placeholder stands for; anything else as it is."""
        if isinstance(given, torch.Tensor):
            if given in self.values:
                return self.values[given]
            if given.device.type == "meta":
                raise SpecError(
                    "torch.compile traced an operation on an index or a score that flashgen was not asked about: write "
                    "it by operators or functions of torch, or call the function outside of torch.compile"
                )
        return given

    def __torch_function__(self, function: Any, _types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        given = []
        found = False
        for argument in arguments:
            if isinstance(argument, (tuple, list)):
                value: Any = tuple([self.value_of(item) for item in argument])
                found = found or any(isinstance(item, (Traced, Row)) for item in value)
            else:
                value = self.value_of(argument)
                found = found or isinstance(value, (Traced, Row))
            given.append(value)
        named = {}
        for name, argument in (keywords or {}).items():
            named[name] = self.value_of(argument)
            found = found or isinstance(named[name], (Traced, Row))
        if not found:
            return function(*arguments, **(keywords or {}))
        name = _name_of(function)
        if name == "__getitem__" and isinstance(given[0], torch.Tensor):
            result = _element(*given)
        else:
            result = call_torch_named(name, tuple(given), named)
        return self.placeholder(result) if isinstance(result, (Traced, Row)) else result


def _element(tensor: torch.Tensor, index: Any) -> Any:
    """An element of a tensor at traced indices."""
    leaf = array_leaf(dtype_read(dtype_of(tensor), "table"), tensor.ndim, tensor.requires_grad)
    return element(leaf, tensor, index if isinstance(index, tuple) else (index,))


def traced_by_dynamo(function: Callable[..., Any], leaves: tuple[Traced, ...]) -> Traced:
    """What a function returns for the leaves, where Dynamo traces the call."""
    _have_dynamo_ask_modes()
    recording = Recording()
    operands = [recording.placeholder(leaf) for leaf in leaves]
    PLACEHOLDERS.append(recording)
    with recording:
        result = function(*operands)
    PLACEHOLDERS.pop()
    result = recording.value_of(result)
    if isinstance(result, (Mask, Score)):
        result = result(*leaves)
    return lift(result)


@constant
def _have_dynamo_ask_modes() -> None:
    """Has the built-in abs() of a tensor ask torch function modes, which Dynamo of torch 2.12 and later forgets.

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
