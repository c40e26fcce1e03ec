"""`Registered`: the entry of a spec for torch's operators, with the order of captures and an attention per GPU."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import torch

from flashgen.attention import Attention, compile
from flashgen.attention.gradients import refuse_grad_dtype
from flashgen.language.operations import BATCH
from flashgen.language.spec import AttentionSpec


class CaptureInfo(NamedTuple):
    """A capture or call argument as plain values, which torch.compile can trace."""

    name: str
    dtype: str
    ndim: int
    grad: bool
    kind: str


def call_arguments(spec: AttentionSpec) -> tuple[tuple[CaptureInfo, ...], tuple[CaptureInfo, ...]]:
    """Returns the arrays and the integers that calls take beside q, k, v and captures, such as cu_seqlens_q."""
    arrays: list[tuple[str, str, int]] = []
    arrays += [(name, "int32", 1) for name in spec.sequence_arrays]
    if spec.page_size:
        arrays += [("page_table", "int32", 2), ("seqused_k", "int32", 1)]
    if spec.scales_kv:
        arrays += [("k_scale", "float32", 1), ("v_scale", "float32", 1)]
    integers = spec.batch_layout.max_lengths or ("num_splits",)
    return (
        tuple(CaptureInfo(name, dtype, ndim, False, dtype[:-2]) for name, dtype, ndim in arrays),
        tuple(CaptureInfo(name, "int32", 0, False, "int") for name in integers),
    )


class Registered:
    """A spec with its compilation options, as registered under a key. It is compiled once for each GPU of its calls.

    Attributes:
        key: the key of operators.
        spec: the spec, without the arrays that its functions closed over: calls pass them.
        arrays, integers, floats: the captures by kind, then the call arguments, in the order of operators.
        own_arrays, own_integers: the call arguments among these. The integers are optional.
        takes_captures: whether calls take any captures or arrays.
        keys_optional: whether calls may leave out the arrays that describe the keys.
        cache: the option of the spec that makes k and v a KV cache, or None.
        dtype, out_dtype: the dtypes of q, k and v, and of the output.
        shared_kv: whether V is a part of K. The operand v of operators is then an empty view of k.
        is_direct: whether calls take only q, k and v and the arrays that locate packed sequences, on a GPU, and all
            results have the dtype of q.
        is_direct_shared: the same of calls that take only q and kv, as V is a part of K.
        reads_batch: whether the mask or the score depends on the batch index.
    """

    def __init__(self, key: str, spec: AttentionSpec, compiled: Attention | None, **options: Any) -> None:
        refuse_grad_dtype(spec, "torch's autograd")
        self.key, self.spec, self._compiled, self._options = key, spec, compiled, options
        self.emulate = compiled.engine.name == "emulator" if compiled else bool(options.get("emulate"))
        captured = [CaptureInfo(each.name, each.dtype, each.ndim, each.grad, each.kind) for each in spec.captures]
        self.own_arrays, self.own_integers = call_arguments(spec)
        self.arrays = (*(each for each in captured if each.ndim), *self.own_arrays)
        self.integers = (*(each for each in captured if not each.ndim and each.kind == "int"), *self.own_integers)
        self.floats = tuple(each for each in captured if not each.ndim and each.kind == "float")
        self.takes_captures = bool(captured or self.own_arrays)
        self.dtype, self.dropout = getattr(torch, spec.dtype), bool(spec.dropout)
        self.out_dtype: torch.dtype = getattr(torch, spec.out_element.name)
        self.shared_kv = spec.shared_kv
        takes_rows_alone = not (self.emulate or captured or spec.of_cache or self.dropout or spec.out_dtype)
        self.is_direct = takes_rows_alone and not spec.shared_kv
        self.is_direct_shared = takes_rows_alone and spec.shared_kv and not self.takes_captures
        self.keys_optional = "cu_seqlens_k" in spec.sequence_arrays
        pages = f"page_size={spec.page_size}" if spec.page_size else None
        self.cache = pages or (f"kv_dtype={spec.kv_dtype!r}" if spec.kv_dtype else None)
        self._by_device: dict[int | None, Attention] = {}

    @cached_property
    def reads_batch(self) -> bool:
        expressions = [self.spec.mask.expression, *([self.spec.score.expression] if self.spec.score else [])]
        return any(expression.has(BATCH) for expression in expressions)

    @cached_property
    def learned(self) -> tuple[CaptureInfo, ...]:
        """The captures that have a gradient, in the order of `arrays`."""
        return tuple(capture for capture in self.arrays if capture.grad)

    def on(self, device: int | None) -> Attention:
        """Returns the attention for a GPU, given by its index, or for the emulator with None."""
        found = self._by_device.get(device)
        if found is None:
            with nullcontext() if device is None else torch.cuda.device(device):  # the GPU to compile for
                found = self._compiled or compile(self.spec, **self._options)
            self._by_device[device] = found
        return found
