"""Checks of arrays that hold an output or its LSE: those given to write to, and those that the backward reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from flashgen.attention.problem import Problem, check_aligned, row_strides
from flashgen.dtypes import DType
from flashgen.errors import ArgumentError
from flashgen.language.spec import AttentionSpec
from flashgen.runtime.arrays import JAX, View, contiguous_strides, library_of, strides_like


def given_outputs(out: Any, return_lse: bool) -> dict[str, Any]:
    """Returns the arrays of the argument `out` by their names in the struct.

    Raises ArgumentError if one cannot be written to.
    """
    if return_lse and (not isinstance(out, tuple) or len(out) != 2):
        raise ArgumentError(f"out of type {type(out).__name__}: with return_lse=True give a pair (output, lse)")
    if not return_lse and isinstance(out, (tuple, list)):
        raise ArgumentError(f"out of type {type(out).__name__}: give one array, or add return_lse=True for a pair")
    given = {"o": out[0], "lse": out[1]} if return_lse else {"o": out}
    for name, array in given.items():
        check_writable("out" if name == "o" else name, array)
    return given


def check_writable(argument: str, array: Any) -> None:
    """Raises ArgumentError for a read-only array."""
    immutable = not array.flags.writeable if isinstance(array, np.ndarray) else library_of(array, argument) is JAX
    if immutable:
        raise ArgumentError(f"{argument} is read-only; give an array that may be written to")


def result_strides(
    spec: AttentionSpec, problem: Problem, name: str, shape: tuple[int, ...], like: View
) -> tuple[int, ...]:
    """Returns the strides of a new array of rows, with the axis order of `like`; also adds them to the problem."""
    strides = strides_like(shape, like.strides)
    problem.strides[name] = spec.batch_layout.to_bhsd(strides)[:3]
    return strides


def check_outputs(spec: AttentionSpec, views: Mapping[str, View], problem: Problem) -> None:
    """Raises ArgumentError if arrays given for the results do not fit; adds the output's strides to the problem."""
    if "o" in views:
        problem.strides["o"] = output_strides(spec, "out", views["o"], problem, spec.out_element)
        check_no_overlap("out", views["o"])
    if "lse" in views:
        check_lse("lse", views["lse"], problem)


def output_strides(
    spec: AttentionSpec, argument: str, view: View, problem: Problem, element: DType
) -> tuple[int, int, int]:
    """Returns the strides of an array with the output's shape. Raises ArgumentError for another shape or dtype."""
    check_kind(argument, view, problem.output_shape(spec), element.name)
    return row_strides(spec, argument, view)


def check_lse(argument: str, view: View, problem: Problem) -> None:
    """Raises ArgumentError if an array does not have the LSE's shape, is not float32, or not C-contiguous."""
    check_kind(argument, view, problem.lse_shape, "float32")
    check_contiguous(argument, view)


def check_kind(argument: str, view: View, shape: tuple[int, ...], dtype: str) -> None:
    """Raises ArgumentError if an array has another shape or dtype."""
    if (view.shape, view.dtype) != (shape, dtype):
        raise ArgumentError(f"{argument} is {view.dtype} {view.shape}; give {dtype} {shape}")


def check_contiguous(argument: str, view: View) -> None:
    """Raises ArgumentError if an array is not aligned or not C-contiguous."""
    check_aligned(argument, view)
    wanted = contiguous_strides(view.shape)
    used = zip(view.shape, view.strides, wanted, strict=True)
    if math.prod(view.shape) and any(size != 1 and stride != want for size, stride, want in used):
        raise ArgumentError(f"{argument} has strides {view.strides} (elements); give a C-contiguous array")


def check_no_overlap(argument: str, view: View) -> None:
    """Raises ArgumentError if two elements of an array may share an address, because its dimensions do not nest."""
    reach = 0
    for stride, size in sorted((abs(stride), size) for stride, size in zip(view.strides, view.shape, strict=True)):
        if size > 1 and stride <= reach and all(view.shape):
            raise ArgumentError(f"{argument} has strides {view.strides} (elements): its elements share memory; copy it")
        reach += stride * (size - 1)
