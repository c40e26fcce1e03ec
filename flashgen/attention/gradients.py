"""`Gradients`, the result of a backward call, and checks of arrays that the caller gives for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashgen.attention.outputs import check_contiguous, check_kind, check_no_overlap, check_writable, result_strides
from flashgen.attention.problem import Problem, row_strides
from flashgen.errors import ArgumentError, UnsupportedError
from flashgen.language.operations import Capture
from flashgen.language.spec import AttentionSpec
from flashgen.runtime.arrays import View

_ROWS = ("dq", "dk", "dv")


def gradients_of_rows(spec: AttentionSpec) -> tuple[str, ...]:
    """Returns the names of the gradients with rows like q, k and v; the others are those of captures."""
    return tuple(f"d{name}" for name in spec.inputs)


class Gradients(tuple[Any, ...]):
    """The gradients of a call: a tuple (dq, dk, dv, *gradients of captures) with members by name.

    With `shared_kv` it is (dq, dk, *gradients of captures), where dk is the gradient of the array that holds K and V.

    Attributes:
        dq: the gradient of q, with its shape and dtype.
        dk: the gradient of k, with its shape and dtype.
        dv: the gradient of v, with its shape and dtype; None with `shared_kv`.
        captures: the gradients of the captures declared with grad=True, with their shapes and dtypes, by name in the
            order of `spec.captures`.
    """

    captures: dict[str, Any]

    def __new__(cls, dq: Any, dk: Any, dv: Any = None, captures: Mapping[str, Any] | None = None) -> Gradients:
        rows = (dq, dk) if dv is None else (dq, dk, dv)
        self = super().__new__(cls, (*rows, *captures.values()) if captures else rows)
        self.captures = dict(captures) if captures else {}
        return self

    @classmethod
    def of(cls, arrays: Mapping[str, Any]) -> Gradients:
        """Creates one from arrays by name: dq, dk, dv and the gradients of captures.

        Args:
            arrays: the arrays.
        """
        count = len(_ROWS) if "dv" in arrays else len(_ROWS) - 1
        captures = {name: array for name, array in arrays.items() if name not in _ROWS} if len(arrays) > count else None
        return cls(arrays["dq"], arrays["dk"], arrays.get("dv"), captures)

    @property
    def dq(self) -> Any:
        return self[0]

    @property
    def dk(self) -> Any:
        return self[1]

    @property
    def dv(self) -> Any:
        return self[2] if len(self) - len(self.captures) == len(_ROWS) else None

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.dq, self.dk, self.dv, self.captures

    def __repr__(self) -> str:
        named = {"dq": self.dq, "dk": self.dk, "dv": self.dv, "captures": self.captures}
        return f"Gradients({', '.join(f'{name}={value!r}' for name, value in named.items())})"


def refuse_grad_dtype(spec: AttentionSpec, framework: str) -> None:
    """Raises UnsupportedError if gradients of q, k and v have another dtype than q, k and v."""
    if spec.grad_dtype:
        raise UnsupportedError(
            f"grad_dtype={spec.grad_dtype!r}: in {framework} a gradient has the dtype of its input; leave it out, or "
            "call the backward of flashgen.compile(spec)"
        )


def differentiated(spec: AttentionSpec) -> tuple[Capture, ...]:
    """Returns the captures that have a gradient, in the order of `spec.captures`."""
    return tuple(capture for capture in spec.captures if capture.grad)


def given_gradients(names: Sequence[str], into: Any) -> dict[str, Any]:
    """Returns the arrays of the argument `into` by name. Raises ArgumentError if one cannot be written to.

    names: those of the gradients of a spec, in order.
    """
    if not isinstance(into, (tuple, list)) or len(into) != len(names):
        found = f"has {len(into)} arrays" if isinstance(into, (tuple, list)) else f"of type {type(into).__name__}"
        wanted = ", ".join(map(gradient_argument, names))
        raise ArgumentError(f"into {found}: give a tuple of {len(names)} arrays, {wanted}")
    given = dict(zip(names, into, strict=True))
    for name, array in given.items():
        check_writable(gradient_argument(name), array)
    return given


def gradient_argument(name: str) -> str:
    """Returns the name of a given gradient in error messages, which differs from the name of any capture."""
    return name if name in _ROWS else f"the gradient of {name!r}"


def gradient_shape(spec: AttentionSpec, problem: Problem, name: str) -> tuple[int, ...]:
    """Returns the shape of dq, dk or dv in the spec's layout."""
    heads, length = (problem.heads_q, problem.rows_q) if name == "dq" else (problem.heads_kv, problem.rows_k)
    dim = spec.value_dim if name == "dv" else spec.head_dim
    return spec.batch_layout.from_bhsd((problem.batch, heads, length, dim))


def gradient_strides(spec: AttentionSpec, problem: Problem, name: str, views: Mapping[str, View]) -> tuple[int, ...]:
    """Returns the strides of a new dq, dk or dv, with the axis order of q, k or v; also adds them to the problem."""
    return result_strides(spec, problem, name, gradient_shape(spec, problem, name), views[name[1:]])


def check_gradients(
    spec: AttentionSpec, given: Mapping[str, View], captured: Mapping[str, View], problem: Problem
) -> None:
    """Raises ArgumentError if arrays given for gradients do not fit; adds the strides of rows to the problem."""
    for name, view in given.items():
        argument = gradient_argument(name)
        if name in _ROWS:
            check_kind(argument, view, gradient_shape(spec, problem, name), spec.grad_element.name)
            problem.strides[name] = row_strides(spec, argument, view)
            check_no_overlap(argument, view)
        else:
            check_kind(argument, view, captured[name].shape, captured[name].dtype)
            check_contiguous(argument, view)
