"""`append_kv`: writes new keys and values into the pages of their sequences."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from flashgen.attention.aliasing import AliasCheck
from flashgen.attention.outputs import check_no_overlap, check_writable
from flashgen.attention.problem import WANTED, check_aligned, check_record_strides, check_records, check_table
from flashgen.codegen.append_kernel import render_append, render_append_records
from flashgen.codegen.families import emulated_target, target_of_gpu
from flashgen.codegen.sizes import Sizes
from flashgen.dtypes import ELEMENTS
from flashgen.errors import ArgumentError
from flashgen.language.kv_records import KV_RECORDS, KvRecord
from flashgen.language.spec import MAX_PAGE_SIZE
from flashgen.launch.argument_writer import ArgumentWriter
from flashgen.launch.engines import Emulator, Engine, Gpu, Launch, Place, Runner
from flashgen.runtime import gpu
from flashgen.runtime.arrays import View
from flashgen.runtime.caching import Cache

_MOST_BATCH, _MOST_BLOCKS = 65535, 2**31 - 1
_MAX_PREPARED = 256
_ROW_ALIGNMENT = 16  # bytes of one copy
_RUNNERS: Cache[Any, tuple[Any, Runner]] = Cache()
_ROWS = ("k_new", "v_new", "k", "v")


def append_kv(
    k_new: Any, v_new: Any, k: Any, v: Any, *, page_table: Any = None, seqused_k: Any = None, emulate: bool = False
) -> None:
    """Writes new keys and values of each sequence into its pages, in place, on the caller's current stream.

    Row i of sequence b is written to position seqused_k[b] + i, which is row (seqused_k[b] + i) % page_size of page
    page_table[b, (seqused_k[b] + i) // page_size]. The host reads neither table nor lengths. A row beyond the end of
    the table, or with a table entry that is out of range, is not written. `seqused_k` is not changed: the caller adds
    the number of new keys before attending to them. A page to write to must belong to one sequence only; if two
    sequences write the same row, either value may remain. Where V is a part of K, there is one array of pages: give
    None for v_new and v, and only k is written.

    Args:
        k_new, v_new: (batch, new keys, heads_kv, dim), float16 or bfloat16; rows start at multiples of 16 bytes, and
            the last dimension is contiguous. v_new may be None.
        k, v: the pages to write to, (pages, page_size, heads_kv, dim), with the dtype and dims of k_new and v_new. v is
            None if v_new is None. For a spec with kv_dtype="fp8_ds_mla", k is uint8 (pages, page_size, 1, 656) and
            k_new bfloat16 (batch, new keys, 1, 576). Its first 512 columns are quantized as in FlashMLA's reference:
            the scale of 128 of them is the least power of two that brings them to at most 448.
        page_table: int32 (batch, pages of a sequence); required.
        seqused_k: int32 (batch,), the number of keys of each sequence before the call; required.
        emulate: run the kernel on the CPU, on NumPy arrays.

    Raises:
        ArgumentError: the arrays do not fit together, or are NumPy arrays without emulate=True, which are not on a GPU
            and cannot be written in place.
        LaunchError: there is no GPU, or the kernel could not be launched.
        BuildError: the kernel does not compile, or a compiler is missing.
    """
    check_pages_given(page_table=page_table, seqused_k=seqused_k)
    engine: Engine = Emulator() if emulate else Gpu()
    arrays = appended_arrays(k_new, v_new, k, v) | {"page_table": page_table, "seqused_k": seqused_k}
    library = engine.library(k_new, "k_new")
    if library is engine.host_library:
        raise ArgumentError("append_kv writes in place: give arrays of the GPU, or emulate=True for NumPy arrays")
    for name in _written(arrays):
        check_writable(name, arrays[name])
    key, addresses = _cache_key(engine, arrays)
    prepared = _PREPARED.get(key) or _PREPARED.get_or_make(key, partial(_prepare, engine, arrays))
    prepared.alias_check.check(addresses)
    if prepared.launch is None:
        return
    runner, launch = prepared.launch
    place = Place(library.stream(k_new), prepared.device)
    with nullcontext() if engine.is_current(place.device) else engine.device_context(place.device):
        runner.launch(launch, engine.bind(arrays), {}, place)


def _written(arrays: Mapping[str, Any]) -> list[str]:
    """Returns the names of the arrays of a call that the kernel writes."""
    return [name for name in ("k", "v") if name in arrays]


def appended_arrays(k_new: Any, v_new: Any, k: Any, v: Any) -> dict[str, Any]:
    """Returns the arrays of new rows and of pages by name, without v_new and v if both are None.

    Raises ArgumentError if only one of these is None.
    """
    if v_new is None and v is None:
        return {"k_new": k_new, "k": k}
    for name, array in (("v_new", v_new), ("v", v)):
        if array is None:
            raise ArgumentError(
                f"append_kv: {name} is missing; give v_new and v, or None for both where V is a part of K"
            )
    return {"k_new": k_new, "v_new": v_new, "k": k, "v": v}


def check_pages_given(**pages: Any) -> None:
    """Raises ArgumentError if the page table or the lengths are missing."""
    for name, array in pages.items():
        if array is None:
            raise ArgumentError(f"append_kv: {name} is missing; give {WANTED[name]}")


@dataclass(frozen=True)
class _Prepared:
    """The state that calls of one cache key share. launch: None if there is nothing to write."""

    device: int
    alias_check: AliasCheck
    launch: tuple[Runner, Launch] | None


_PREPARED: Cache[Any, _Prepared] = Cache(_MAX_PREPARED)


def _cache_key(engine: Engine, arrays: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, int]]:
    """Returns the cache key of a call, which holds the alignment of each address, and the addresses of the arrays."""
    key: list[Any] = [engine]
    addresses = {}
    for name, array in arrays.items():
        described, address = engine.library(array, name).look(array)
        key += (described, address % _ROW_ALIGNMENT)
        addresses[name] = address
    return tuple(key), addresses


def _prepare(engine: Engine, arrays: dict[str, Any]) -> _Prepared:
    """Checks the arrays of a call and builds its kernel."""
    views = {name: engine.library(array, name).view(array, name) for name, array in arrays.items()}
    _check(views)
    device = views["k"].device or 0
    with engine.device_context(device):
        return _Prepared(device, AliasCheck(views, _written(views), str), _prepare_launch(engine, views))


def _prepare_launch(engine: Engine, views: dict[str, View]) -> tuple[Runner, Launch] | None:
    batch, tokens, heads, head_dim = views["k_new"].shape
    pages, page_size = views["k"].shape[:2]
    record = record_of(views)
    value_dim = views["v"].shape[3] if "v" in views else 0
    if not (batch and tokens and heads and pages and (head_dim or value_dim)):
        return None
    target = target_of_gpu(*gpu.compute_capability()) if isinstance(engine, Gpu) else emulated_target()
    kernel, runner = _RUNNERS.get_or_make((engine, target.name, record), partial(_build, engine, target, record))
    strides = {f"{name}_strides": _row_strides(views[name]) if name in views else (0, 0, 0) for name in _ROWS}
    values = strides | {
        "table_pitch": views["page_table"].strides[0],
        "most_keys": views["page_table"].shape[1] * page_size,
        "tokens": tokens,
        "heads": heads,
        "head_dim": head_dim,
        "value_dim": value_dim,
        "page_size": page_size,
        "pages": pages,
    }
    count = tokens if record else tokens * heads * max(head_dim, value_dim) // 8
    grid = kernel.grid(Sizes(batch, 0, heads, 0, 0, count=count))
    if grid[0] > _MOST_BLOCKS:
        raise ArgumentError(f"k_new of shape {views['k_new'].shape} is too large for one launch; append it in parts")
    if not value_dim:  # no blocks append values
        grid = (grid[0], 1, grid[2])
    own = {field.name for field in kernel.layout.fields}
    return runner, Launch(grid, ArgumentWriter(kernel.layout, {name: values[name] for name in values if name in own}))


def _build(engine: Engine, target: Any, record: KvRecord | None) -> tuple[Any, Runner]:
    kernel = render_append_records(target, record) if record else render_append(target)
    return kernel, engine.runner(kernel, "flashgen.append_kv(...) where FLASHGEN_JIT is not 0")


def _row_strides(view: View) -> tuple[int, int, int]:
    """Returns the strides along (batch or page, head, row)."""
    batch, row, head, _ = view.strides
    return batch, head, row


def record_of(views: Mapping[str, View]) -> KvRecord | None:
    """Returns the records that the pages hold, which are arrays of bytes; None for pages of rows."""
    return next((each for each in KV_RECORDS.values() if views["k"].dtype == each.element.name), None)


def _check_rows_of_records(views: dict[str, View], record: KvRecord) -> None:
    """Raises ArgumentError if the new keys cannot be encoded as records, or the pages hold no records."""
    if "v" in views:
        raise ArgumentError(f"v: the pages of {record.name} have no v; give None for v_new and v")
    check_records("k", views["k"], record)
    check_record_strides("k", views["k"], record)
    new, page_stride = views["k_new"], views["k"].strides[0]
    if len(new.shape) != 4 or new.dtype != "bfloat16" or new.shape[2:] != (1, record.head_dim):
        raise ArgumentError(
            f"k_new is {new.dtype} {new.shape}; with pages of {record.name} give bfloat16 (batch, new keys, 1, "
            f"{record.head_dim})"
        )
    _check_rows("k_new", new)
    distance = page_stride if views["k"].shape[0] > 1 else 0
    if all(views["k"].shape) and (distance | views["k"].pointer) % _ROW_ALIGNMENT:
        raise ArgumentError(
            f"k at address {views['k'].pointer:#x} with strides {views['k'].strides} (bytes): pages must start at "
            f"multiples of {_ROW_ALIGNMENT} bytes"
        )


def _check(views: dict[str, View]) -> None:
    if record := record_of(views):
        _check_rows_of_records(views, record)
    else:
        _check_row_arrays(views)
    _check_pages(views)


def _check_row_arrays(views: dict[str, View]) -> None:
    """Raises ArgumentError if the rows of new keys and values do not fit those of the pages."""
    for name in (name for name in _ROWS if name in views):
        view = views[name]
        if len(view.shape) != 4 or view.dtype not in ELEMENTS or view.dtype != views["k"].dtype:
            what = f"{name} is {view.dtype} {view.shape}"
            axes = "(batch, new keys, heads_kv, dim)" if name.endswith("_new") else "(pages, page_size, heads_kv, dim)"
            raise ArgumentError(f"{what}; give {axes}, all of one dtype, float16 or bfloat16")
        _check_rows(name, view)
    batch, tokens = views["k_new"].shape[:2]
    wanted = {"v_new": (batch, tokens, views["k_new"].shape[2]), "v": views["k"].shape[:3]}
    for name, shape in wanted.items():
        if name in views and views[name].shape[:3] != shape:
            raise ArgumentError(f"{name} is {views[name].shape}; give {(*shape, 'dim')}, as of k")
    for pages in _written(views):
        new = f"{pages}_new"
        if views[new].shape[2:] != views[pages].shape[2:]:
            shapes = f"{new} is {views[new].shape} and {pages} {views[pages].shape}"
            raise ArgumentError(f"{shapes}; heads and dims must agree")


def _check_pages(views: dict[str, View]) -> None:
    """Raises ArgumentError if the page table, the lengths or the pages do not fit the new keys."""
    batch, size = views["k_new"].shape[0], views["k"].shape[1]
    if size & (size - 1) or not 1 <= size <= MAX_PAGE_SIZE:
        raise ArgumentError(f"k has pages of {size} keys; give a power of 2 from 1 to {MAX_PAGE_SIZE}")
    if batch > _MOST_BATCH:
        raise ArgumentError(f"k_new has batch {batch}; give at most {_MOST_BATCH}")
    for name, dimensions in {"page_table": 2, "seqused_k": 1}.items():
        fits = len(views[name].shape) == dimensions and views[name].shape[0] == batch
        if views[name].dtype != "int32" or not fits:
            raise ArgumentError(f"{name} is {views[name].dtype} {views[name].shape}; give int32 of batch {batch}")
    check_table(views)
    for name in _written(views):
        check_no_overlap(name, views[name])
    for name, view in views.items():
        if view.device != views["k"].device:
            raise ArgumentError(f"{name} is on GPU {view.device} and k on {views['k'].device}; move it there")


def _check_rows(name: str, view: View) -> None:
    """Raises ArgumentError if 8 elements of a row cannot be copied at once."""
    check_aligned(name, view)
    batch, row, head, last = view.strides
    dim = view.shape[3]
    misaligned = [
        stride for stride, size in zip((batch, row, head), view.shape, strict=False) if size > 1 and stride % 8
    ]
    if dim % 8 or (all(view.shape) and (last != 1 or misaligned or view.pointer % 16)):
        raise ArgumentError(
            f"{name} at address {view.pointer:#x} with shape {view.shape}, strides {view.strides} (elements): rows "
            "must be contiguous, of a multiple of 8 elements, and start at multiples of 16 bytes"
        )
