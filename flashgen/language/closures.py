"""Arrays that cannot be indexed by traced values, and the names of those that a function holds.

Indexing a tensor of torch by a traced value records it. Arrays of NumPy, CuPy and JAX ask an index for a number
instead, so a function runs with stand-ins in the place of the arrays that its cells, globals, defaults and the
functions that it calls hold. What is not found here raises an error when it is indexed; nothing is kept between traces.
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

_DEEPEST = 16
_LIBRARIES = ("flashgen", "torch", "numpy", "jax", "jaxlib", "cupy", "math", "operator", "builtins", "functools")


class BoundTensor(Tensor):
    """What stands for an array in a traced function: a Tensor whose array is known. Its shape and dtype are there."""

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
    """A function as tracing runs it, and the names of the arrays that it holds.

    Attributes:
        function: the function, with stand-ins for the arrays that cannot be indexed by traced values; itself where it
            holds none.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._known: dict[int, Any] = {}
        self._kept: list[Any] = []  # so that no number of `_known` is given to another object
        self._names: dict[int, str] = {}
        self.function: Callable[..., Any] = self._of(function, "array", _DEEPEST)

    def name_of(self, array: Any) -> str:
        """The name of an array where it was found, as a capture may have it; "table" for another one."""
        return self._names.get(id(array), "table")

    def _of(self, value: Any, name: str, depth: int) -> Any:
        if isinstance(value, BoundTensor):
            self._names.setdefault(id(value.bound.original), value.hint)
        if isinstance(value, (Traced, Tensor, type, types.ModuleType, str, int, float, type(None))) or depth == 0:
            return value
        if id(value) not in self._known:
            self._kept.append(value)
            self._known[id(value)] = value  # what calls itself
            self._known[id(value)] = self._substituted(value, name, depth - 1)
        return self._known[id(value)]

    def _substituted(self, value: Any, name: str, depth: int) -> Any:
        if is_array(value):
            self._names.setdefault(id(value), _hint(name))
            return value if is_torch(value) or not value.ndim else BoundTensor(value, _hint(name))
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        if isinstance(value, types.MethodType):
            function = self._of(value.__func__, name, depth)
            return types.MethodType(function, self._of(value.__self__, name, depth))
        if isinstance(value, functools.partial):
            arguments = self._all(value.args, (name,) * len(value.args), depth)
            keywords = {key: self._of(item, key, depth) for key, item in value.keywords.items()}
            return functools.partial(self._of(value.func, name, depth), *arguments, **keywords)
        if type(value) in (tuple, list):
            return self._all(value, (name,) * len(value), depth)
        if type(value) is dict:
            return {key: self._of(item, str(key), depth) for key, item in value.items()}
        return self._object(value, depth)

    def _all(self, values: Any, names: tuple[str, ...], depth: int) -> Any:
        found = [self._of(item, name, depth) for item, name in zip(values, names, strict=True)]
        changed = any(new is not old for new, old in zip(found, values, strict=True))
        return type(values)(found) if changed else values

    def _object(self, value: Any, depth: int) -> Any:
        """An object whose attributes hold arrays: a stand-in of which they are read, and which is called as it is."""
        for name, bound in getattr(value, "bound", {}).items() if type(value).__module__.startswith("flashgen") else ():
            self._names.setdefault(id(bound.original), name)
        if type(value).__module__.partition(".")[0] in _LIBRARIES or not hasattr(value, "__dict__"):
            return value
        held = {name: self._of(item, name, depth) for name, item in vars(value).items()}
        for name, item in (vars(value).get("_parameters") or {}).items():  # torch's modules
            self._of(item, name, depth)
        call = next((vars(each)["__call__"] for each in type(value).__mro__ if "__call__" in vars(each)), None)
        new_call = self._of(call, type(value).__name__, depth)
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
        replaced = {name: new for name, old in read.items() if (new := self._of(old, name, depth)) is not old}
        names = code.co_varnames[: code.co_argcount][::-1]  # the last ones have defaults
        defaults = self._all(function.__defaults__ or (), names[: len(function.__defaults__ or ())][::-1], depth)
        keywords = {key: self._of(item, key, depth) for key, item in (function.__kwdefaults__ or {}).items()}
        changed = [new is not old for new, old in zip(cells, function.__closure__ or (), strict=True)]
        changed += [defaults is not (function.__defaults__ or ()), bool(replaced)]
        changed += [new is not (function.__kwdefaults__ or {})[key] for key, new in keywords.items()]
        if not any(changed):
            return function
        everything = {**function.__globals__, **replaced} if replaced else function.__globals__
        made = types.FunctionType(code, everything, function.__name__, defaults or None, tuple(cells))
        made.__kwdefaults__ = keywords or None
        made.__qualname__ = function.__qualname__
        return made

    def _cell(self, cell: Any, name: str, depth: int) -> Any:
        try:
            value = cell.cell_contents
        except ValueError:  # nothing was assigned yet
            return cell
        new = self._of(value, name, depth)
        return cell if new is value else types.CellType(new)


def _names_of(code: types.CodeType) -> set[str]:
    """The names that a function, and those written inside it, may read of its globals."""
    inner = (item for item in code.co_consts if isinstance(item, types.CodeType))
    return set(code.co_names).union(*(_names_of(item) for item in inner))


class _Attributes:
    """An object as its methods see it: arrays of it stand in as captures, everything else is its own."""

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
    """A name that a capture might have, of a variable's."""
    return re.sub(r"_+", "_", re.sub(r"\W", "_", name, flags=re.ASCII)).strip("_")[:48] or "array"


def capture_name(hint: str) -> str:
    """The name that a capture has, of a hint."""
    try:
        return check_name(hint)
    except SpecError:
        return check_name(f"{hint}_table" if hint[:1].isalpha() else f"table_{hint}")
