"""Functions that close over arrays, or read them as globals, traced as they stand.

A traced index cannot index an array of NumPy. So a function runs with stand-ins in the place of the arrays that its
cells, globals, defaults and the functions which it calls hold: indexed by traced values they become captures.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import sympy

from flashgen.errors import SpecError
from flashgen.language.bound import BoundArray, fresh, is_array, renamed
from flashgen.language.captures import Tensor, check_name, index_capture
from flashgen.language.operations import Capture, captures_of
from flashgen.language.trace import Traced

UNTIL_NAMED = "bound__"  # no capture that a user declares may have two underscores
_DEEPEST = 16
_LIBRARIES = ("flashgen", "torch", "numpy", "jax", "jaxlib", "cupy", "math", "operator", "builtins", "functools")


class Found:
    """The arrays that the function which is being traced has read, by the names that stand for them until it ends."""

    def __init__(self) -> None:
        self.arrays: dict[str, BoundArray] = {}

    def capture_of(self, array: BoundArray, hint: str) -> Capture:
        """The capture that stands for an array: one, however often and by whichever name it is read."""
        for name, known in self.arrays.items():
            if known.original is array.original:
                return Capture(name, known.dtype, known.ndim, known.grad)
        name = fresh(f"{UNTIL_NAMED}{hint}", self.arrays)
        self.arrays[name] = array
        return Capture(name, array.dtype, array.ndim, array.grad)

    def named(self, node: sympy.Basic) -> tuple[sympy.Basic, dict[str, BoundArray]]:
        """The traced expression with names that captures may have, and the arrays by these names."""
        read = {capture.name for capture in captures_of(node)}
        taken, arrays = read - self.arrays.keys(), {}
        for name, array in self.arrays.items():
            if name in read:
                final = fresh(_capture_name(name.removeprefix(UNTIL_NAMED)), taken)
                node, arrays[final] = renamed(node, name, final), array
                taken = taken | {final}
        return node, arrays


_FOUND: ContextVar[Found | None] = ContextVar("arrays of the function that is being traced", default=None)


@contextmanager
def finding() -> Iterator[Found]:
    """Collects the arrays that functions read which are traced inside."""
    found = Found()
    token = _FOUND.set(found)
    try:
        yield found
    finally:
        _FOUND.reset(token)


class BoundTensor(Tensor):
    """What stands for an array in a traced function: a Tensor whose array is known. Its shape and dtype are there."""

    def __init__(self, array: Any, hint: str) -> None:
        self.bound, self.hint = BoundArray(array, hint), hint
        self.capture = Capture(f"{UNTIL_NAMED}{hint}", self.bound.dtype, self.bound.ndim, self.bound.grad)

    @property
    def name(self) -> str:
        return self.hint

    def __getitem__(self, index: Any) -> Any:
        found = _FOUND.get()
        if found is None:
            raise SpecError(f"the array {self.hint!r} stands for captured values: index it in a traced function")
        row = int(self.bound.array.shape[-1])
        return index_capture(found.capture_of(self.bound, self.hint), index, row)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("bound", "hint", "capture"):
            raise AttributeError(name)
        return getattr(self.bound.original, name)

    def __len__(self) -> int:
        return int(self.bound.original.shape[0])

    def __repr__(self) -> str:
        return f"<the array {self.hint!r}, {self.bound.dtype} {tuple(self.bound.original.shape)}>"


def bind_where_traced(array: BoundArray, hint: str) -> Capture:
    """The capture of a mask's or score's own array in the function that calls it, while that is being traced."""
    found = _FOUND.get()
    if found is None:
        raise SpecError(f"the array {hint!r} stands for captured values: call its mask or score in a traced function")
    return found.capture_of(array, hint)


def indexed(array: Any, index: Any) -> Any:
    """An element of an array at traced indices, where a library asks the index; None where nothing is being traced."""
    if _FOUND.get() is None or not is_array(array):
        return None
    return BoundTensor(array, "table")[index]


def standing_in(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with stand-ins for the arrays that it, and the functions it calls, hold. Itself where none does."""
    return _StandIns().of(function, "array", _DEEPEST)


def what_it_reads(function: Any) -> tuple[Any, ...]:
    """What a function, and those that it calls, would be traced with: its code, and the values it holds or reads.

    Two looks at a function are equal if nothing that tracing saw is another object; who keeps one keeps the objects, so
    that none is made where another was.
    """
    seen: list[Any] = []
    _look(function, seen, _DEEPEST)
    return tuple(seen)


class SameObject:
    """A value that equals itself alone, and is kept alive."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObject) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _look(value: Any, seen: list[Any], depth: int) -> None:
    if isinstance(value, (str, int, float, bool, type(None))):
        seen.append((type(value), value))
        return
    seen.append(SameObject(value.__code__ if isinstance(value, types.FunctionType) else value))
    if depth == 0 or is_array(value) or isinstance(value, (type, types.ModuleType, Tensor, Traced)):
        return
    inner: list[Any] = []
    if isinstance(value, types.FunctionType):
        if (value.__module__ or "").partition(".")[0] in _LIBRARIES and not value.__closure__:
            return
        inner = [_contents(cell) for cell in value.__closure__ or ()]
        inner += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        inner += [value.__globals__[name] for name in sorted(_names_of(value.__code__)) if name in value.__globals__]
    elif isinstance(value, types.MethodType):
        inner = [value.__func__, value.__self__]
    elif isinstance(value, functools.partial):
        inner = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, (tuple, list)):
        inner = list(value)
    elif isinstance(value, dict):
        inner = list(value.values())
    elif type(value).__module__.partition(".")[0] not in _LIBRARIES:
        inner = [*getattr(value, "__dict__", {}).values(), *_call_of(type(value))]
    known = {
        item.value for item in seen[:-1] if isinstance(item, SameObject) and isinstance(item.value, types.CodeType)
    }
    for item in inner:
        if not (isinstance(item, types.FunctionType) and item.__code__ in known and not item.__closure__):
            _look(item, seen, depth - 1)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned yet
        return None


def _call_of(cls: type) -> list[Any]:
    return [vars(each)["__call__"] for each in cls.__mro__ if "__call__" in vars(each)][:1]


class _StandIns:
    """Values as a traced function sees them."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}
        self._kept: list[Any] = []  # so that no number of `_known` is given to another object

    def of(self, value: Any, name: str, depth: int) -> Any:
        if isinstance(value, (Traced, Tensor, type, types.ModuleType, str, int, float, type(None))) or depth == 0:
            return value
        if id(value) not in self._known:
            self._kept.append(value)
            self._known[id(value)] = value  # what calls itself
            self._known[id(value)] = self._made(value, name, depth - 1)
        return self._known[id(value)]

    def _made(self, value: Any, name: str, depth: int) -> Any:
        if is_array(value):
            stand_in = BoundTensor(value, _hint(name))
            return stand_in if value.ndim else _Number(stand_in)
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        if isinstance(value, types.MethodType):
            function = self.of(value.__func__, name, depth)
            return types.MethodType(function, self.of(value.__self__, name, depth))
        if isinstance(value, functools.partial):
            arguments = self._all(value.args, (name,) * len(value.args), depth)
            keywords = {key: self.of(item, key, depth) for key, item in value.keywords.items()}
            return functools.partial(self.of(value.func, name, depth), *arguments, **keywords)
        if type(value) in (tuple, list):
            return self._all(value, (name,) * len(value), depth)
        if type(value) is dict:
            return {key: self.of(item, str(key), depth) for key, item in value.items()}
        return self._object(value, depth)

    def _all(self, values: Any, names: tuple[str, ...], depth: int) -> Any:
        made = [self.of(item, name, depth) for item, name in zip(values, names, strict=True)]
        changed = any(new is not old for new, old in zip(made, values, strict=True))
        return type(values)(made) if changed else values

    def _object(self, value: Any, depth: int) -> Any:
        """An object whose attributes hold arrays: a stand-in of which they are read, and which is called as it is."""
        if type(value).__module__.partition(".")[0] in _LIBRARIES or not hasattr(value, "__dict__"):
            return value
        held = {name: self.of(item, name, depth) for name, item in vars(value).items()}
        call = next(iter(_call_of(type(value))), None)
        if not any(item is not vars(value)[name] for name, item in held.items()) and not callable(value):
            return value
        return _Attributes(value, held, self.of(call, type(value).__name__, depth))

    def _function(self, function: types.FunctionType, depth: int) -> Any:
        if (function.__module__ or "").partition(".")[0] in _LIBRARIES and not function.__closure__:
            return function
        code = function.__code__
        cells = [
            self._cell(cell, name, depth)
            for cell, name in zip(function.__closure__ or (), code.co_freevars, strict=True)
        ]
        read = {name: function.__globals__[name] for name in _names_of(code) if name in function.__globals__}
        replaced = {name: new for name, old in read.items() if (new := self.of(old, name, depth)) is not old}
        names = code.co_varnames[: code.co_argcount][::-1]  # the last ones have defaults
        defaults = self._all(function.__defaults__ or (), names[: len(function.__defaults__ or ())][::-1], depth)
        keywords = {key: self.of(item, key, depth) for key, item in (function.__kwdefaults__ or {}).items()}
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
        value = _contents(cell)
        new = self.of(value, name, depth)
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


class _Number(Traced):
    """An array without dimensions: what it holds at the call."""

    def __init__(self, array: BoundTensor) -> None:
        self._array = array

    __slots__ = ("_array",)

    @property
    def node(self) -> sympy.Basic:
        return self._array[0].node


def _hint(name: str) -> str:
    """A name that a capture might have, of a variable's."""
    return re.sub(r"_+", "_", re.sub(r"\W", "_", name, flags=re.ASCII)).strip("_")[:48] or "array"


def _capture_name(hint: str) -> str:
    """The name that a capture has, of a hint."""
    try:
        return check_name(hint)
    except SpecError:
        return check_name(f"{hint}_table" if hint[:1].isalpha() else f"table_{hint}")
