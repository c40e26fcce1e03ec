"""Stand-ins for arrays that traced values cannot index, and names for the arrays that a function holds.

Indexing a torch tensor by a traced value records the access. Arrays of NumPy, CuPy and JAX ask the index for a number
instead, so a function is traced with stand-ins for the arrays in its closure cells, globals, defaults and the functions
that it calls. Arrays that are not found this way raise an error when they are indexed. Nothing is kept between traces.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable
from typing import Any

from flashgen.errors import SpecError
from flashgen.language.bound import BoundArray, is_array, is_torch
from flashgen.language.captures import Tensor, array_leaf, element
from flashgen.language.declarations import check_name
from flashgen.language.operations import Capture
from flashgen.language.trace import Traced

_MAX_DEPTH = 16
_LIBRARIES = ("flashgen", "torch", "numpy", "jax", "jaxlib", "cupy", "math", "operator", "builtins", "functools")


class BoundTensor(Tensor):
    """A stand-in for an array in a traced function: a Tensor that also has the shape and dtype of its array."""

    def __init__(self, array: Any, hint: str) -> None:
        self.bound, self.hint = BoundArray(array, hint), hint
        self.capture = Capture(hint, self.bound.dtype, self.bound.ndim, self.bound.grad)

    @property
    def name(self) -> str:
        return self.hint

    def __getitem__(self, index: Any) -> Any:
        bound = self.bound
        leaf = array_leaf(bound.dtype, bound.ndim, bound.grad, self.hint)
        return element(leaf, bound.original, index if isinstance(index, tuple) else (index,))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("bound", "hint", "capture"):
            raise AttributeError(name)
        return getattr(self.bound.original, name)

    def __len__(self) -> int:
        return int(self.bound.original.shape[0])

    def __repr__(self) -> str:
        return f"<the array {self.hint!r}, {self.bound.dtype} {tuple(self.bound.original.shape)}>"


class StandIns:
    """A function prepared for tracing, and the names of the arrays that it holds.

    Attributes:
        function: The function with stand-ins for the arrays that traced values cannot index, or the function itself if
            it holds none.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._substitutes: dict[int, Any] = {}
        self._alive: list[Any] = []  # keeps ids in `_substitutes` from being reused
        self._names: dict[int, str] = {}
        self.function: Callable[..., Any] = self._substitute(function, "array", _MAX_DEPTH)

    def name_of(self, array: Any) -> str:
        """Returns the name under which an array was found, as a name for a capture; "table" for an unknown array."""
        return self._names.get(id(array), "table")

    def _substitute(self, value: Any, name: str, depth: int) -> Any:
        if isinstance(value, BoundTensor):
            self._names.setdefault(id(value.bound.original), value.hint)
        if isinstance(value, (Traced, Tensor, type, types.ModuleType, str, int, float, type(None))) or depth == 0:
            return value
        if id(value) not in self._substitutes:
            self._alive.append(value)
            self._substitutes[id(value)] = value  # for functions that call themselves
            self._substitutes[id(value)] = self._new_substitute(value, name, depth - 1)
        return self._substitutes[id(value)]

    def _new_substitute(self, value: Any, name: str, depth: int) -> Any:
        if is_array(value):
            self._names.setdefault(id(value), _hint(name))
            return value if is_torch(value) or not value.ndim else BoundTensor(value, _hint(name))
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        if isinstance(value, types.MethodType):
            function = self._substitute(value.__func__, name, depth)
            return types.MethodType(function, self._substitute(value.__self__, name, depth))
        if isinstance(value, functools.partial):
            arguments = self._substitute_all(value.args, (name,) * len(value.args), depth)
            keywords = {key: self._substitute(item, key, depth) for key, item in value.keywords.items()}
            return functools.partial(self._substitute(value.func, name, depth), *arguments, **keywords)
        if type(value) in (tuple, list):
            return self._substitute_all(value, (name,) * len(value), depth)
        if type(value) is dict:
            return {key: self._substitute(item, str(key), depth) for key, item in value.items()}
        return self._object(value, depth)

    def _substitute_all(self, values: Any, names: tuple[str, ...], depth: int) -> Any:
        found = [self._substitute(item, name, depth) for item, name in zip(values, names, strict=True)]
        changed = any(new is not old for new, old in zip(found, values, strict=True))
        return type(values)(found) if changed else values

    def _object(self, value: Any, depth: int) -> Any:
        """Returns an object whose attributes hold stand-ins, and whose methods and call use them."""
        for name, bound in getattr(value, "bound", {}).items() if type(value).__module__.startswith("flashgen") else ():
            self._names.setdefault(id(bound.original), name)
        if type(value).__module__.partition(".")[0] in _LIBRARIES or not hasattr(value, "__dict__"):
            return value
        held = {name: self._substitute(item, name, depth) for name, item in vars(value).items()}
        for name, item in (vars(value).get("_parameters") or {}).items():  # torch modules
            self._substitute(item, name, depth)
        call = next((vars(each)["__call__"] for each in type(value).__mro__ if "__call__" in vars(each)), None)
        new_call = self._substitute(call, type(value).__name__, depth)
        if new_call is call and not any(item is not vars(value)[name] for name, item in held.items()):
            return value
        return _Attributes(value, held, new_call)

    def _function(self, function: types.FunctionType, depth: int) -> Any:
        if (function.__module__ or "").partition(".")[0] in _LIBRARIES and not function.__closure__:
            return function
        code = function.__code__
        cells = [
            self._cell(cell, name, depth)
            for cell, name in zip(function.__closure__ or (), code.co_freevars, strict=True)
        ]
        read = {name: function.__globals__[name] for name in _names_of(code) if name in function.__globals__}
        replaced = {name: new for name, old in read.items() if (new := self._substitute(old, name, depth)) is not old}
        old_defaults = function.__defaults__ or ()
        names = code.co_varnames[: code.co_argcount][::-1]  # the last parameters have the defaults
        defaults = self._substitute_all(old_defaults, names[: len(old_defaults)][::-1], depth)
        keywords = {key: self._substitute(item, key, depth) for key, item in (function.__kwdefaults__ or {}).items()}
        changed = [new is not old for new, old in zip(cells, function.__closure__ or (), strict=True)]
        changed += [defaults is not old_defaults, bool(replaced)]
        changed += [new is not (function.__kwdefaults__ or {})[key] for key, new in keywords.items()]
        if not any(changed):
            return function
        namespace = {**function.__globals__, **replaced} if replaced else function.__globals__
        copy = types.FunctionType(code, namespace, function.__name__, defaults or None, tuple(cells))
        copy.__kwdefaults__ = keywords or None
        copy.__qualname__ = function.__qualname__
        return copy

    def _cell(self, cell: Any, name: str, depth: int) -> Any:
        try:
            value = cell.cell_contents
        except ValueError:  # an empty cell
            return cell
        new = self._substitute(value, name, depth)
        return cell if new is value else types.CellType(new)


def _names_of(code: types.CodeType) -> set[str]:
    """Returns the names that a function and its nested functions may read from its globals."""
    inner = (item for item in code.co_consts if isinstance(item, types.CodeType))
    return set(code.co_names).union(*(_names_of(item) for item in inner))


class _Attributes:
    """A wrapper that an object's methods get as `self`: stand-ins replace its arrays, everything else is its own."""

    def __init__(self, owner: Any, held: dict[str, Any], call: Any) -> None:
        self.__dict__.update(held)
        self.__dict__.update(_owner=owner, _call=call)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.__dict__["_call"](self, *arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__dict__["_owner"], name)
        if isinstance(found, types.MethodType) and found.__self__ is self.__dict__["_owner"]:
            return types.MethodType(found.__func__, self)
        return found


def _hint(name: str) -> str:
    """Returns a valid name for a capture, from that of a variable."""
    return re.sub(r"_+", "_", re.sub(r"\W", "_", name, flags=re.ASCII)).strip("_")[:48] or "array"


def capture_name(hint: str) -> str:
    """Returns the name of a capture, from a hint."""
    try:
        return check_name(hint)
    except SpecError:
        return check_name(f"{hint}_table" if hint[:1].isalpha() else f"table_{hint}")
