"""Tracing of torch.autograd.Functions in score functions: the forward and, for the derivative, the backward."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.errors import SpecError
from flashgen.language import elementary as f
from flashgen.language import operations as ops
from flashgen.language.rows import Row
from flashgen.language.trace import Traced, apply, detach, lift


class _Context:
    """The `ctx` that setup_context and backward get in place of torch's."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()
        self.not_differentiable: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *_tensors: Any) -> None:
        """Forward-mode derivatives are not traced."""

    def mark_non_differentiable(self, *outputs: Any) -> None:
        self.not_differentiable = outputs

    def mark_dirty(self, *_tensors: Any) -> None:
        raise SpecError("an autograd Function inside a score function writes to its inputs: return a new value")

    def set_materialize_grads(self, _value: bool) -> None:
        """The one output always has a gradient."""


class _Gradient(Traced):
    """The gradient of a Function's output times a factor, which is the traced value itself.

    The operations here are those that are linear in the gradient, as a backward must be.
    """

    __slots__ = ()

    def _times(self, other: Any) -> _Gradient:
        if isinstance(other, _Gradient):
            raise _not_linear("a product of gradients")
        return _gradient(f.to_float(_factor(self) * lift(other)))

    def __mul__(self, other: Any) -> Traced:
        return self._times(other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Traced:
        return self._times(1.0 / lift(other))

    def __neg__(self) -> Traced:
        return _gradient(-_factor(self))

    def __add__(self, other: Any) -> Traced:
        return _gradient(_factor(self) + _term(other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Traced:
        return _gradient(_factor(self) - _term(other))

    def __rsub__(self, other: Any) -> Traced:
        return _gradient(_term(other) - _factor(self))

    def tensor_attribute(self, name: str) -> Any:
        if name in _LINEAR:
            return lambda *arguments, **keywords: _LINEAR[name](self, *arguments, **keywords)
        raise _not_linear(name)

    __getattr__ = tensor_attribute  # for names that the language does not have

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = getattr(function, "__name__", str(function)).strip("_")
        if name not in _LINEAR:
            raise _not_linear(name)
        return _LINEAR[name](*arguments, **(keywords or {}))


def _gradient(factor: Traced) -> _Gradient:
    return _Gradient(factor.text, factor.kind, factor.arrays, factor.numbers)


def _factor(gradient: _Gradient) -> Traced:
    return Traced(gradient.text, gradient.kind, gradient.arrays, gradient.numbers)


def _term(value: Any) -> Traced:
    """Returns the factor of a term that is added to a gradient. The term must be a gradient or 0."""
    if isinstance(value, _Gradient):
        return _factor(value)
    if isinstance(value, (int, float)) and value == 0:
        return lift(0.0)
    raise _not_linear("a sum with what is no gradient")


def _where(condition: Any, a: Any, b: Any) -> Any:
    return _gradient(f.where(condition, _term(a), _term(b)))


_LINEAR: dict[str, Any] = {
    "mul": lambda a, b: a * b, "multiply": lambda a, b: a * b, "div": lambda a, b: a / b, "neg": lambda a: -a,
    "true_divide": lambda a, b: a / b, "truediv": lambda a, b: a / b, "rmul": lambda a, b: a * b,
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "radd": lambda a, b: a + b, "rsub": lambda a, b: b - a,
    "where": _where, "masked_fill": lambda a, mask, value: _where(mask, value, a), "clone": lambda a: a,
    "contiguous": lambda a: a, "view_as": lambda a, other: a, "float": lambda a: a, "to": lambda a, *_placement: a,
    "zeros_like": lambda a: _gradient(lift(0.0)),
}  # fmt: skip


def _not_linear(what: str) -> SpecError:
    return SpecError(
        f"the backward of an autograd Function inside a score function computes {what} of its gradient: flashgen takes "
        "backward functions that multiply the gradient, choose by where(), or add gradients"
    )


def custom_function(cls: Any, *inputs: Any, **named: Any) -> Any:
    """Traces a Function: its value, with the derivative that its backward computes."""
    if named:
        raise SpecError(f"the autograd Function {cls.__name__} is called with keywords inside a score function")
    output = cls.forward(*inputs)
    if not isinstance(output, Traced):
        raise SpecError(
            f"the autograd Function {cls.__name__} returns {type(output).__name__} inside a score function: return "
            "one number"
        )
    context = _Context(tuple(_needs_gradient(value) for value in inputs))
    cls.setup_context(context, inputs, output)
    if output.kind != "float" or any(each is output for each in context.not_differentiable):
        return detach(output)
    gradients = cls.backward(context, _gradient(lift(1.0)))
    gradients = gradients if isinstance(gradients, tuple) else (gradients,)
    result = detach(output)
    for value, gradient in zip(inputs, gradients, strict=False):
        if gradient is None or (isinstance(gradient, (int, float)) and gradient == 0):
            continue
        if isinstance(value, torch.Tensor) and not value.requires_grad:
            continue
        if not isinstance(value, Traced) or not isinstance(gradient, _Gradient):
            raise SpecError(
                f"the autograd Function {cls.__name__} inside a score function has a gradient of "
                f"{type(value).__name__}: pass it elements, table[i], and return their gradients"
            )
        if value.kind == "float":
            result = apply(ops.Surrogate, result, value, detach(_factor(gradient)))
    return result


def _needs_gradient(value: Any) -> bool:
    if isinstance(value, Traced):
        return value.kind == "float"
    return not isinstance(value, Row) and bool(getattr(value, "requires_grad", False))
