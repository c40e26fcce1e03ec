"""Maps names of NumPy and torch functions and of tensor methods to the language, so that they can be traced."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from flashgen.dtypes import written_name
from flashgen.errors import SpecError
from flashgen.language import elementary as f
from flashgen.language import pointwise
from flashgen.language.bound import dtype_read, is_array, wants_gradient
from flashgen.language.captures import Leaf, array_leaf, element
from flashgen.language.rows import ROW_ANSWERS, ComputedRow, Row, dot, map_columns, reduce_columns
from flashgen.language.trace import ANSWERS, HANDLED, Traced, detach, lift, literal_float, negate, number_of

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


def _clamp(x: Any, min: Any = None, max: Any = None, a_min: Any = None, a_max: Any = None) -> Traced:
    return f.clamp(x, a_min if min is None else min, a_max if max is None else max)


def _logical(symbol: str) -> Callable[[Any, Any], Any]:
    """Returns the function for a logical and, or, xor. A number is true if it is not 0."""

    def combine(a: Any, b: Any) -> Any:
        a, b = _truth(a), _truth(b)
        return a & b if symbol == "&" else a | b if symbol == "|" else a ^ b

    return combine


def _truth(x: Any) -> Traced:
    x = lift(x)
    return x if x.kind == "bool" else x != 0


def _bitwise_not(x: Any) -> Any:
    x = lift(x)
    return x ^ -1 if x.kind == "int" else negate(x)


def _filled(value: float | None) -> Callable[..., Traced]:
    """Returns the function for `b.new_ones((), dtype=torch.bool)` or `torch.zeros_like(score)`.

    It creates a constant, of the kind of x if no dtype is given. With `value` None, the last argument is the value.
    """

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
        return _to(lift(number), dtype if dtype is not None else x.kind)

    return make


def _is_shape(item: Any) -> bool:
    return not (isinstance(item, (tuple, list)) and len(item) == 0)


def _full_like(x: Traced, fill_value: Any, **keywords: Any) -> Traced:
    return _filled(None)(x, fill_value, **keywords)


def _to(x: Traced, *arguments: Any, dtype: Any = None, **_placement: Any) -> Traced:
    """Converts x to float32, int32 or bool. Ignores devices. Refuses narrower types, which would round."""
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


def _binary_minimum(x: Any, y: Any = None) -> Traced:
    if y is None:
        raise SpecError("min() of one traced value reduces nothing; use minimum(a, b)")
    return f.minimum(x, y)


def _binary_maximum(x: Any, y: Any = None) -> Traced:
    if y is None:
        raise SpecError("max() of one traced value reduces nothing; use maximum(a, b)")
    return f.maximum(x, y)


def _ceil(x: Any) -> Traced:
    return -f.floor(-lift(x))


def _trunc(x: Any) -> Traced:
    """Rounds towards zero. The result is a float, computed without an integer, whose range is smaller."""
    x = f.to_float(x)
    return f.where(x < 0.0, -f.floor(-x), f.floor(x))


# All names that torch or NumPy use for functions that the language has.
# fmt: off
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": _add, "sub": _subtract, "subtract": _subtract, "mul": lambda a, b: a * b, "multiply": lambda a, b: a * b,
    "div": _divide, "divide": _divide, "true_divide": _divide, "floor_divide": lambda a, b: a // b,
    "truediv": _divide, "floordiv": lambda a, b: a // b,
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
    "where": _where, "clamp": _clamp, "clip": _clamp, "clamp_min": lambda x, min: f.clamp(x, min, None),
    "clamp_max": lambda x, max: f.clamp(x, None, max),
    "minimum": f.minimum, "fmin": f.minimum, "min": _binary_minimum, "maximum": f.maximum, "fmax": f.maximum,
    "max": _binary_maximum, "abs": f.abs, "absolute": f.abs, "fabs": lambda x: f.abs(f.to_float(x)),
    "relu": pointwise.relu, "silu": pointwise.silu, "gelu": pointwise.gelu, "softplus": pointwise.softplus,
    "leaky_relu": pointwise.leaky_relu, "elu": pointwise.elu, "erf": pointwise.erf,
    "erfc": lambda x: 1.0 - pointwise.erf(x), "tan": lambda x: f.sin(x) / f.cos(x), "log1p": lambda x: f.log(1.0 + x),
    "expm1": lambda x: f.exp(x) - 1.0,
    "sinh": lambda x: 0.5 * (f.exp(x) - f.exp(-x)), "cosh": lambda x: 0.5 * (f.exp(x) + f.exp(-x)),
    "sign": pointwise.sign, "sgn": pointwise.sign, "round": pointwise.round, "fmod": pointwise.fmod,
    "isnan": lambda x: x != x, "isinf": lambda x: f.abs(x) == literal_float(math.inf),
    "isfinite": lambda x: f.abs(x) < literal_float(math.inf),
    "masked_fill": lambda x, mask, value: f.where(mask, value, x),
    "detach": detach, "clone": lambda x: x, "contiguous": lambda x: x, "view_as": lambda x, other: x,
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
    "where": lambda x, c, y: f.where(c, x, y), "tensor_where": lambda x, c, y: f.where(c, x, y),
    "type_as": lambda x, other: _to(x, other), "logical_not": lambda x: negate(_truth(x)),
}
# fmt: on
_METHODS = {**FUNCTIONS, **_METHODS, **{name: partial(_to, dtype=name) for name in ("half", "bfloat16", "short")}}
_TORCH_FUNCTIONS = {**_METHODS, **FUNCTIONS}  # torch passes methods of tensors under their names, too
# Reductions of a row to a value. For a single value they return the value, as for a tensor without dimensions.
# fmt: off
_REDUCTIONS: dict[str, Callable[[Row], Traced]] = {
    "any": lambda row: reduce_columns(lambda a, b: a | b, map_columns(_truth, row)),
    "all": lambda row: reduce_columns(lambda a, b: a & b, map_columns(_truth, row)),
    "sum": lambda row: reduce_columns(lambda a, b: a + b, _numeric(row)),
    "mean": lambda row: reduce_columns(lambda a, b: a + b, _numeric(row)) / float(len(row.elements())),
    "prod": lambda row: reduce_columns(lambda a, b: a * b, _numeric(row)),
    "max": lambda row: reduce_columns(f.maximum, row), "amax": lambda row: reduce_columns(f.maximum, row),
    "min": lambda row: reduce_columns(f.minimum, row), "amin": lambda row: reduce_columns(f.minimum, row),
}
# fmt: on
# Attributes that helper functions read before they create constants.
_ATTRIBUTES: dict[str, Any] = {"ndim": 0, "shape": (), "device": None, "requires_grad": False}
DTYPES: dict[str, Any] = {"float": "float32", "int": "int32", "bool": "bool"}
"""The dtype that a traced value reports, by its kind. `flashgen.torch` replaces these by torch's dtypes."""


def answer_libraries() -> None:
    """Installs the functions of this module as the handlers of traced values and rows."""
    ANSWERS.update(method=method, numpy=call_numpy, torch=call_torch, array=zero_dimensional)
    ROW_ANSWERS.update(method=method, torch=call_torch)
    for name in {"dtype", *_ATTRIBUTES}.union(_METHODS, _ARRAY_FUNCTIONS, _REDUCTIONS):
        setattr(Traced, name, property(partial(_tensor_attribute, name)))


def _tensor_attribute(name: str, value: Traced) -> Any:
    return value.tensor_attribute(name)


def method(value: Any, name: str) -> Any:
    """Returns an attribute or tensor method of a traced value or row. Raises AttributeError for unknown names."""
    if name in _ATTRIBUTES:
        return _ATTRIBUTES[name]
    if name == "dtype":
        return DTYPES[value.elements()[0].kind if isinstance(value, Row) else value.kind]
    if not name.startswith("_") and is_supported(name):
        return lambda *arguments, **keywords: call("Tensor", name, _METHODS, (value, *arguments), keywords)
    raise AttributeError(f"a traced value has no attribute {name!r}: see flashgen.language for what can be traced")


def call_numpy(function: Any, how: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Handles a NumPy ufunc or function that is called with a traced value."""
    name = getattr(function, "__name__", str(function))
    if how != "__call__" or keywords.get("out") is not None:
        raise SpecError(f"numpy.{name}.{how} cannot be traced: it needs arrays, not elements")
    return call("numpy", name, FUNCTIONS, arguments, keywords)


def call_torch(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Handles a torch function, or a method of a torch tensor, that is called with a traced value."""
    handler = HANDLED.get(function)
    if handler is not None:
        return handler(*arguments, **keywords)
    return call_torch_named(getattr(function, "__name__", str(function)), arguments, keywords)


def call_torch_named(name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Handles a torch function or method, given its name."""
    name, is_reflected = plain_name(name)
    return call("torch", name, _TORCH_FUNCTIONS, arguments[::-1] if is_reflected else arguments, keywords)


@cache
def plain_name(name: str) -> tuple[str, bool]:
    """Returns the name of a torch function in the language, and whether its operands are reversed.

    For `__rsub__` it returns ("sub", True). In-place operators such as `__iadd__` create a new value.
    """
    if not (name.startswith("__") and name.endswith("__")):
        return name, False
    name = name.strip("_")
    if is_supported(name) or name[:1] not in ("r", "i") or not is_supported(name[1:]):
        return name, False
    return name[1:], name[0] == "r"


def is_supported(name: str) -> bool:
    """Returns whether the language has a function, or a method of tensors, of this name."""
    return name in _METHODS or name in _ARRAY_FUNCTIONS or name in _REDUCTIONS


def call(
    library: str, name: str, table: dict[str, Callable[..., Any]], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Any:
    """Calls the function of a name: of arrays and rows, or from a table. `library` is its prefix in messages."""
    try:
        if name in _ARRAY_FUNCTIONS:
            return _ARRAY_FUNCTIONS[name](*arguments, **keywords)
        if name in _REDUCTIONS and _is_reduction(name, arguments, keywords):
            return _reduce(name, arguments[0])
        if name in table:
            return _apply_elementwise(table[name], arguments, keywords)
    except TypeError as error:
        raise SpecError(
            f"{library}.{name} called with {', '.join(keywords) or 'these arguments'} cannot be traced: {error}"
        ) from None
    raise SpecError(f"{library}.{name} cannot be traced; known: {', '.join(sorted(FUNCTIONS))}")


def _apply_elementwise(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Calls a function on values, or on each column of rows. Lifts numbers first, so that operators are recorded."""
    values = []
    for argument in arguments:
        if isinstance(argument, Row):
            return _apply_to_columns(function, arguments, keywords)
        values.append(lift(argument) if _is_value(argument) else argument)
    return function(*values, **keywords)


def _apply_to_columns(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Row:
    rows = [argument for argument in arguments if _is_value(argument)]
    others = [argument for argument in arguments if not _is_value(argument)]
    return map_columns(lambda *columns: function(*columns, *others, **keywords), *rows)


def _is_value(argument: Any) -> bool:
    """Returns whether an argument is a number, a traced value or an array, and not a dtype, shape, text or None."""
    if isinstance(argument, (Traced, Row, bool, int, float)):
        return True
    return hasattr(argument, "ndim") and hasattr(argument, "shape")


def _is_reduction(name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Returns whether a call reduces its first argument. max and min of two values do not."""
    dims = [*arguments[1:], *[keywords[key] for key in ("dim", "axis") if key in keywords]]
    if name in ("max", "min") and not isinstance(arguments[0], Row):
        return False
    for dim in dims:
        if dim not in (None, -1, 0, (-1,), [-1]):
            raise SpecError(f"{name} of a row along {dim!r}: a row has one dimension, -1")
    return True


def _reduce(name: str, value: Any) -> Traced:
    value = value if isinstance(value, Row) else ComputedRow((lift(value),))
    return _REDUCTIONS[name](value)


def _numeric(row: Row) -> Row:
    return map_columns(lambda x: f.to_int(x) if x.kind == "bool" else x, row)


def _unsqueeze(x: Any, dim: Any = None) -> Any:
    if isinstance(x, Row) or dim not in (-1, 0):
        raise SpecError(f"unsqueeze({dim!r}): a traced value becomes a row of one column by unsqueeze(-1)")
    return ComputedRow((lift(x),))


def _squeeze(x: Any, dim: Any = None) -> Any:
    return x if isinstance(x, Traced) else x.elements()[0] if len(x.elements()) == 1 else x


def _reshape(x: Any, *shape: Any) -> Any:
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    if isinstance(x, Traced) and len(sizes) == 0:
        return x
    if tuple(sizes) in ((-1,), (1,)) and (isinstance(x, Traced) or len(x.elements()) == 1):
        return ComputedRow((x if isinstance(x, Traced) else x.elements()[0],))
    if isinstance(x, Row) and len(sizes) == 0:
        return _squeeze(x)
    raise SpecError(f"a traced value of shape {tuple(getattr(x, 'shape', ()))} has no shape {tuple(sizes)}")


@cache
def leaf_of(dtype: Any, ndim: int, has_gradient: bool) -> Leaf:
    """Returns the leaf of arrays of a dtype of any library. has_gradient: see `wants_gradient`."""
    read = dtype_read(written_name(dtype), "table")
    return array_leaf(read, ndim, has_gradient and "float" in read)


def array_element(array: Any, index: Any) -> Any:
    """Returns the element of an array at traced indices, for libraries that ask the index."""
    if isinstance(array, Row):
        return array[_plain(index)]
    if not is_array(array):
        raise SpecError(
            f"{type(array).__name__} cannot be indexed by a traced value: make an array outside of the function, or "
            "declare flashgen.Tensor(name, dtype, ndim), index that, and give the array at the call"
        )
    leaf = leaf_of(array.dtype, array.ndim, wants_gradient(array))
    return element(leaf, array, index if isinstance(index, tuple) else (index,))


def _plain(index: Any) -> Any:
    number = number_of(index) if isinstance(index, Traced) else None
    return index if number is None else number


def zero_dimensional(array: Any) -> Traced:
    """Returns the number that a zero-dimensional array holds at the call."""
    found: Traced = array_element(array, 0)
    return found


def _gather(array: Any, dim: int, index: Any) -> Any:
    if dim not in (0, -1) or array.ndim != 1:
        raise SpecError(f"gather along {dim} of {array.ndim} dimensions: index the array, array[i, j]")
    return array_element(array, index)


def _index_select(array: Any, dim: int, index: Any) -> Any:
    if dim not in (0, -array.ndim):
        raise SpecError(f"index_select along dimension {dim}: index the array, array[i, j]")
    return array_element(array, index)


def _embedding(
    index: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Any:  # fmt: skip
    if max_norm is not None or scale_grad_by_freq or (padding_idx is not None and weight.requires_grad):
        raise SpecError("an embedding with padding_idx, max_norm or scale_grad_by_freq: index its weight instead")
    return array_element(weight, index)


_ARRAY_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "getitem": array_element, "gather": _gather, "index_select": _index_select, "embedding": _embedding,
    "take": lambda array, index: array_element(array.reshape(-1), index),
    "select": lambda array, dim, index: _index_select(array, dim, index),
    "unsqueeze": _unsqueeze, "squeeze": _squeeze, "view": _reshape, "reshape": _reshape,
    **dict.fromkeys(("dot", "inner", "vecdot", "matmul"), lambda *rows, **_dim: dot(*rows)),
}  # fmt: skip
