"""Caches of records, kv_dtype="fp8_ds_mla": the bytes of the format, attention on the emulator, appends, refusals."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashgen as fg
from flashgen import reference
from flashgen.codegen.costs import WorkSizes, decode_cost
from flashgen.codegen.dispatch import render_backward_kernels, render_forward
from flashgen.codegen.targets import TARGETS
from flashgen.errors import ArgumentError, SpecError, UnsupportedError
from flashgen.language.kv_records import KV_RECORDS
from flashgen.reference.kv_records import decode_records, encode_records
from flashgen.runtime.schedule import Schedule
from flashgen.verify import Case, verify
from flashgen.verify.problems import Shape, random_inputs

RECORD = KV_RECORDS["fp8_ds_mla"]
BF16 = ml_dtypes.bfloat16
GIVEN: dict[str, Any] = {
    "head_dim": 576,
    "dtype": "bfloat16",
    "value_dim": 512,
    "page_size": 64,
    "shared_kv": True,
    "kv_dtype": "fp8_ds_mla",
}
CASES: Mapping[str, tuple[dict[str, Any], Shape]] = {
    "pages": ({}, Shape(1, 300, 3, 16, 1)),
    "causal": ({"mask": fg.causal(), "page_size": 16}, Shape(2, 150, 2, 12, 1)),
    "sink, small pages": (
        {"page_size": 4, "layout": "bshd", "sink": fg.Tensor("sinks", "float32", 1)},
        Shape(3, 90, 2, 8, 1),
    ),
    "many heads": ({"mask": fg.sliding_window(100), "page_size": 256}, Shape(1, 300, 2, 128, 1)),
    "16 tokens": ({"mask": fg.causal(), "page_size": 32}, Shape(16, 130, 2, 3, 1)),
    "score": ({"score": fg.softcap(20.0), "page_size": 1, "out_dtype": "float32"}, Shape(1, 70, 2, 1, 1)),
    "listed": ({"mask": fg.document("ids") & fg.causal()}, Shape(2, 130, 2, 4, 1)),
}


def spec_of(**options: Any) -> fg.AttentionSpec:
    return fg.AttentionSpec(**GIVEN | options)


def test_the_bytes_of_a_record() -> None:
    """512 float8 numbers, four powers of two, 64 bfloat16: by plain loops, as FlashMLA's reference writes them."""
    random = np.random.default_rng(0)
    rows = (random.standard_normal((5, 576)) * 10.0 ** random.uniform(-6, 4, (5, 1))).astype(BF16)
    rows[0, :128] = 0
    rows[1, 128:256] = 448 * 4  # exactly a power of two
    records = encode_records(RECORD, rows)
    assert records.dtype == np.uint8 and records.shape == (5, 656)
    for row, record in zip(rows.astype(np.float64), records, strict=True):
        scales = record[512:528].view(np.float32)
        for group in range(4):
            numbers = row[group * 128 : group * 128 + 128]
            wanted = 2.0 ** math.ceil(math.log2(max(np.float32(abs(numbers).max()) / np.float32(448), 1e-4)))
            assert scales[group] == wanted
            found = record[group * 128 : group * 128 + 128]
            assert np.array_equal(found, (numbers / wanted).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
        assert np.array_equal(record[528:].view(BF16), row[512:].astype(BF16))
    decoded = decode_records(RECORD, records)
    assert np.abs(decoded - rows.astype(np.float64))[:, :512].max() <= 2.0**-4 * np.abs(rows.astype(float)).max()
    assert np.array_equal(decoded[:, 512:], rows[:, 512:].astype(np.float64))


@pytest.mark.rotated(18)
@pytest.mark.parametrize("sanitize", [None, "address", "thread"])
@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90a"])
@pytest.mark.parametrize("name", CASES)
def test_attention(name: str, target: str, sanitize: Any) -> None:
    options, shape = CASES[name]
    for result in verify([Case(spec_of(**options), shape)], target=target, emulate=True, sanitize=sanitize):
        assert result.ok, (result.problem, result.verdicts)


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str) -> None:
    options, shape = CASES[name]
    for result in verify([Case(spec_of(**options), shape)]):
        assert result.ok, (result.problem, result.verdicts)


def one_key(records: Any, q: Any, target: str = "sm_80") -> tuple[Any, Any]:
    """Returns the output and the LSE of one query head over one key."""
    where = {"page_table": np.zeros((1, 1), np.int32), "seqused_k": np.ones(1, np.int32)}
    compiled = fg.compile(spec_of(scale=1.0, out_dtype="float32"), target=target, emulate=True)
    return compiled(q, records.reshape(1, 1, 1, 656).repeat(64, axis=1), return_lse=True, **where)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_every_number_and_scale_is_read_exactly(target: str) -> None:
    """All finite float8 numbers, with scales from 2^-30 to 2^12: the output is V, and the LSE is q·k."""
    numbers = np.arange(512, dtype=np.uint16).astype(np.uint8)
    numbers[numbers & 0x7F == 0x7F] = 0
    scales = np.array([2.0**-30, 1.5 * 2.0**-7, 3.0, 2.0**12], np.float32)
    plain = np.linspace(-3, 3, 64).astype(BF16)
    record = np.concatenate([numbers, scales.view(np.uint8), plain.view(np.uint8)])
    values = decode_records(RECORD, record)
    for selected in (5, 130, 300, 509, 511, 512, 575):
        q = np.zeros((1, 1, 1, 576), BF16)
        q[..., selected] = 0.5
        out, lse = one_key(record, q, target)
        np.testing.assert_allclose(out[0, 0, 0], values[:512], rtol=2.0**-11)  # P times the scale has 11 bits
        if abs(values[selected]) < 1:  # then P is exactly 1
            assert np.array_equal(out[0, 0, 0], values[:512])
        np.testing.assert_allclose(lse[0, 0, 0], values[selected] / 2, rtol=1e-6)


@pytest.mark.rotated(3)
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_90a"])
@pytest.mark.parametrize("weight", [0.0, -30.0])
def test_scales_that_grow_and_shrink(weight: float, target: str, splits: int) -> None:
    """Tiles of small and of large values in turn. The latter have as much weight as others, or almost none."""
    random = np.random.default_rng(7)
    magnitudes = 2.0 ** np.repeat([-4, 10, -4, 13, 0], 64)[:290]
    rows = random.standard_normal((290, 576))
    rows[:, :512] *= magnitudes[:, None]
    rows[:, 575] = np.where(magnitudes > 1, weight, 0.0)
    k = np.zeros((5 * 64, 656), np.uint8)
    k[:290] = encode_records(RECORD, rows.astype(BF16))
    k[290:] = 255  # NaN
    q = np.zeros((1, 3, 1, 576), BF16)
    q[..., 512:575], q[..., 575] = random.standard_normal((3, 1, 63)) / 4, 1
    where = {"page_table": np.arange(5, dtype=np.int32)[None], "seqused_k": np.array([290], np.int32)}
    spec = spec_of(scale=1.0, out_dtype="float32")
    given = q, k.reshape(5, 64, 1, 656)
    out = fg.compile(spec, target=target, emulate=True)(*given, num_splits=splits, **where)
    expected = reference.attention(spec, *given, **where)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2.0**-9 * np.abs(expected).max())


@pytest.mark.parametrize("order", ["forward", "backward", "random"])
def test_splits_and_orders(order: str) -> None:
    spec, schedule = spec_of(mask=fg.causal()), Schedule(order if order == "random" else "in_order", "late", seed=3)
    inputs = random_inputs(spec, Shape(2, 700, 2, 16, 1))
    compiled = fg.compile(spec, target="sm_90a", emulate=True, schedule=schedule)
    expected = reference.attention(spec, inputs.q, inputs.k, **inputs.captures)
    for splits in (None, 1, 3):
        out = compiled(inputs.q, inputs.k, num_splits=splits, **inputs.captures)
        np.testing.assert_allclose(out.astype(float), expected, atol=0.02)


def append_problem(size: int, tokens: int) -> dict[str, Any]:
    """Returns three sequences: an empty one, one that ends at a page border, and one that ends within a page."""
    random = np.random.default_rng(size)
    before = np.array([0, 2 * size, size + size // 2], np.int32)
    used = -(-(before + tokens) // size)
    pages = random.permutation(int(used.sum()) + 2).astype(np.int32)
    table = np.full((3, int(used.max()) + 1), -1, np.int32)
    first = 0
    for b, count in enumerate(used):
        table[b, :count] = pages[first : first + count]
        first += count
    new = random.standard_normal((3, tokens, 1, 576)) * 10.0 ** random.uniform(-7, 5, (3, tokens, 1, 1))
    new[0, 0, 0, :128] = 0
    k = random.integers(0, 256, (len(pages), size, 1, 656)).astype(np.uint8)
    return {"k_new": new.astype(BF16), "k": k, "page_table": table, "seqused_k": before}


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("size", [1, 16, 64])
def test_appended_bytes_are_those_of_the_reference(size: int, tokens: int) -> None:
    given = append_problem(size, tokens)
    expected, table = given["k"].copy(), given["page_table"]
    records = encode_records(RECORD, given["k_new"])
    for b, before in enumerate(given["seqused_k"]):
        for i in range(tokens):
            page = table[b, (before + i) // size]
            if 0 <= page < len(expected):
                expected[page, (before + i) % size] = records[b, i]
    fg.append_kv(v_new=None, v=None, emulate=True, **given)
    assert np.array_equal(given["k"], expected)


def test_wrong_arrays_are_refused_by_name() -> None:
    given = append_problem(16, 2)
    records = given["k"]
    for changed, message in (
        (
            {"k_new": given["k_new"].astype(np.float16)},
            r"k_new is float16 \(3, 2, 1, 576\); with pages of fp8_ds_mla give",
        ),
        ({"k_new": given["k_new"][..., :512]}, r"k_new is bfloat16 \(3, 2, 1, 512\); with pages of fp8_ds_mla give"),
        ({"k": records[..., :640]}, r"k is uint8 .*640\); fp8_ds_mla takes uint8 \(pages, page_size, 1, 656\)"),
        ({"k": np.asfortranarray(records)}, "k has strides .* must be contiguous, and the records of a page lie side"),
        ({"v_new": given["k_new"], "v": records}, "v: the pages of fp8_ds_mla have no v; give None"),
    ):
        with pytest.raises(ArgumentError, match=message):
            fg.append_kv(**{"v_new": None, "v": None} | given | changed, emulate=True)
    spec = spec_of(page_size=16)
    q, where = np.zeros((3, 4, 1, 576), BF16), {"page_table": given["page_table"], "seqused_k": given["seqused_k"]}
    compiled = fg.compile(spec, target="sm_80", emulate=True)
    for k, message in (
        (
            records.view(ml_dtypes.float8_e4m3fn),
            r"k is float8_e4m3fn .*; fp8_ds_mla takes uint8 .*: give a view such as",
        ),
        (records[:, :, 0], r"k is uint8 .*; fp8_ds_mla takes uint8 \(pages, 16, 1, 656\): give a view such as"),
        (records[..., :576], r"k is uint8 .*576\); fp8_ds_mla takes uint8 \(pages, 16, 1, 656\)"),
        (records[:, :8], r"k is uint8 .*; fp8_ds_mla takes uint8 \(pages, 16, 1, 656\)"),
        (np.repeat(records, 2, axis=2), r"k is uint8 .*2, 656\); fp8_ds_mla takes uint8 \(pages, 16, 1, 656\)"),
        (np.asfortranarray(records), "k has strides .* the records of a page lie side by side"),
    ):
        with pytest.raises(ArgumentError, match=message):
            compiled(q, k, **where)
    with pytest.raises(ArgumentError, match="k_scale: the spec has no 8-bit keys and values; leave it out"):
        compiled(q, records, k_scale=np.ones(1, np.float32), **where)
    with pytest.raises(ArgumentError, match=r"k has dtype float32 .*takes uint8"):
        reference.attention(spec, q, records.astype(np.float32), **where)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 512}, "head_dim=512 must be 576 with kv_dtype='fp8_ds_mla'"),
        ({"value_dim": 256}, "value_dim=256 must be 512 with kv_dtype='fp8_ds_mla'"),
        ({"shared_kv": False}, "shared_kv=False must be True with kv_dtype='fp8_ds_mla'"),
        ({"dtype": "float16"}, "dtype='float16' must be 'bfloat16' with kv_dtype='fp8_ds_mla'"),
        ({"page_size": None}, r"kv_dtype='fp8_ds_mla' needs a page_size: its array is \(pages, page_size, 1, 656\)"),
        ({"layout": "thd"}, "layout='thd' is not supported with kv_dtype='fp8_ds_mla'"),
        ({"dropout": 0.5}, "dropout=0.5 is not supported with kv_dtype='fp8_ds_mla'"),
    ],
)
def test_other_specs_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        spec_of(**options)


def test_json_and_names() -> None:
    spec = spec_of()
    assert fg.AttentionSpec.from_json(spec.to_json()) == spec and "-dsmla-" in spec.name
    assert json.loads(spec.to_json())["kv_dtype"] == "fp8_ds_mla" and "kv_dtype='fp8_ds_mla'" in repr(spec)
    assert fg.AttentionSpec(64).to_json() == fg.AttentionSpec(64, kv_dtype=None).to_json()


def test_there_is_no_backward() -> None:
    with pytest.raises(UnsupportedError):
        render_backward_kernels(spec_of(), TARGETS["sm_80"])


def test_costs_count_the_bytes_of_records() -> None:
    plain = fg.AttentionSpec(**GIVEN | {"kv_dtype": None})
    work = WorkSizes(1, 16, 1, 1, 1000)
    difference = decode_cost(plain, 16).hbm(work) - decode_cost(spec_of(), 16).hbm(work)
    assert difference == 1000 * (576 * 2 - 656)


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90a"])
def test_kernels_read_keys_once(target: str) -> None:
    source = render_forward(spec_of(), TARGETS[target]).source
    assert "kRecordBytes = 656" in source and "v_scale" not in source and "k_scale" not in source
