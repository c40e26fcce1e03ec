"""The arguments of a call beside q, k and v: captures, descriptions of sequences and pages, and numbers.

Operators take them as three lists: arrays, integers and floats. In each list captures come before call arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flashgen.errors import ArgumentError
from flashgen.torch.registered import CaptureInfo, Registered
from flashgen.torch.tensors import Tensor, check_tensors, narrowed

_AXES = {
    "cu_seqlens_q": ("sequences + 1",),
    "page_table": ("batch", "pages of a sequence"),
    "seqused_k": ("batch",),
    "k_scale": ("heads of keys, or 1",),
    "v_scale": ("heads of keys, or 1",),
}


def all_captures(entry: Registered, given: Mapping[str, Any], bound: Mapping[str, Tensor]) -> Any:
    """Returns (arrays, integers, floats) as operators take them. Raises ArgumentError for missing or unknown ones."""
    taken = {capture.name for capture in (*entry.arrays, *entry.integers, *entry.floats)}
    for name in given:
        if name not in taken:
            own = {each.name for each in (*entry.own_arrays, *entry.own_integers)}
            known = ", ".join(sorted(taken - own)) or "none"
            also = f", and calls of it take {', '.join(sorted(own))}"
            raise ArgumentError(f"unknown argument {name!r}; the spec declares these captures: {known}{also}")
    captured = len(entry.arrays) - len(entry.own_arrays)
    arrays = [_array(capture, given, bound) for capture in entry.arrays[:captured]] + _own_arrays(entry, given)
    captured = len(entry.integers) - len(entry.own_integers)
    integers = [_number(each, given) for each in entry.integers[:captured]] + _own_integers(entry, given)
    return arrays, integers, [_number(each, given) for each in entry.floats]


def _own_arrays(entry: Registered, given: Mapping[str, Any]) -> list[Tensor]:
    """Returns the arrays that describe sequences or pages. In a varlen batch those of keys are optional."""
    found: list[Tensor] = []
    for argument in entry.own_arrays:
        value = given.get(argument.name)
        if value is None and entry.keys_optional and argument.name != "cu_seqlens_q":
            if argument.name == "cu_seqlens_k":
                found.append(found[0])
            continue
        if not isinstance(value, torch.Tensor):
            what = "is missing" if value is None else f"of type {type(value).__name__} is no tensor"
            shape = ", ".join(_AXES[argument.name])
            raise ArgumentError(f"{argument.name} {what}: give {argument.dtype} ({shape})")
        found.append(narrowed(value) if (argument.kind, value.dtype) == ("int", torch.int64) else value)
    return found


def _own_integers(entry: Registered, given: Mapping[str, Any]) -> list[int]:
    """Returns max_seqlen bounds or num_splits, with -1 for None; an empty list if none is given."""
    values = [given.get(argument.name) for argument in entry.own_integers]
    if all(value is None for value in values):
        return []
    for argument, value in zip(entry.own_integers, values, strict=True):
        if value is not None and (not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool) or value < 0):
            raise ArgumentError(f"{argument.name}={value!r} must be an integer that is not negative, or None")
    return [-1 if value is None else value for value in values]


def _array(capture: CaptureInfo, given: Mapping[str, Any], bound: Mapping[str, Tensor]) -> Tensor:
    value = given.get(capture.name)
    if value is None and capture.name in bound:
        return bound[capture.name]
    if not isinstance(value, torch.Tensor):
        what = "is missing" if value is None else f"of type {type(value).__name__} is no tensor"
        raise ArgumentError(f"capture {capture.name!r} {what}: give {capture.name}=<{capture.dtype} tensor>")
    if value.is_nested or value.layout != torch.strided:
        check_tensors(**{f"capture {capture.name!r}": value})
    if value.requires_grad and not capture.grad and torch.is_grad_enabled():
        raise ArgumentError(
            f"capture {capture.name!r} requires a gradient and was declared without: declare it with grad=True, or "
            f"give {capture.name}.detach()"
        )
    if capture.dtype == "int32" and value.dtype == torch.int64:
        return narrowed(value)
    return value


def _number(capture: CaptureInfo, given: Mapping[str, Any]) -> Any:
    if capture.name not in given:
        raise ArgumentError(f"capture {capture.name!r} is missing: give {capture.name}=<{capture.dtype} number>")
    value = given[capture.name]
    if isinstance(value, torch.Tensor) or (capture.kind == "int" and isinstance(value, float) and value != int(value)):
        raise ArgumentError(f"capture {capture.name!r} is {value!r}; it was declared {capture.dtype}: give a number")
    return value


def named_captures(entry: Registered, captures: Sequence[Any], integers: Sequence[int], floats: Sequence[float]) -> Any:
    """Returns captures and call arguments by name, without those that are missing (-1, or trailing arrays)."""
    named: dict[str, Any] = {capture.name: array for capture, array in zip(entry.arrays, captures, strict=False)}
    captured = len(entry.integers) - len(entry.own_integers)
    named |= {capture.name: int(number) for capture, number in zip(entry.integers[:captured], integers, strict=False)}
    own = zip(entry.own_integers, integers[captured:], strict=False)
    named |= {each.name: int(number) for each, number in own if number >= 0}
    named |= {capture.name: float(number) for capture, number in zip(entry.floats, floats, strict=True)}
    return named
