"""What torch's operators know of a spec: the order of its captures, and its attention on each GPU."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import torch

from flashgen.attention import Attention, compile
from flashgen.language.operations import BATCH
from flashgen.language.spec import AttentionSpec


class CaptureInfo(NamedTuple):
    """A capture as the compiler of torch can look at it: plain values."""

    name: str
    dtype: str
    ndim: int
    grad: bool
    kind: str


def call_arguments(spec: AttentionSpec) -> tuple[tuple[CaptureInfo, ...], tuple[CaptureInfo, ...]]:
    """The arrays and the integers that calls of a spec take beside q, k, v and captures: where sequences, pages are."""
    arrays: list[tuple[str, str, int]] = []
    if spec.is_ragged:
        of_keys = () if spec.page_size else ("cu_seqlens_k", "seqused_k")
        arrays += [(name, "int32", 1) for name in ("cu_seqlens_q", *of_keys)]
    if spec.page_size:
        arrays += [("page_table", "int32", 2), ("seqused_k", "int32", 1)]
    if spec.kv_dtype:
        arrays += [("k_scale", "float32", 1), ("v_scale", "float32", 1)]
    integers = ("max_seqlen_q", "max_seqlen_k") if spec.is_ragged else ("num_splits",)
    return (
        tuple(CaptureInfo(name, dtype, ndim, False, dtype[:-2]) for name, dtype, ndim in arrays),
        tuple(CaptureInfo(name, "int32", 0, False, "int") for name in integers),
    )


class Registered:
    """A spec, and how it is compiled: what a key stands for. Compiled for each GPU that a call is on, once.

    Attributes: `key`; `spec`, without arrays that its functions closed over, which calls give; `arrays`, `integers` and
    `floats`, in the order in which operators take them: its captures by kind, and behind them `own_arrays` and
    `own_integers`, a call's arguments that are no captures, of which all integers may be left out;
    `takes_captures`, whether a call must give any; `says_less`, whether it may leave out where its keys are, too;
    `cache`, what of the spec makes k and v a cache, which has no gradient, or None; `is_direct`, whether q, k and v on
    a GPU are all that a call takes; `reads_batch`, whether sequences of a batch differ.
    """

    def __init__(self, key: str, spec: AttentionSpec, compiled: Attention | None, **options: Any) -> None:
        self.key, self.spec, self._compiled, self._options = key, spec, compiled, options
        self.emulate = compiled.engine.name == "emulator" if compiled else bool(options.get("emulate"))
        captured = [CaptureInfo(each.name, each.dtype, each.ndim, each.grad, each.kind) for each in spec.captures]
        self.own_arrays, self.own_integers = call_arguments(spec)
        self.arrays = (*(each for each in captured if each.ndim), *self.own_arrays)
        self.integers = (*(each for each in captured if not each.ndim and each.kind == "int"), *self.own_integers)
        self.floats = tuple(each for each in captured if not each.ndim and each.kind == "float")
        self.takes_captures = bool(captured or self.own_arrays)
        self.dtype, self.dropout = getattr(torch, spec.dtype), bool(spec.dropout)
        self.is_direct = not (self.emulate or self.takes_captures or self.dropout)
        self.says_less = spec.is_ragged and not spec.page_size
        pages = f"page_size={spec.page_size}" if spec.page_size else None
        self.cache = pages or (f"kv_dtype={spec.kv_dtype!r}" if spec.kv_dtype else None)
        self._by_device: dict[int | None, Attention] = {}

    @cached_property
    def reads_batch(self) -> bool:
        expressions = [self.spec.mask.expression, *([self.spec.score.expression] if self.spec.score else [])]
        return any(expression.has(BATCH) for expression in expressions)

    @cached_property
    def learned(self) -> tuple[CaptureInfo, ...]:
        """The captures that have a gradient, in the order of the operators' arrays."""
        return tuple(capture for capture in self.arrays if capture.grad)

    def on(self, device: int | None) -> Attention:
        """The attention of a call on a GPU, by its number, or on the emulator."""
        found = self._by_device.get(device)
        if found is None:
            with nullcontext() if device is None else torch.cuda.device(device):  # whose target it is compiled for
                found = self._compiled or compile(self.spec, **self._options)
            self._by_device[device] = found
        return found
