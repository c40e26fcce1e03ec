"""The sizes of a call, and checks that its arrays fit together before anything is launched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from flashgen.attention.swapped_axes import fits_swapped
from flashgen.codegen.sizes import Sizes
from flashgen.dtypes import DTYPES, numpy_dtype
from flashgen.errors import ArgumentError
from flashgen.language.batch_layout import BATCH_LAYOUTS, PAGES, BatchLayout
from flashgen.language.kv_records import KvRecord
from flashgen.language.operations import LONGEST, MAX_HEADS
from flashgen.language.spec import AttentionSpec
from flashgen.runtime.arrays import View

INT32_MAX = 2**31 - 1
Bounds = tuple[int | None, int | None]
"""The maximum numbers of queries and keys of a sequence in a varlen batch; None: the total number of tokens."""
NO_BOUNDS: Bounds = (None, None)
_MOST_HEADS_PER_KV = 8192  # up to which the kernel's division by a reciprocal is exact
_PAGES, _SCALES = ("page_table", "seqused_k"), ("k_scale", "v_scale")
CACHE = (*_PAGES, *_SCALES)
"""The arrays that locate the keys of a sequence and scale keys and values."""
WANTED = {
    "page_table": "int32 (batch, pages of a sequence)",
    "seqused_k": "int32 (batch,), the keys of each sequence",
    **dict.fromkeys(_SCALES, "float32 (1,) or (heads of k,)"),
}
"""The expected dtype and shape, by the name of the argument."""
_ROW_ALIGNMENT = 16  # bytes of one copy instruction


@dataclass(frozen=True)
class Problem(Sizes):
    """The sizes of a call, and the strides of its arrays.

    strides: in elements, (batch, head, row) in any layout. With pages, len_k is the maximum length of a sequence.
    pages: the number of pages of k and v. table_pitch: elements between rows of the page table. scales: of k and of v,
    1 if each head has its own scale, 0 if all share one. layout: the layout of q. rows_q, rows_k: the rows of q, and of
    k and v: those of a sequence, or of all sequences of a varlen batch.
    """

    strides: dict[str, tuple[int, int, int]]
    scales: tuple[int, int] = field(default=(0, 0), kw_only=True)
    pages: int = field(default=0, kw_only=True)
    table_pitch: int = field(default=0, kw_only=True)
    layout: BatchLayout = field(default=BATCH_LAYOUTS["bhsd"], kw_only=True)

    def output_shape(self, spec: AttentionSpec) -> tuple[int, ...]:
        return self.layout.from_bhsd((self.batch, self.heads_q, self.rows_q, spec.value_dim))

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return self.layout.rows_shape(self.batch, self.heads_q, self.rows_q)

    @property
    def rows_q(self) -> int:
        return int(self.layout.rows(self.len_q, self.total_q))

    @property
    def rows_k(self) -> int:
        return int(self.layout.rows(self.len_k, self.total_k))

    @property
    def is_empty(self) -> bool:
        """Whether the output has no element."""
        return not all(self.lse_shape)

    @property
    def has_scores(self) -> bool:
        """Whether the call has any score; for a varlen batch, whether it may have any."""
        return bool(self.rows_k) and not self.is_empty


class Shaped(Protocol):
    """The properties of an array that can be checked without its data, which fake tensors have, too."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...


def problem_of(
    spec: AttentionSpec, views: Mapping[str, View], multiprocessors: int = 1, bounds: Bounds = NO_BOUNDS
) -> Problem:
    """Returns the sizes of a call and the strides of its arrays.

    multiprocessors: of the GPU. bounds: the maximum lengths of a varlen batch. Raises ArgumentError if the spec does
    not take these arrays.
    """
    sizes = checked_sizes(spec, views, bounds)
    for name in spec.batch_layout.sequence_arrays:
        if name in views:
            _check_contiguous(name, views[name])
    strides = {name: row_strides(spec, name, views[name]) for name in spec.inputs}
    pages = (views["k"].shape[0], views["page_table"].strides[0]) if spec.page_size else (0, 0)
    scales = tuple(_scales(name, views[name], sizes) for name in _SCALES) if spec.scales_kv else (0, 0)
    others: Any = {"pages": pages[0], "table_pitch": pages[1], "scales": scales, "layout": spec.batch_layout}
    return Problem(**vars(sizes) | {"multiprocessors": multiprocessors}, strides=strides, **others)


def _scales(name: str, view: View, sizes: Sizes) -> int:
    """Returns 1 if each head has a scale, 0 if all share one. Raises ArgumentError for other arrays."""
    if view.dtype != "float32" or view.shape not in ((1,), (sizes.heads_kv,)) or (view.strides != (1,) != view.shape):
        raise ArgumentError(
            f"{name} is {view.dtype} {view.shape}; give float32 (1,), or ({sizes.heads_kv},) for a scale of each head"
        )
    check_aligned(name, view)
    return int(view.shape[0] > 1)


def _checked_sequences(spec: AttentionSpec, arrays: Mapping[str, Shaped], batch: int) -> int:
    """Returns the number of sequences of a call. Raises ArgumentError if offsets and lengths do not fit.

    batch: the number of sequences by the shape of q, which is right unless arrays locate the sequences.
    """
    if not spec.sequence_arrays:
        return batch
    _check_offsets("cu_seqlens_q", arrays["cu_seqlens_q"])
    batch = arrays["cu_seqlens_q"].shape[0] - 1
    if not 0 <= batch <= MAX_HEADS:
        raise ArgumentError(f"cu_seqlens_q is of {batch} sequences; give from 1 to {MAX_HEADS + 1} elements")
    if "page_table" not in arrays:
        _check_offsets("cu_seqlens_k", arrays["cu_seqlens_k"], batch + 1, batch)
    if "seqused_k" in arrays:
        _check_offsets("seqused_k", arrays["seqused_k"], batch, batch)
    return batch


def _check_offsets(name: str, array: Shaped, elements: int | None = None, batch: int | None = None) -> None:
    """Raises ArgumentError if an array of offsets or lengths has another dtype or size than needed.

    elements: the needed size; None for any. batch: the number of sequences by cu_seqlens_q, for the message.
    """
    if array.dtype != "int32" or len(array.shape) != 1 or (elements is not None and array.shape[0] != elements):
        wanted = "(sequences + 1,)" if elements is None else f"({elements},)"
        by = "" if batch is None else f"; cu_seqlens_q is of {batch} sequence{'' if batch == 1 else 's'}"
        raise ArgumentError(f"{name} is {array.dtype} {array.shape}; give int32 {wanted} on the device of q{by}")


def _check_contiguous(name: str, view: View) -> None:
    """Raises ArgumentError if an array of offsets or lengths is not contiguous or not aligned."""
    if view.shape[0] > 1 and view.strides[0] != 1:
        raise ArgumentError(f"{name} has strides {view.strides} (elements); give a contiguous array")
    check_aligned(name, view)


def checked_sizes(spec: AttentionSpec, arrays: Mapping[str, Shaped], bounds: Bounds = NO_BOUNDS) -> Sizes:
    """Returns the sizes of a call by the shapes of its arrays. Raises ArgumentError if the spec does not take them.

    bounds: the maximum lengths of a varlen batch.
    """
    shapes = {name: _shape(spec, name, arrays[name]) for name in spec.inputs}
    (batch, heads_q, len_q, _), (_, heads_kv, len_k, _) = shapes["q"], shapes["k"]
    sequences = _checked_sequences(spec, arrays, batch)
    if spec.page_size:
        len_k = check_pages(spec, arrays, sequences) * spec.page_size
    for name in () if spec.page_size else spec.inputs[1:]:
        if shapes[name][0] != batch:
            raise ArgumentError(f"{name} has batch {shapes[name][0]} and q has {batch}; give arrays of one batch size")
    if not spec.shared_kv:
        _check_values(spec, arrays, shapes["k"], shapes["v"])
    if heads_q and (not heads_kv or heads_q % heads_kv):
        raise ArgumentError(
            f"q has {heads_q} heads, no multiple of the {heads_kv} heads of k and v (GQA, MQA), in arrays "
            f"({', '.join(spec.batch_layout.axes)}), as layout={spec.layout!r} of the spec says"
            + (f": {spec.batch_layout.swap_advice}" if fits_swapped(heads_q, heads_kv, len_q, len_k) else "")
        )
    if max(batch, heads_q) > MAX_HEADS or heads_q > _MOST_HEADS_PER_KV * max(heads_kv, 1):
        raise ArgumentError(
            f"batch {batch} and heads {heads_q} must be at most {MAX_HEADS}, and for each head of k "
            f"at most {_MOST_HEADS_PER_KV} of q; call it on parts of the batch"
        )
    if max(len_q, len_k) > LONGEST:
        raise ArgumentError(f"len_q {len_q} and len_k {len_k} must be at most {LONGEST}")
    rows = len_q, len_k
    longest = (total if bound is None else min(bound, total) for bound, total in zip(bounds, rows, strict=True))
    return Sizes(sequences, heads_q, heads_kv, *longest, total_q=len_q, total_k=len_k)


def _check_values(
    spec: AttentionSpec, arrays: Mapping[str, Shaped], keys: tuple[int, ...], values: tuple[int, ...]
) -> None:
    """Raises ArgumentError if v, whose shape is given as (batch, heads, length, dim), has other rows than k."""
    if spec.page_size and values[:3] != keys[:3]:
        raise ArgumentError(f"v is {arrays['v'].shape} and k {arrays['k'].shape}; every key of a page needs one value")
    if values[1:3] != keys[1:3]:
        raise ArgumentError(f"v has (heads, length) {values[1:3]} and k has {keys[1:3]}; every key needs one value")


def _shape(spec: AttentionSpec, name: str, view: Shaped) -> tuple[int, int, int, int]:
    """Returns (batch, heads, length, dim) of q, k or v. Raises ArgumentError if its shape or dtype does not fit."""
    layout = spec.array_layout(name)
    axes = layout.axes
    if name == "k" and spec.kv_record:
        check_records("k", view, spec.kv_record, spec.page_size)
    dim = spec.last_dim(name)
    if len(view.shape) != len(axes):
        raise ArgumentError(f"{name} has shape {view.shape}; give {len(axes)} dimensions ({', '.join(axes)})")
    if view.shape[-1] != dim:
        field = "value_dim" if name == "v" else "head_dim"
        raise ArgumentError(f"{name} has shape {view.shape}; its last dimension must be the spec's {field}={dim}")
    dtype = spec.element_of(name).name
    if view.dtype != dtype:
        raise ArgumentError(f"{name} has dtype {view.dtype}; the spec was compiled for {dtype}: convert it")
    if layout is PAGES and view.shape[1] != spec.page_size:
        raise ArgumentError(
            f"{name} has shape {view.shape}; its second dimension must be page_size={spec.page_size}: give (pages, "
            "page_size, heads, dim), of other orders a view such as array.swapaxes(1, 2)"
        )
    return layout.to_bhsd(view.shape, batch=1)


def check_records(name: str, view: Shaped, record: KvRecord, page_size: int | None = None) -> None:
    """Raises ArgumentError if an array is not of pages of records. page_size: the keys of a page; None for any."""
    _, size, *rest = view.shape if len(view.shape) == 4 else (0, 0)
    if view.dtype != record.element.name or rest != [1, record.bytes] or page_size not in (None, size):
        advice = ": give a view such as array.view(uint8)[:, :, None]" if view.shape[-1:] == (record.bytes,) else ""
        raise ArgumentError(
            f"{name} is {view.dtype} {tuple(view.shape)}; {record.name} takes {record.element.name} "
            f"(pages, {page_size or 'page_size'}, 1, {record.bytes}){advice}"
        )


def check_record_strides(name: str, view: View, record: KvRecord) -> None:
    """Raises ArgumentError if the records of a page do not lie side by side, in the order of the keys."""
    _, row, _, last = view.strides
    if all(view.shape) and (last != 1 or (view.shape[1] > 1 and row != record.bytes)):
        raise ArgumentError(
            f"{name} has strides {view.strides} (bytes); the {record.bytes} bytes of a record must be contiguous, and "
            "the records of a page lie side by side: copy it to a contiguous array"
        )


def check_pages(spec: AttentionSpec, arrays: Mapping[str, Shaped], batch: int) -> int:
    """Returns the maximum number of pages of a sequence. Raises ArgumentError if table or lengths do not fit."""
    if "page_table" not in arrays:
        raise ArgumentError(f"page_size={spec.page_size}: pages are for calls of flashgen.compile(spec)")
    table, lengths = arrays["page_table"], arrays["seqused_k"]
    for name, array, axes in (("page_table", table, 2), ("seqused_k", lengths, 1)):
        if array.dtype != "int32" or len(array.shape) != axes or array.shape[0] != batch:
            shape = f"({batch}, pages of a sequence)" if axes == 2 else f"({batch},)"
            raise ArgumentError(f"{name} is {array.dtype} {tuple(array.shape)}; give int32 {shape}")
    return int(table.shape[1])


def row_strides(spec: AttentionSpec, name: str, view: View) -> tuple[int, int, int]:
    """Returns the strides of an array of rows, in its elements; those of 8-bit keys and values in elements of q.

    Raises ArgumentError if rows are not contiguous or not aligned.
    """
    layout = spec.array_layout(name)
    if name == "k" and spec.kv_record:
        check_record_strides(name, view, spec.kv_record)
    batch, head, row, last = layout.to_bhsd(view.strides)
    elements = math.prod(view.shape)
    if elements and last != 1:
        raise ArgumentError(
            f"{name} has strides {view.strides} (elements); the last dimension must be contiguous: copy it, as "
            "numpy.ascontiguousarray and tensor.contiguous() do"
        )
    element_bytes = DTYPES[view.dtype].bytes
    aligned, per_element = _ROW_ALIGNMENT // element_bytes, max(spec.element.bytes // element_bytes, 1)
    misaligned = [
        s
        for s, n in zip((batch, head, row), layout.to_bhsd(view.shape, batch=1), strict=False)
        if n > 1 and s % aligned
    ]
    if elements and (misaligned or view.pointer % _ROW_ALIGNMENT):
        raise ArgumentError(
            f"{name} at address {view.pointer:#x} with strides {view.strides} (elements): every row must start at a "
            f"multiple of {_ROW_ALIGNMENT} bytes; copy it to a contiguous array"
        )
    return batch // per_element, head // per_element, row // per_element


def check_aligned(what: str, view: View) -> None:
    """Raises ArgumentError if the elements of an array do not start at multiples of their size."""
    size = numpy_dtype(view.dtype).itemsize
    if view.pointer % size and all(view.shape):
        raise ArgumentError(
            f"{what} at address {view.pointer:#x}: its {view.dtype} must start at multiples of {size} bytes"
        )


def check_table(views: Mapping[str, View]) -> None:
    """Raises ArgumentError if the last dimension of the page table, or the array of lengths, is not contiguous."""
    for name in ("page_table", "seqused_k"):
        check_aligned(name, views[name])
        if all(views[name].shape) and views[name].shape[-1] > 1 and views[name].strides[-1] != 1:
            raise ArgumentError(
                f"{name} has strides {views[name].strides} (elements); its last dimension must be contiguous"
            )


def given_cache(spec: AttentionSpec, **given: Any) -> dict[str, Any]:
    """Returns those of the arrays page_table, seqused_k, k_scale and v_scale that the spec needs.

    given: all four; None for those that the call does not have. Raises ArgumentError if one is missing or not needed.
    """
    wanted = (_PAGES if spec.page_size else ()) + (_SCALES if spec.scales_kv else ())
    for name, array in given.items():
        if name in wanted and array is None:
            why = f"page_size={spec.page_size}" if name in _PAGES else f"kv_dtype={spec.kv_dtype!r}"
            raise ArgumentError(f"{name} is missing: the spec has {why}; give {WANTED[name]}")
        if name not in wanted and array is not None:
            if name == "seqused_k":
                raise ArgumentError("seqused_k is of varlen batches and pages: declare layout='thd' or page_size=...")
            what, field = ("pages", "page_size") if name in _PAGES else ("8-bit keys and values", "kv_dtype")
            raise ArgumentError(f"{name}: the spec has no {what}; leave it out, or declare {field}=...")
    return {name: given[name] for name in wanted}
