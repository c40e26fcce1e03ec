"""Tests that append_kv writes new keys and values where the page table says, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashgen as fg
from emitted_text import all_called, all_used, functions_fit, members_read, tidy, unconditional
from flashgen import reference
from flashgen.attention import appending
from flashgen.codegen.append_kernel import render_append
from flashgen.codegen.targets import TARGETS
from flashgen.errors import ArgumentError, LaunchError
from flashgen.launch.engines import Emulator
from flashgen.runtime.schedule import Schedule

Arrays = dict[str, Any]


def problem(size: int, tokens: int, dtype: Any = np.float16, dims: tuple[int, int] = (64, 64)) -> Arrays:
    """Three sequences of 2 heads: an empty one, one that ends at a page border, and one that ends within a page."""
    random = np.random.default_rng(size)
    before = np.array([0, 2 * size, size + size // 2], np.int32)
    used = -(-(before + tokens) // size)
    pages = random.permutation(int(used.sum()) + 2).astype(np.int32)
    table = np.full((3, int(used.max())), -1, np.int32)
    first = 0
    for b, count in enumerate(used):
        table[b, :count] = pages[first : first + count]
        first += count
    new = [random.standard_normal((3, tokens, 2, dim)).astype(dtype) for dim in dims]
    whole = [random.standard_normal((len(pages), size, 2, dim)).astype(dtype) for dim in dims]
    return dict(zip(("k_new", "v_new", "k", "v"), [*new, *whole], strict=True)) | {
        "page_table": table,
        "seqused_k": before,
    }


def appended(arrays: Arrays) -> tuple[Any, Any]:
    """Returns the expected pages, computed by plain loops; keys without a page are omitted."""
    k, v = arrays["k"].copy(), arrays["v"].copy()
    table, (pages, size) = arrays["page_table"], arrays["k"].shape[:2]
    for b, before in enumerate(arrays["seqused_k"].astype(np.int64)):
        for i in range(arrays["k_new"].shape[1]):
            key = before + i
            if 0 <= key < table.shape[1] * size and 0 <= table[b, key // size] < pages:
                k[table[b, key // size], key % size] = arrays["k_new"][b, i]
                v[table[b, key // size], key % size] = arrays["v_new"][b, i]
    return k, v


def assert_appended(arrays: Arrays, **how: Any) -> None:
    expected = appended(arrays)
    fg.append_kv(**arrays, **how)
    for name, wanted in zip("kv", expected, strict=True):
        np.testing.assert_array_equal(arrays[name].view(np.uint16), wanted.view(np.uint16))


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("size", [1, 2, 16, 256])
def test_rows_are_written_where_the_table_says(size: int, tokens: int) -> None:
    assert_appended(problem(size, tokens), emulate=True)


def test_types_and_dims() -> None:
    assert_appended(problem(16, 3, ml_dtypes.bfloat16), emulate=True)
    assert_appended(problem(16, 3, dims=(192, 8)), emulate=True)
    assert_appended(problem(16, 3, dims=(8, 256)), emulate=True)
    assert_appended(problem(16, 3, dims=(512, 264)), emulate=True)


def test_strides() -> None:
    """Slices of packed projections, pages that hold keys beside values, a slice of a larger table."""
    arrays = problem(16, 3)
    packed = np.concatenate([arrays["k_new"], arrays["v_new"]], 3)
    both = np.stack([arrays["k"], arrays["v"]], 1)
    table = np.full((3, 50), -9, np.int32)
    table[:, : arrays["page_table"].shape[1]] = arrays["page_table"]
    expected = appended(arrays)
    views = {"k_new": packed[..., :64], "v_new": packed[..., 64:], "k": both[:, 0], "v": both[:, 1]}
    where = {"page_table": table[:, : arrays["page_table"].shape[1]], "seqused_k": arrays["seqused_k"]}
    fg.append_kv(**views, **where, emulate=True)
    np.testing.assert_array_equal(both, np.stack(expected, 1))


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("sanitize", [None, "address"])
def test_pages_of_keys_alone(tokens: int, sanitize: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """V is a part of K: one array is written, and no block appends values."""
    sanitized(monkeypatch, sanitize)
    arrays = problem(16, tokens, ml_dtypes.bfloat16, dims=(576, 512))
    expected, _ = appended(arrays)
    fg.append_kv(**arrays | {"v_new": None, "v": None}, emulate=True)
    np.testing.assert_array_equal(arrays["k"].view(np.uint16), expected.view(np.uint16))
    for name in ("v_new", "v"):
        with pytest.raises(ArgumentError, match=f"append_kv: {name} is missing; give v_new and v, or None for both"):
            fg.append_kv(**arrays | {name: None}, emulate=True)
    arrays["k_new"] = arrays["k"][:3, :tokens]
    with pytest.raises(ArgumentError, match="k shares memory with k_new"):
        fg.append_kv(**arrays | {"v_new": None, "v": None}, emulate=True)


def sanitized(monkeypatch: pytest.MonkeyPatch, sanitize: Any) -> None:
    engine = Emulator(sanitize, Schedule("random", "late", seed=2))
    monkeypatch.setattr(appending, "Emulator", lambda: engine)


WRONG = {
    "no pages": ("page_table", lambda table: np.where(table % 2 == 0, -5, table)),
    "pages behind the last": ("page_table", lambda table: table + 100),
    "the largest numbers": ("page_table", lambda table: np.full_like(table, 2**31 - 1)),
    "a full table": ("seqused_k", lambda lengths: lengths + 10**9),
    "the longest": ("seqused_k", lambda lengths: np.full_like(lengths, 2**31 - 1)),
    "negative lengths": ("seqused_k", lambda lengths: lengths - 3),
    "lengths far below 0": ("seqused_k", lambda lengths: lengths - 10**9),
}


@pytest.mark.parametrize("what", WRONG)
def test_keys_without_a_page_are_not_written(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sanitized(monkeypatch, "address")
    arrays, (name, change) = problem(16, 7), WRONG[what]
    arrays[name] = change(arrays[name]).astype(np.int32)
    assert_appended(arrays, emulate=True)


def test_under_thread_sanitizer(monkeypatch: pytest.MonkeyPatch) -> None:
    sanitized(monkeypatch, "thread")
    assert_appended(problem(4, 9), emulate=True)


def test_append_nothing() -> None:
    arrays = problem(16, 3)
    for name in ("k_new", "v_new"):
        arrays[name] = arrays[name][:, :0]
    assert_appended(arrays, emulate=True)


def test_decode_step() -> None:
    """Attention over appended keys equals attention over keys that were there from the start."""
    spec = fg.AttentionSpec(64, mask=fg.causal(), page_size=16)
    arrays = problem(16, 2)
    q = np.random.default_rng(1).standard_normal((3, 4, 2, 64)).astype(np.float16)
    fg.append_kv(**arrays, emulate=True)
    where = {"page_table": arrays["page_table"], "seqused_k": arrays["seqused_k"] + np.int32(2)}
    out = fg.compile(spec, emulate=True)(q, arrays["k"], arrays["v"], **where)
    expected = reference.attention(spec, q, arrays["k"], arrays["v"], **where)
    np.testing.assert_allclose(out.astype(np.float64), expected, atol=2e-3)


PLANTED = (
    ("a page behind the last", "if (page < 0 || page >= arguments.pages) return;", "", "pages behind the last"),
    ("a key behind the table", " || key >= arguments.most_keys", "", "a full table"),
    ("a key before the first", "key < 0 || ", "", "lengths far below 0"),
    ("a row too many", "if (token >= arguments.tokens) return;", "", ""),
)


@pytest.mark.parametrize(("name", "line", "instead", "what"), PLANTED, ids=[planted[0] for planted in PLANTED])
def test_out_of_bounds_access_is_caught(
    name: str, line: str, instead: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sanitized(monkeypatch, "address")

    def planted(*how: Any) -> Any:
        kernel = render_append(*how)
        assert kernel.source.count(line) == 1
        return replace(kernel, source=kernel.source.replace(line, instead))

    monkeypatch.setattr(appending, "render_append", planted)
    for remembered in ("_RUNNERS", "_PREPARED"):
        monkeypatch.setattr(appending, remembered, type(appending._RUNNERS)())
    arrays = problem(16, 7)
    if what:
        array, change = WRONG[what]
        arrays[array] = change(arrays[array]).astype(np.int32)
    with pytest.raises(LaunchError, match=r"heap-buffer-overflow|SEGV"):
        fg.append_kv(**arrays, emulate=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"v_new": lambda a: a[:2]}, r"v_new is \(2, 3, 2, 64\); give \(3, 3, 2, 'dim'\)"),
        ({"k": lambda a: a[:-1]}, r"v is .*; give .*, as of k"),
        ({"k": lambda a: a[:, :12], "v": lambda a: a[:, :12]}, "k has pages of 12 keys; give a power of 2"),
        ({"k_new": lambda a: a[:, :, :1], "v_new": lambda a: a[:, :, :1]}, "heads and dims must agree"),
        (
            {"k_new": lambda a: a.astype(np.float32)},
            r"k_new is float32 .*; give \(batch, new keys, heads_kv, dim\), all of one dtype",
        ),
        ({"seqused_k": lambda a: a.astype(np.int64)}, "seqused_k is int64"),
        ({"page_table": lambda a: a[:1]}, "page_table is int32 .*; give int32 of batch 3"),
        ({"page_table": lambda _: np.array(0, np.int32)}, r"page_table is int32 \(\); give int32 of batch 3"),
        ({"seqused_k": lambda _: np.array(0, np.int32)}, r"seqused_k is int32 \(\); give int32 of batch 3"),
        ({"page_table": lambda _: None}, r"page_table is missing; give int32 \(batch, pages of a sequence\)"),
        ({"seqused_k": lambda _: None}, r"seqused_k is missing; give int32 \(batch,\)"),
        ({"k_new": lambda a: a[..., 4:60], "v_new": lambda a: a[..., 4:60]}, "start at multiples of 16 bytes"),
        ({"k": lambda a: np.broadcast_to(a[:1], a.shape)}, "k is read-only"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mismatched_arrays_are_refused(change: Arrays, said: str) -> None:
    arrays = problem(16, 3)
    for name, changed in change.items():
        arrays[name] = changed(arrays[name])
    with pytest.raises(ArgumentError, match=said):
        fg.append_kv(**arrays, emulate=True)


@pytest.mark.parametrize("name", ["page_table", "seqused_k"])
def test_a_call_without_pages_names_the_arguments(name: str) -> None:
    arrays = problem(16, 3)
    del arrays[name]
    with pytest.raises(ArgumentError, match=f"append_kv: {name} is missing; give int32"):
        fg.append_kv(**arrays, emulate=True)


def test_overlapping_arrays_are_refused() -> None:
    arrays = problem(16, 3)
    arrays["k_new"] = arrays["k"][:3, :3]
    with pytest.raises(ArgumentError, match="k shares memory with k_new"):
        fg.append_kv(**arrays, emulate=True)


def test_every_call_of_the_same_sizes_is_checked() -> None:
    """Checks that depend on sizes are cached; addresses and overlaps are checked in every call."""
    assert_appended(problem(16, 3), emulate=True)
    assert_appended(problem(16, 3), emulate=True)
    shared = problem(16, 3)
    shared["v"] = shared["k"]
    with pytest.raises(ArgumentError, match="k shares memory with v"):
        fg.append_kv(**shared, emulate=True)
    skewed = problem(16, 3)
    room = np.zeros(skewed["k"].size + 1, np.float16)
    skewed["k"] = room[1:].reshape(skewed["k"].shape)
    with pytest.raises(ArgumentError, match="start at multiples of 16 bytes"):
        fg.append_kv(**skewed, emulate=True)
    frozen = problem(16, 3)
    frozen["k"].flags.writeable = False
    with pytest.raises(ArgumentError, match="k is read-only"):
        fg.append_kv(**frozen, emulate=True)


def test_numpy_outputs_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="append_kv writes in place: give arrays of the GPU"):
        fg.append_kv(**problem(16, 3))


def test_source_follows_the_conventions_of_all_kernels() -> None:
    kernel = render_append(TARGETS["sm_80"])
    tidy(kernel.source)
    functions_fit(kernel)
    unconditional(kernel.source)
    all_used(kernel)
    all_called(kernel)
    members_read(kernel)


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("size", [1, 16, 256])
def test_on_a_gpu(size: int) -> None:
    cupy = pytest.importorskip("cupy")
    arrays = problem(size, 40)
    there = {name: cupy.asarray(array) for name, array in arrays.items()}
    fg.append_kv(**there)
    for name, wanted in zip("kv", appended(arrays), strict=True):
        np.testing.assert_array_equal(cupy.asnumpy(there[name]), wanted)
