"""The expression nodes of the language: inert SymPy trees over integers, floats and booleans.

An operation never evaluates itself. SymPy's own `Add` folds `(s + 1e8) - 1e8` to `s` and decides `floor(q/4) ==
floor(k/4)` by structure, and either would change the result of a kernel. The nodes are ordinary SymPy trees, so
`xreplace`, `free_symbols`, `cse`, `srepr` and `diff` work on them.

The table `OPERATIONS` lists all operations. Each module that gives them a meaning (NumPy evaluation, intervals, CUDA
text, derivatives) has a table with the same classes as keys, and a test compares the keys.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

import sympy

Kind = Literal["bool", "int", "float"]


class Operation(sympy.Expr):
    """An inert operation. `args` are its operands, in order. Subclasses define the arity and the kind of the result."""

    arity: int
    is_commutative = True

    def __new__(cls, *operands: Any) -> Operation:
        if len(operands) != cls.arity:
            raise TypeError(f"{cls.__name__} takes {cls.arity} operands, got {len(operands)}")
        # Strict, because SymPy would evaluate a string as Python.
        return sympy.Basic.__new__(cls, *(sympy.sympify(operand, strict=True) for operand in operands))

    @classmethod
    def kind_of_result(cls, *operands: Kind) -> Kind:
        """Returns the kind of the result for operands of these kinds."""
        raise NotImplementedError

    @cached_property  # cached: operands are shared, so recomputing would visit a tree instead of a graph
    def kind(self) -> Kind:
        return self.kind_of_result(*(kind_of(operand) for operand in self.args))

    # SymPy chooses a printer by class name, and would print this Add with the rules of its own Add.
    def _sympyrepr(self, printer: Any) -> str:
        return f"{type(self).__name__}({', '.join(printer._print(operand) for operand in self.args)})"

    _sympystr = _sympyrepr


class Arithmetic(Operation):
    """An operation with a float result if any operand is a float, else an integer result. A bool counts as 0 or 1."""

    @classmethod
    def kind_of_result(cls, *operands: Kind) -> Kind:
        return "float" if "float" in operands else "int"


class Bitwise(Operation):
    """An operation with integer operands and an integer result."""

    @classmethod
    def kind_of_result(cls, *operands: Kind) -> Kind:
        return "int"


class Transcendental(Operation):
    """An operation with a float result for operands of any kind."""

    @classmethod
    def kind_of_result(cls, *operands: Kind) -> Kind:
        return "float"


class Truth(Operation):
    """An operation with a boolean result: a comparison or a logical operation."""

    @classmethod
    def kind_of_result(cls, *operands: Kind) -> Kind:
        return "bool"


def _operation(name: str, base: type[Operation], arity: int, doc: str) -> type[Operation]:
    return type(name, (base,), {"arity": arity, "__doc__": doc, "__module__": __name__})


Add = _operation("Add", Arithmetic, 2, "a + b")
Sub = _operation("Sub", Arithmetic, 2, "a - b")
Mul = _operation("Mul", Arithmetic, 2, "a * b")
Neg = _operation("Neg", Arithmetic, 1, "-a")
Abs = _operation("Abs", Arithmetic, 1, "|a|")
Minimum = _operation("Minimum", Arithmetic, 2, "min(a, b)")
Maximum = _operation("Maximum", Arithmetic, 2, "max(a, b)")
FloorDiv = _operation("FloorDiv", Arithmetic, 2, "floor(a / b), as Python's //")
FloorMod = _operation("FloorMod", Arithmetic, 2, "a - b * floor(a / b), as Python's %")
ShiftLeft = _operation("ShiftLeft", Bitwise, 2, "a << b")
ShiftRight = _operation("ShiftRight", Bitwise, 2, "a >> b, arithmetic")
BitAnd = _operation("BitAnd", Bitwise, 2, "a & b of integers")
BitOr = _operation("BitOr", Bitwise, 2, "a | b of integers")
BitXor = _operation("BitXor", Bitwise, 2, "a ^ b of integers")
Divide = _operation("Divide", Transcendental, 2, "a / b, always a float, as Python's /")
ToFloat = _operation("ToFloat", Transcendental, 1, "float(a)")
ToInt = _operation("ToInt", Bitwise, 1, "int(a), towards zero")
Floor = _operation("Floor", Transcendental, 1, "floor(a), a float")
Exp = _operation("Exp", Transcendental, 1, "e**a")
Exp2 = _operation("Exp2", Transcendental, 1, "2**a")
Log = _operation("Log", Transcendental, 1, "natural logarithm")
Log2 = _operation("Log2", Transcendental, 1, "logarithm to base 2")
Tanh = _operation("Tanh", Transcendental, 1, "hyperbolic tangent")
FastTanh = _operation("FastTanh", Transcendental, 1, "tanh by one hardware instruction, to a relative error of 2**-11")
Sigmoid = _operation("Sigmoid", Transcendental, 1, "1 / (1 + e**-a)")
Sqrt = _operation("Sqrt", Transcendental, 1, "square root")
Sin = _operation("Sin", Transcendental, 1, "sine")
Cos = _operation("Cos", Transcendental, 1, "cosine")
Detach = _operation("Detach", Transcendental, 1, "a with a derivative of 0, as Tensor.detach of torch")
Surrogate = _operation("Surrogate", Transcendental, 3, "a with a custom derivative: that of a plus c times that of b")
Equal = _operation("Equal", Truth, 2, "a == b")
NotEqual = _operation("NotEqual", Truth, 2, "a != b")
Less = _operation("Less", Truth, 2, "a < b")
LessEqual = _operation("LessEqual", Truth, 2, "a <= b")
Greater = _operation("Greater", Truth, 2, "a > b")
GreaterEqual = _operation("GreaterEqual", Truth, 2, "a >= b")
And = _operation("And", Truth, 2, "a and b of booleans")
Or = _operation("Or", Truth, 2, "a or b of booleans")
Xor = _operation("Xor", Truth, 2, "a != b of booleans")
Not = _operation("Not", Truth, 1, "not a of a boolean")


class Where(Operation):
    """Selects b where the condition a holds, else c."""

    arity = 3

    @classmethod
    def kind_of_result(cls, *operands: Kind) -> Kind:
        branches = operands[1:]
        return "float" if "float" in branches else "int" if "int" in branches else "bool"


class Capture(sympy.AtomicExpr):
    """A leaf: an array (ndim >= 1) or a number (ndim == 0) that calls supply by name. `dtype` is NumPy's name."""

    name: str
    dtype: str
    ndim: int
    grad: bool
    is_commutative = True

    def __new__(cls, name: str, dtype: str, ndim: int, grad: bool = False) -> Capture:
        self = sympy.AtomicExpr.__new__(cls)
        self.name, self.dtype, self.ndim, self.grad = name, dtype, ndim, grad
        return self

    def _hashable_content(self) -> tuple[Any, ...]:
        return (self.name, self.dtype, self.ndim, self.grad)

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.name, self.dtype, self.ndim, self.grad)

    def _sympystr(self, _printer: Any) -> str:
        return self.name

    def _sympyrepr(self, _printer: Any) -> str:
        return f"Capture({self.name!r}, {self.dtype!r}, {self.ndim}, {self.grad})"

    @property
    def kind(self) -> Kind:
        return "float" if "float" in self.dtype else "bool" if self.dtype == "bool" else "int"


class Load(Operation):
    """An element of a captured array: Load(capture, index, ...). Each index is clamped to its dimension."""

    def __new__(cls, capture: Capture, *indices: Any) -> Load:
        if len(indices) != capture.ndim:
            raise TypeError(f"capture {capture.name!r} has {capture.ndim} dimensions, indexed with {len(indices)}")
        return sympy.Basic.__new__(cls, capture, *(sympy.sympify(index, strict=True) for index in indices))

    @property
    def capture(self) -> Capture:
        return self.args[0]

    @property
    def indices(self) -> tuple[sympy.Basic, ...]:
        return self.args[1:]

    @cached_property
    def kind(self) -> Kind:
        return self.capture.kind


# The free symbols of a traced function.
BATCH, HEAD, QUERY, KEY = sympy.symbols("b h q k", integer=True)
LEN_Q, LEN_K = sympy.symbols("len_q len_k", integer=True)
SCORE = sympy.Symbol("score", real=True)
INDICES = (BATCH, HEAD, QUERY, KEY)

# Limits of a call: the largest length, for which int32 holds sums and differences of two positions; the most batches
# and heads, which are the y and z extents of a grid; and how far an index may exceed its length in the last tile.
LONGEST, MAX_HEADS, OVERHANG = 10**9, 65535, 4096

# From the name in JSON to the class. Tables over the operations are written in this order.
OPERATIONS: dict[str, type[Operation]] = {
    cls.__name__: cls
    for cls in (
        *(Add, Sub, Mul, Neg, Abs, Minimum, Maximum, FloorDiv, FloorMod, ShiftLeft, ShiftRight, BitAnd, BitOr, BitXor),
        *(Divide, ToFloat, ToInt, Floor, Exp, Exp2, Log, Log2, Tanh, FastTanh, Sigmoid, Sqrt, Sin, Cos),
        *(Detach, Surrogate),
        *(Equal, NotEqual, Less, LessEqual, Greater, GreaterEqual, And, Or, Xor, Not, Where, Load),
    )
}


def kind_of(node: sympy.Basic) -> Kind:
    """Returns the kind of a node's value: "bool", "int" or "float"."""
    if isinstance(node, (Operation, Capture)):
        return node.kind
    if node in (sympy.true, sympy.false):
        return "bool"
    if node == SCORE or isinstance(node, sympy.Float) or node in (sympy.oo, -sympy.oo):
        return "float"
    if isinstance(node, (sympy.Symbol, sympy.Integer)):
        return "int"
    raise TypeError(f"not an expression of the language: {node!r}")


def captures_of(*nodes: sympy.Basic) -> tuple[Capture, ...]:
    """Returns the captures that the nodes read, sorted by name."""
    found = {capture for node in nodes for capture in node.atoms(Capture)}
    return tuple(sorted(found, key=lambda capture: capture.name))
