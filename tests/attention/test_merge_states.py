"""Merging attention over disjoint sets of keys gives attention over all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashgen as fg
from emitted_text import all_called, all_used, functions_fit, members_read, tidy, unconditional
from flashgen import reference
from flashgen.attention import merging
from flashgen.codegen.merge_kernel import render_merge
from flashgen.codegen.targets import TARGETS
from flashgen.errors import ArgumentError, LaunchError, UnsupportedError
from flashgen.launch.engines import Emulator
from flashgen.reference import judge
from flashgen.runtime.schedule import Schedule
from flashgen.verify.problems import Shape, random_inputs

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
EPSILON = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-20}


def parts_of(dtype: str, parts: int, shape: tuple[int, ...], layout: str = "bhsd") -> tuple[list[Any], list[Any]]:
    """Random partial results, some without keys, whose outputs are NaN."""
    random = np.random.default_rng(3)
    outs = [random.standard_normal(shape).astype(DTYPES[dtype]) for _ in range(parts)]
    of_lse = shape[:3] if layout == "bhsd" else (shape[0], shape[2], shape[1])
    lses = [random.uniform(-40, 40, of_lse).astype(np.float32) for _ in range(parts)]
    for number, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        empty = random.random(of_lse) < 0.3
        empty[0, 0] = True  # no split has keys for this head
        lse[empty] = -np.inf
        out[empty if layout == "bhsd" else empty.swapaxes(1, 2)] = np.nan if number else 7.0
    return outs, lses


def assert_merged(found: Any, outs: list[Any], lses: list[Any], dtype: str, layout: str) -> None:
    expected, expected_lse = reference.merge_states(outs, lses, layout)
    assert found.out.dtype == outs[0].dtype and found.lse.dtype == np.float32
    np.testing.assert_allclose(found.out.astype(np.float64), expected, rtol=2 * EPSILON[dtype], atol=4 * EPSILON[dtype])
    np.testing.assert_allclose(found.lse, expected_lse, rtol=1e-5, atol=1e-5)
    assert np.isneginf(found.lse[0, 0]).all()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("parts", "dim"), [(2, 64), (3, 8), (5, 24), (16, 256), (2, 512)])
@pytest.mark.covering(6)
def test_merged_states_equal_the_reference(dtype: str, parts: int, dim: int, layout: str) -> None:
    outs, lses = parts_of(dtype, parts, (2, 3, 7, dim), layout)
    assert_merged(fg.merge_states(outs, lses, layout=layout, emulate=True), outs, lses, dtype, layout)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_prefix_merged_with_the_rest_equals_attention_over_all(layout: str) -> None:
    whole = fg.AttentionSpec(64, mask=fg.causal(), layout=layout)
    inputs = random_inputs(whole, Shape(3, 310, 2, 4, 2))
    axis = 2 if layout == "bhsd" else 1
    k, v = (np.split(array, [200], axis) for array in (inputs.k, inputs.v))
    prefix = fg.compile(fg.AttentionSpec(64, layout=layout), emulate=True)
    rest = fg.compile(whole, emulate=True)
    states = [prefix(inputs.q, k[0], v[0], return_lse=True), rest(inputs.q, k[1], v[1], return_lse=True)]
    outs, lses = zip(*states, strict=True)
    merged = fg.merge_states(outs, lses, layout=layout, emulate=True)
    expected, lse = reference.attention(whole, inputs.q, inputs.k, inputs.v, return_lse=True)
    low = reference.merge_states(outs, lses, layout)[0].astype(np.float16)
    np.testing.assert_allclose(merged.out.astype(np.float64), low.astype(np.float64), atol=2e-3)
    verdict = judge(merged.out, expected, reference.low_precision(whole, inputs.q, inputs.k, inputs.v), merged.lse, lse)
    assert verdict.ok, verdict


@pytest.mark.rotated(3)
@pytest.mark.parametrize("sanitize", ["address", "thread"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_under_sanitizers(sanitize: Any, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Emulator(sanitize, Schedule("random", "late", seed=2))
    monkeypatch.setattr(merging, "Emulator", lambda: engine)
    for dtype in DTYPES:
        outs, lses = parts_of(dtype, 3, (2, 3, 7, 40), layout)
        assert_merged(fg.merge_states(outs, lses, layout=layout, emulate=True), outs, lses, dtype, layout)


def test_empty_arrays() -> None:
    out, lse = np.zeros((2, 3, 0, 64), np.float16), np.zeros((2, 3, 0), np.float32)
    merged = fg.merge_states([out, out], [lse, lse], emulate=True)
    assert merged.out.shape == out.shape and merged.lse.shape == lse.shape


OUT, LSE = np.zeros((2, 3, 5, 64), np.float16), np.zeros((2, 3, 5), np.float32)


@pytest.mark.parametrize(
    ("outs", "lses", "said"),
    [
        ([OUT], [LSE], "1 outputs and 1 LSEs: give as many of each, 2 to 16"),
        ([OUT, OUT], [LSE], "2 outputs and 1 LSEs"),
        ([OUT, OUT[:1]], [LSE, LSE], r"outs\[1\] is float16 \(1, 3, 5, 64\); give float16 \(2, 3, 5, 64\)"),
        ([OUT, OUT], [LSE, LSE.astype(np.float64)], r"lses\[1\] is float64 .*; give float32"),
        ([OUT[..., :60], OUT[..., :60]], [LSE, LSE], "rows of 60; give a multiple of 8 up to 512"),
        ([OUT.astype(np.int32)] * 2, [LSE, LSE], r"outs\[0\] is int32"),
        ([OUT[:, :, ::2], OUT[:, :, ::2]], [LSE[..., ::2]] * 2, r"outs\[0\] has strides .*; give a C-contiguous array"),
        ([OUT[0], OUT[0]], [LSE[0], LSE[0]], r"outs\[0\] is float16 \(3, 5, 64\); give 4 dimensions"),
    ],
)
def test_mismatched_parts_are_refused(outs: list[Any], lses: list[Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        fg.merge_states(outs, lses, emulate=True)


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(ArgumentError, match="layout='sbhd' must be 'bhsd' or 'bshd'"):
        fg.merge_states([OUT, OUT], [LSE, LSE], layout="sbhd", emulate=True)


def test_a_target_without_the_dtype_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="dtype='bfloat16' is not supported on sm_75"):
        render_merge("bfloat16", 2, "bhsd", TARGETS["sm_75"])


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_source_follows_the_conventions_of_all_kernels(dtype: str, layout: str) -> None:
    kernel = render_merge(dtype, 3, layout, TARGETS["sm_80"])
    tidy(kernel.source)
    functions_fit(kernel)
    unconditional(kernel.source)
    all_used(kernel)
    all_called(kernel)
    members_read(kernel)


PLANTED = (
    ("a row too many", "if (row >= arguments.rows || column >= arguments.dim) return;", ""),
    ("a column too many", " || column >= arguments.dim", ""),
)


@pytest.mark.parametrize(("name", "line", "instead"), PLANTED, ids=[planted[0] for planted in PLANTED])
def test_out_of_bounds_access_is_caught(name: str, line: str, instead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Emulator("address")
    monkeypatch.setattr(merging, "Emulator", lambda: engine)

    def planted(*how: Any) -> Any:
        kernel = render_merge(*how)
        assert kernel.source.count(line) == 1
        return replace(kernel, source=kernel.source.replace(line, instead))

    monkeypatch.setattr(merging, "render_merge", planted)
    monkeypatch.setattr(merging, "_RUNNERS", type(merging._RUNNERS)())
    outs, lses = parts_of("float16", 2, (2, 3, 7, 40))
    with pytest.raises(LaunchError, match="heap-buffer-overflow"):
        fg.merge_states(outs, lses, emulate=True)


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu(dtype: str, layout: str) -> None:
    cupy = pytest.importorskip("cupy")
    if dtype == "bfloat16":
        pytest.skip("CuPy has no such arrays: torch's are")
    outs, lses = parts_of(dtype, 3, (2, 3, 700, 128), layout)
    there = fg.merge_states(*([cupy.asarray(array) for array in arrays] for arrays in (outs, lses)), layout=layout)
    assert_merged(merging.Merged(*map(cupy.asnumpy, there)), outs, lses, dtype, layout)
    assert_merged(fg.merge_states(outs, lses, layout=layout), outs, lses, dtype, layout)
