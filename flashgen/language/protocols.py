"""NumPy's, torch's and tensor methods' names for what the language can do, so that functions written for them trace.

`torch.where(q >= k, score, -float("inf"))`, `np.abs(q - k)` and `(q - k).abs()` all reach one table, keyed by the name
that the library gives the function. Neither library is imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from flashgen.errors import SpecError
from flashgen.language import functions as f
from flashgen.language.closures import indexed
from flashgen.language.dtypes import written_name
from flashgen.language.trace import ANSWERS, Traced, lift, literal_float, negate

_FLOATS = ("float", "float32", "float64", "double")
_INTEGERS = ("int", "int32", "int64", "long")
_NARROW = ("int8", "int16", "uint8", "short", "float16", "bfloat16", "half")


def _divide(a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode not in (None, "floor"):
        raise SpecError(f"rounding_mode={rounding_mode!r} is not part of the language: use to_int(a / b), or //")
    return a / b if rounding_mode is None else a // b


def _add(a: Any, b: Any, alpha: Any = 1) -> Any:
    return a + b if _is_one(alpha) else a + b * alpha


def _subtract(a: Any, b: Any, alpha: Any = 1) -> Any:
    return a - b if _is_one(alpha) else a - b * alpha


def _is_one(alpha: Any) -> bool:
    return isinstance(alpha, int) and alpha == 1


def _where(condition: Any, a: Any = None, b: Any = None) -> Traced:
    if a is None or b is None:
        raise SpecError("where() with one argument finds positions in an array; give where(condition, a, b)")
    return f.where(condition, a, b)


def _clamp(x: Any, min: Any = None, max: Any = None, **aliases: Any) -> Traced:
    bounds = {"a_min": min, "a_max": max, **aliases}
    if set(bounds) != {"a_min", "a_max"}:
        raise SpecError(f"clamp() takes a low and a high bound, got {', '.join(aliases)}")
    return f.clamp(x, bounds["a_min"], bounds["a_max"])


def _logical(symbol: str) -> Callable[[Any, Any], Any]:
    """and, or, xor of truth values: a number is true if it is not 0."""

    def combine(a: Any, b: Any) -> Any:
        a, b = _truth(a), _truth(b)
        return a & b if symbol == "&" else a | b if symbol == "|" else a ^ b

    return combine


def _truth(x: Any) -> Traced:
    x = Traced(lift(x))
    return x if x.kind == "bool" else x != 0


def _bitwise_not(x: Any) -> Any:
    x = Traced(lift(x))
    return x ^ -1 if x.kind == "int" else negate(x)


def _filled(value: float | None) -> Callable[..., Traced]:
    """`b.new_ones((), dtype=torch.bool)`, `torch.zeros_like(score)`: a constant, of x's kind if no dtype is given."""

    def make(
        x: Traced, *arguments: Any, dtype: Any = None, device: Any = None, size: Any = (), **_layout: Any
    ) -> Traced:
        arguments = (*arguments, *(() if size == () else (size,)))
        if value is None:
            *arguments, number = arguments  # type: ignore[assignment]
        else:
            number = value
        if any(_is_shape(item) for item in arguments):
            raise SpecError(f"a traced value is one number: its constants have shape (), not {arguments}")
        return _to(Traced(lift(number)), dtype if dtype is not None else x.kind)

    return make


def _is_shape(item: Any) -> bool:
    return not (isinstance(item, (tuple, list)) and len(item) == 0)


def _full_like(x: Traced, fill_value: Any, **keywords: Any) -> Traced:
    return _filled(None)(x, fill_value, **keywords)


def _to(x: Traced, *arguments: Any, dtype: Any = None, **_placement: Any) -> Traced:
    """x.to(dtype): float32, int32 or bool. Placement is ignored; narrower types, which round, are refused."""
    for item in (*arguments, dtype):
        if isinstance(item, Traced):
            return _to(x, item.kind)
        name = written_name(item) if item is not None and not isinstance(item, bool) else ""
        if name in _FLOATS:
            return x if x.kind == "float" else f.to_float(x)
        if name in _INTEGERS:
            return x if x.kind == "int" else f.to_int(x)
        if name == "bool":
            return _truth(x)
        if name in _NARROW:
            raise SpecError(
                f"conversion to {name} is not part of the language: values are int32 and float32; give one of these"
            )
    return x


def _minimum_of(x: Any, y: Any = None) -> Traced:
    if y is None:
        raise SpecError("min() of one traced value reduces nothing; use minimum(a, b)")
    return f.minimum(x, y)


def _maximum_of(x: Any, y: Any = None) -> Traced:
    if y is None:
        raise SpecError("max() of one traced value reduces nothing; use maximum(a, b)")
    return f.maximum(x, y)


def _ceil(x: Any) -> Traced:
    return -f.floor(-Traced(lift(x)))


def _trunc(x: Any) -> Traced:
    """Towards zero, a float; not by way of an integer, which holds less."""
    x = f.to_float(x)
    return f.where(x < 0.0, -f.floor(-x), f.floor(x))


# Every name under which torch or NumPy know a function that the language has.
# fmt: off
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": _add, "sub": _subtract, "subtract": _subtract, "mul": lambda a, b: a * b, "multiply": lambda a, b: a * b,
    "div": _divide, "divide": _divide, "true_divide": _divide, "floor_divide": lambda a, b: a // b,
    "remainder": lambda a, b: a % b, "mod": lambda a, b: a % b, "rsub": lambda a, b: b - a,
    "neg": lambda x: -x, "negative": lambda x: -x, "positive": lambda x: x, "pow": lambda a, b: a**b,
    "power": lambda a, b: a**b, "float_power": lambda a, b: f.to_float(a) ** b, "square": lambda x: x * x,
    "eq": lambda a, b: a == b, "equal": lambda a, b: a == b, "ne": lambda a, b: a != b,
    "not_equal": lambda a, b: a != b, "lt": lambda a, b: a < b, "less": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "less_equal": lambda a, b: a <= b, "gt": lambda a, b: a > b,
    "greater": lambda a, b: a > b, "ge": lambda a, b: a >= b, "greater_equal": lambda a, b: a >= b,
    "bitwise_and": lambda a, b: a & b, "bitwise_or": lambda a, b: a | b, "bitwise_xor": lambda a, b: a ^ b,
    "bitwise_not": _bitwise_not, "invert": _bitwise_not,
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
    "bitwise_left_shift": lambda a, b: a << b, "left_shift": lambda a, b: a << b, "lshift": lambda a, b: a << b,
    "bitwise_right_shift": lambda a, b: a >> b, "right_shift": lambda a, b: a >> b, "rshift": lambda a, b: a >> b,
    "logical_and": _logical("&"), "logical_or": _logical("|"), "logical_xor": _logical("^"),
    "logical_not": lambda x: negate(_truth(x)),
    "where": _where, "clamp": _clamp, "clip": _clamp, "clamp_min": f.maximum,
    "clamp_max": lambda x, max: f.clamp(x, None, max),
    "minimum": f.minimum, "fmin": f.minimum, "min": _minimum_of, "maximum": f.maximum, "fmax": f.maximum,
    "max": _maximum_of, "abs": f.abs, "absolute": f.abs, "fabs": lambda x: f.abs(f.to_float(x)),
    "relu": lambda x: f.maximum(x, 0),
    "exp": f.exp, "exp2": f.exp2, "log": f.log, "log2": f.log2,
    "log10": lambda x: f.log2(x) * literal_float(0.3010299956639812),
    "tanh": f.tanh, "sigmoid": f.sigmoid, "expit": f.sigmoid, "sqrt": f.sqrt, "rsqrt": lambda x: 1.0 / f.sqrt(x),
    "reciprocal": lambda x: 1.0 / x, "sin": f.sin, "cos": f.cos, "floor": f.floor, "ceil": _ceil,
    "trunc": _trunc, "fix": _trunc,
    "ones_like": _filled(1), "zeros_like": _filled(0), "full_like": _full_like,
}
# fmt: on

# fmt: off
_METHODS: dict[str, Callable[..., Any]] = {
    "new_ones": _filled(1), "new_zeros": _filled(0), "new_full": _filled(None), "to": _to, "type": _to, "astype": _to,
    "float": f.to_float, "double": f.to_float, "int": f.to_int, "long": f.to_int, "bool": _truth,
    "contiguous": lambda x: x, "clone": lambda x: x, "detach": lambda x: x, "where": lambda x, c, y: f.where(c, x, y),
    "type_as": lambda x, other: _to(x, other), "logical_not": lambda x: negate(_truth(x)),
}
# fmt: on
_METHODS = {**FUNCTIONS, **_METHODS, **{name: partial(_to, dtype=name) for name in ("half", "bfloat16", "short")}}
# Attributes that helpers read before they make constants.
_ATTRIBUTES: dict[str, Any] = {"ndim": 0, "shape": (), "device": None}


def answer_libraries() -> None:
    """Has traced values answer NumPy, torch and tensors' methods by the tables of this module."""
    ANSWERS.update(method=method, numpy=call_numpy, torch=call_torch)


def method(value: Traced, name: str) -> Any:
    """What `value.name` is: a method of tensors that the language has. AttributeError for the rest."""
    if name in _ATTRIBUTES:
        return _ATTRIBUTES[name]
    if name == "dtype":
        return {"float": "float32", "int": "int32", "bool": "bool"}[value.kind]
    if name in _METHODS and not name.startswith("_"):
        return lambda *arguments, **keywords: _METHODS[name](value, *arguments, **keywords)
    raise AttributeError(f"a traced value has no attribute {name!r}: see flashgen.language for what can be traced")


def call_numpy(function: Any, how: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """A NumPy ufunc or function called with a traced value."""
    name = getattr(function, "__name__", str(function))
    if how != "__call__" or keywords.get("out") is not None:
        raise SpecError(f"numpy.{name}.{how} cannot be traced: it needs whole arrays")
    return _call("numpy", name, arguments, keywords)


def call_torch(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """A torch function, or a method of a torch tensor, called with a traced value."""
    name = getattr(function, "__name__", str(function))
    if name.startswith("__") and name.endswith("__"):  # Tensor.__rsub__ and the like; in-place ones make a new value
        name = name.strip("_")
        if name not in FUNCTIONS and name[:1] in ("r", "i") and name[1:] in FUNCTIONS:
            arguments = arguments[::-1] if name[0] == "r" else arguments
            name = name[1:]
    return _call("torch", name, arguments, keywords)


def _call(library: str, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    if name == "getitem":
        element = indexed(*arguments)
        if element is not None:
            return element
        raise SpecError(
            f"this {library} array cannot be indexed by a traced value: make it outside of the function, or declare "
            "flashgen.Tensor(name, dtype, ndim), index that, and give the array at the call"
        )
    if name not in FUNCTIONS:
        raise SpecError(f"{library}.{name} cannot be traced; known: {', '.join(sorted(FUNCTIONS))}")
    # NumPy's and torch's own scalars become traced, so that Python's operators on them build nodes.
    lifted = [_lifted(argument) for argument in arguments]
    try:
        return FUNCTIONS[name](*lifted, **keywords)
    except TypeError as error:
        raise SpecError(
            f"{library}.{name} called with {', '.join(keywords) or 'these arguments'} cannot be traced: {error}"
        ) from None


def _lifted(argument: Any) -> Any:
    """Arrays (of one number, else SpecError) made traced; Python's own numbers, None and shapes as they are."""
    return Traced(lift(argument)) if hasattr(argument, "shape") and not isinstance(argument, Traced) else argument
