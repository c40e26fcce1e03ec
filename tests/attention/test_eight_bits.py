"""8-bit keys and values: correct on the emulator for both types, every value widened exactly, and on a GPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashgen as fg
from flashgen import attention, reference
from flashgen.build import nvrtc
from flashgen.codegen.mma_sync.decode_plans import DecodePlan
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan
from flashgen.codegen.stages import kernels_of
from flashgen.codegen.targets import TARGETS
from flashgen.errors import ArgumentError, SpecError, UnsupportedError
from flashgen.runtime.schedule import Schedule
from flashgen.verify import variants
from flashgen.verify.check import judged
from flashgen.verify.problems import Inputs, Shape, random_inputs
from flashgen.verify.variants import spec_of
from paged import call

KINDS = ("float8_e4m3fn", "int8")
VARIANTS = variants()
DIMS = (64, 128, 32, 96, 256, 192)
SEED = 7


def narrow(spec: fg.AttentionSpec, kind: str, page_size: int | None = None) -> fg.AttentionSpec:
    names = ("head_dim", "dtype", "value_dim", "scale", "layout", "dropout", "score", "mask")
    given: dict[str, Any] = {name: getattr(spec, name) for name in names}
    return fg.AttentionSpec(**given, page_size=page_size, kv_dtype=kind)


def assert_right(
    spec: fg.AttentionSpec, shape: Shape, splits: int | None = None, captures: Any = None, **how: Any
) -> None:
    inputs, dropout = random_inputs(spec, shape, captures=captures), {"seed": SEED} if spec.dropout else {}
    found = call(attention.compile(spec, emulate=True, **how), inputs, num_splits=splits, **dropout)
    verdict = judged(spec, inputs.q, inputs.k, inputs.v, *found, inputs.captures, **dropout)
    assert verdict.ok, f"{splits} splits of {shape}: {verdict}"


@pytest.mark.slow
@pytest.mark.rotated(36)
@pytest.mark.parametrize("number", range(len(VARIANTS)), ids=lambda number: VARIANTS[number].name)
def test_every_variant(number: int) -> None:
    """Contiguous and paged; more rows than a tile has; tile lists."""
    variant = VARIANTS[number]
    layout = ("bhsd", "bshd")[number % 2]
    spec = spec_of(variant, 64, ("float16", "bfloat16")[number // 2 % 2], layout)
    dims = {"head_dim": DIMS[number % 6], "value_dim": DIMS[number // 2 % 6]}
    plain = fg.AttentionSpec(
        **dims, dtype=spec.dtype, layout=layout, dropout=spec.dropout, score=spec.score, mask=spec.mask
    )
    shape = (Shape(1, 301, 3, 4, 2), Shape(5, 280, 2, 6, 2), Shape(18, 90, 2, 3, 1))[number % 3]
    page_size = None if variant.equal else (None, 1, 16, 64)[number % 4]
    shape = Shape(90, 90, 1, 2, 1) if variant.equal else shape
    schedule = Schedule("random", "late", seed=number)
    assert_right(
        narrow(plain, KINDS[number % 2], page_size), shape, 1 + number % 3, variant.captures, schedule=schedule
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_value_is_widened_exactly(kind: str, dtype: str) -> None:
    """One key: the output is its value times the scale, the LSE its product with q; all 256 bit patterns of each."""
    bits = np.arange(256, dtype=np.uint8)
    numbers = bits.view(np.int8) if kind == "int8" else bits.view(ml_dtypes.float8_e4m3fn)
    finite = np.isfinite(numbers.astype(np.float32))
    spec = fg.AttentionSpec(256, dtype, scale=1.0, kv_dtype=kind)
    compiled = attention.compile(spec, emulate=True)
    values = np.where(finite, numbers, np.zeros_like(numbers)).reshape(1, 1, 1, 256)
    scales = {"k_scale": np.ones(1, np.float32), "v_scale": np.full(1, 0.25, np.float32)}
    q_type = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    out = compiled(np.zeros((1, 1, 1, 256), q_type), np.zeros_like(values), values, **scales)
    np.testing.assert_array_equal(
        out.astype(np.float32), (values.astype(np.float32) * 0.25).astype(q_type).astype(np.float32)
    )
    for first in range(0, 256, 64):  # q selects one element of each key
        keys = np.zeros((1, 1, 64, 256), values.dtype)
        index = np.arange(64)
        keys[0, 0, index, first + index] = values[0, 0, 0, first + index]
        q = np.zeros((1, 1, 64, 256), q_type)
        q[0, 0, index, first + index] = 1
        # One score of the row and 63 of 0: exp(LSE) = exp(score) + 63.
        _, lse = compiled(q, keys, keys, return_lse=True, **scales)
        wanted = np.logaddexp(values[0, 0, 0, first + index].astype(np.float64), np.log(63))
        np.testing.assert_allclose(lse[0, 0], wanted, rtol=2e-6, atol=1e-5)


def test_bits_of_the_widening_functions() -> None:
    """`widen_e4m3` and `widen_int8` without hardware conversion, for every pattern except NaN."""

    def number(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return bits.astype(np.uint16).view(np.float16).astype(np.float64)

    byte = np.arange(256, dtype=np.uint32)
    odd = byte << 8
    small = (odd & 0x8000) | (odd >> 1 & 0x3F80)
    np.testing.assert_array_equal((byte << 8 & 0x8000) | (byte << 7 & 0x3F80), small)  # an even byte
    finite = (byte & 0x7F) != 0x7F
    expected = byte.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal((number(small) * number(np.array([0x5C00])))[finite], expected[finite])
    found = number((byte ^ 0x80) | 0x6400) - number(np.array([0x6480]))
    np.testing.assert_array_equal(found, byte.astype(np.uint8).view(np.int8).astype(np.float64))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_queries_of_any_magnitude(kind: str, dtype: str) -> None:
    """Rows far above and below the range of float16, and rows of zeros, with keys that bring scores near 1."""
    spec = fg.AttentionSpec(64, dtype, scale=1.0, kv_dtype=kind)
    inputs = random_inputs(spec, Shape(2, 100, 4, 6, 2))
    compiled = attention.compile(spec, emulate=True)
    for size in (1e30, 1e-30, 0.0) if dtype == "bfloat16" else (3e4, 1e-3, 0.0):
        scale = np.float32(min(1 / size if size else 1.0, 1e30) / 100)
        q = np.clip(inputs.q.astype(np.float32), -2, 2) * np.float32(size)
        q[:, :, 0] = inputs.q[:, :, 0]  # a row of another magnitude in the same tile
        q = q.astype(inputs.q.dtype)
        captures = inputs.captures | {"k_scale": np.full(1, scale, np.float32)}
        out, lse = call(compiled, Inputs(q, inputs.k, inputs.v, captures))
        verdict = judged(spec, q, inputs.k, inputs.v, out, lse, captures)
        assert verdict.ok, f"{size}: {verdict}"


@pytest.mark.parametrize("kind", KINDS)
def test_unused_rows_of_a_page_have_no_effect(kind: str) -> None:
    """They are float8 NaN, with all bits set."""
    spec = fg.AttentionSpec(64, page_size=16, kv_dtype=kind)
    inputs = random_inputs(spec, Shape(3, 50, 2, 4, 2))
    compiled = attention.compile(spec, emulate=True)
    right = call(compiled, inputs)
    k, v = (array.copy() for array in (inputs.k, inputs.v))
    table, used = inputs.captures["page_table"], inputs.captures["seqused_k"]
    held = np.zeros((k.shape[0], 16), bool)
    for pages, length in zip(table, used, strict=True):
        keys = np.arange(length)
        held[pages[keys // 16], keys % 16] = True
    assert not held.all()
    for array in (k, v):
        array.view(np.uint8)[~held] = 0xFF
    for found, wanted in zip(call(compiled, Inputs(inputs.q, k, v, inputs.captures)), right, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.rotated(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sanitize", ["address", "thread"])
def test_under_sanitizers(sanitize: Any, kind: str) -> None:
    schedule = Schedule("random", "late", seed=5)
    plan = DecodePlan(16, 32, 2, 2)
    for page_size in (None, 16):
        spec = narrow(fg.AttentionSpec(64, value_dim=96, mask=fg.causal()), kind, page_size)
        assert_right(spec, Shape(3, 150, 2, 6, 2), 3, plan=plan, sanitize=sanitize, schedule=schedule)


def test_scales_per_head_and_global() -> None:
    spec = fg.AttentionSpec(64, kv_dtype="int8")
    inputs = random_inputs(spec, Shape(2, 100, 2, 4, 2))
    compiled = attention.compile(spec, emulate=True)
    for k_scale in (np.array([0.5], np.float32), np.array([0.02, 0.4], np.float32)):
        for v_scale in (np.array([0.5], np.float32), np.array([0.02, 4.0], np.float32)):
            inputs.captures.update(k_scale=k_scale, v_scale=v_scale)
            out, lse = call(compiled, inputs)
            assert judged(spec, inputs.q, inputs.k, inputs.v, out, lse, inputs.captures).ok


def test_8_bit_keys_have_rows_at_multiples_of_16_bytes() -> None:
    """Slices of one array with strides that are no multiples of two rows."""
    spec = fg.AttentionSpec(64, mask=fg.causal(), kv_dtype="int8")
    inputs = random_inputs(spec, Shape(2, 100, 2, 4, 2))
    packed = np.zeros((2, 2, 100, 144), np.int8)
    packed[..., :64], packed[..., 64:128] = inputs.k, inputs.v
    compiled = attention.compile(spec, emulate=True, sanitize="address")
    views = Inputs(inputs.q, packed[..., :64], packed[..., 64:128], inputs.captures)
    for array, wanted in zip(call(compiled, views), call(compiled, inputs), strict=True):
        np.testing.assert_array_equal(array, wanted)
    views = Inputs(inputs.q, packed[..., 8:72], packed[..., 64:128], inputs.captures)
    with pytest.raises(ArgumentError, match="every row must start at a multiple of 16 bytes"):
        call(compiled, views)


# ---- refusals


def test_specs_and_json() -> None:
    spec = fg.AttentionSpec(64, page_size=16, kv_dtype="fp8")
    assert spec.kv_dtype == "float8_e4m3fn" and "pages16-fp8" in spec.name and "kv_dtype='float8_e4m3fn'" in repr(spec)
    assert fg.AttentionSpec.from_json(spec.to_json()) == spec != fg.AttentionSpec(64, page_size=16)
    assert "kv_dtype" not in fg.AttentionSpec(64).to_json()
    with pytest.raises(SpecError, match="kv_dtype='float16' is not supported: give one of float8_e4m3fn, int8"):
        fg.AttentionSpec(64, kv_dtype="float16")
    for dims in ({"head_dim": 80}, {"head_dim": 64, "value_dim": 24}):
        with pytest.raises(SpecError, match=r"_dim=\d+ must be a multiple of 32 with a kv_dtype"):
            fg.AttentionSpec(**dims, kv_dtype="int8")  # type: ignore[arg-type]


ONE = np.ones(1, np.float32)
Q, K = np.zeros((2, 4, 1, 64), np.float16), np.zeros((2, 2, 30, 64), np.int8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"k_scale": None}, "k_scale is missing: the spec has kv_dtype='int8'"),
        ({"v_scale": np.ones(3, np.float32)}, r"v_scale is float32 \(3,\); give float32 \(1,\), or \(2,\)"),
        ({"v_scale": np.ones(1)}, r"v_scale is float64 \(1,\); give float32"),
        ({"k": K.astype(np.float16)}, "k has dtype float16; the spec was compiled for int8"),
        ({"v": K.view(np.uint8)}, "v has dtype uint8"),
        ({"page_table": ONE}, "page_table: the spec has no pages; leave it out"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mismatched_arrays_are_refused(change: dict[str, Any], said: str) -> None:
    arrays = {"q": Q, "k": K, "v": K, "k_scale": ONE, "v_scale": ONE} | change
    with pytest.raises(ArgumentError, match=said):
        attention.compile(fg.AttentionSpec(64, kv_dtype="int8"), emulate=True)(**arrays)


def test_scales_without_kv_dtype_are_refused() -> None:
    with pytest.raises(ArgumentError, match="k_scale: the spec has no 8-bit keys and values; leave it out"):
        attention.compile(fg.AttentionSpec(64), emulate=True)(Q, Q, Q, k_scale=ONE)
    with pytest.raises(ArgumentError, match="needs k_scale"):
        reference.attention(fg.AttentionSpec(64, kv_dtype="int8"), Q, K, K)


def test_unsupported_uses_of_8_bits() -> None:
    spec = fg.AttentionSpec(64, kv_dtype="int8")
    compiled = attention.compile(spec, emulate=True)
    assert isinstance(compiled.plan, DecodePlan)
    with pytest.raises(
        UnsupportedError, match=r"kv_dtype='int8': there is no backward of it; gather k and v, in float16"
    ):
        compiled.backward_kernels
    with pytest.raises(UnsupportedError, match="kv_dtype='int8' is for the decode kernel"):
        attention.compile(spec, emulate=True, plan=ForwardPlan(64, 32, 4))


# ---- ptxas and a GPU


@pytest.mark.skipif(not nvrtc.is_available(), reason="needs CuPy and NVRTC: pip install '.[cuda13]'")
@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_86", "sm_90a", "sm_100", "sm_120"])
@pytest.mark.rotated(36)
def test_no_spills(target: str) -> None:
    dtype = "float16" if target == "sm_75" else "bfloat16"
    for number, spec in enumerate((fg.AttentionSpec(128, dtype, mask=fg.causal()), fg.AttentionSpec(64, dtype))):
        for kind in KINDS:
            paged = narrow(spec, kind, (16, None)[number])
            for kernel in kernels_of(paged, TARGETS[target], ("decode",)).values():
                used = nvrtc.compile(kernel.source, kernel.target.architecture, kernel.name).resources
                assert used.spill_stores == used.spill_loads == used.stack_frame == 0, f"{kernel.name}: {used}"


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_on_a_gpu(kind: str, dtype: str) -> None:
    """With torch's tensors, whose 8-bit types CuPy lacks."""
    torch = pytest.importorskip("torch")
    for page_size, shape in (
        (None, Shape(1, 5000, 3, 8, 2)),
        (16, Shape(5, 3000, 3, 6, 2)),
        (1, Shape(33, 700, 2, 4, 1)),
    ):
        spec = fg.AttentionSpec(128, dtype, mask=fg.causal(), page_size=page_size, kv_dtype=kind)
        inputs = random_inputs(spec, shape)
        q = torch.from_numpy(inputs.q.astype(np.float32)).cuda().to(getattr(torch, dtype))
        k, v = (
            torch.from_numpy(array.view(np.uint8)).cuda().view(getattr(torch, kind)) for array in (inputs.k, inputs.v)
        )
        captures = {name: torch.from_numpy(value).cuda() for name, value in inputs.captures.items()}
        for splits in (None, 1, 5):
            out, lse = attention.compile(spec)(q, k, v, return_lse=True, num_splits=splits, **captures)
            found = (out.float().cpu().numpy().astype(inputs.q.dtype), lse.cpu().numpy())
            verdict = judged(spec, inputs.q, inputs.k, inputs.v, *found, inputs.captures)
            assert verdict.ok, f"{page_size}, {splits}: {verdict}"
        home = attention.compile(spec)(inputs.q, inputs.k, inputs.v, return_lse=True, **inputs.captures)
        verdict = judged(spec, inputs.q, inputs.k, inputs.v, *home, inputs.captures)
        assert verdict.ok, f"{page_size}, NumPy's: {verdict}"
