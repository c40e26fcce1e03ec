"""Device functions of score functions and their derivatives: text and values."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import sympy

import flashgen.language as fg
from flashgen.analysis.derivatives import derivative, gathers
from flashgen.build import nvrtc
from flashgen.build.host import compile_host
from flashgen.codegen.arguments import ArgumentLayout, Field, capture_fields, ordered
from flashgen.codegen.environment import environment, primitives_for, tidy
from flashgen.codegen.expressions.derivative_text import ScoreGradient, score_gradient
from flashgen.codegen.targets import TARGETS
from flashgen.codegen.variant import Variant, captures_read, variant_of
from flashgen.language.evaluate import evaluate
from flashgen.language.operations import BATCH, HEAD, INDICES, KEY, LEN_K, LEN_Q, QUERY, SCORE, Load
from flashgen.runtime import emulator

STRUCT, ROWS, SCALE = "TestArguments", 64, 0.125
SLOPES = fg.Tensor("slopes", "float32", 1, grad=True)
TABLE = fg.Tensor("table", "float16", 2, grad=True)
IDS = fg.Tensor("ids", "int32", 1)
CAP = fg.Scalar("cap", "float32")


def backward_variant(spec: fg.AttentionSpec, with_gathers: bool = True) -> Variant:
    """Returns the spec's text with derivatives in place of the score function."""
    forward = variant_of(spec)
    return Variant(None, forward.mask, forward.arrays, score_gradient(spec, with_gathers))


def everything(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    gated = fg.where(k < q, s * TABLE[h, q - k], fg.exp(s / 9) * SLOPES[h])
    return cap_of(gated + SLOPES[IDS[k]] * abs(s)) + fg.sigmoid(s * TABLE[b, q]) / CAP + fg.sqrt(s * s + 1)


def cap_of(x: Any) -> Any:
    return 20 * fg.tanh(x / 20)


SCORES = {
    "softcap": fg.softcap(30),
    "softcap of a number": fg.softcap(CAP, precision="accurate"),
    "alibi": fg.alibi(SLOPES),
    "softcap of alibi": fg.softcap(30)(fg.alibi(SLOPES)),
    "relative bias": fg.relative_bias(TABLE, 3),
    "kinks": lambda s, b, h, q, k: fg.clamp(s, -4.0, 4.0) * 2 - abs(s - TABLE[k, q]) + s % 3,
    "constant": lambda s, b, h, q, k: fg.to_float(q) * TABLE[0, k],
    "everything": everything,
}


def gradient_of(name: str) -> ScoreGradient:
    found = score_gradient(fg.AttentionSpec(64, scale=SCALE, score=SCORES[name]))
    assert found is not None
    return found


def rendered(name: str, **options: Any) -> str:
    spec = fg.AttentionSpec(64, scale=SCALE, score=SCORES[name])
    template = environment().get_template("variant.cuh.jinja")
    return tidy(template.render(struct=STRUCT, variant=backward_variant(spec, **options), position=False))


def test_softcap_computes_tanh_once_and_has_the_scale_in_its_constant() -> None:
    assert rendered("softcap") == (
        "// Score function softcap(30). The softmax scale is folded into its constants.\n"
        "// Sets `slope` to its derivative with respect to the score.\n"
        "__device__ __forceinline__ float score_mod(float product, const TestArguments& arguments, float& slope) {\n"
        "  const float x0 = tanh_approx(product * (kScale / 30.0f));\n"
        "  slope = 1.0f - x0 * x0;\n"
        "  return 30.0f * x0;\n"
        "}\n"
    )
    assert gradient_of("softcap").call("scores[n]", "slope") == "score_mod(scores[n], arguments, slope)"


def test_a_slope_of_one_is_omitted() -> None:
    text, gradient = rendered("alibi"), gradient_of("alibi")
    assert gradient.slope is None and "slope:" not in text and "float& slope" not in text
    assert gradient.call("x", "slope") == "score_mod(x * kScale, position.head, q, k, arguments)"
    (gather,) = gradient.gathers
    assert (gather.capture, gather.member, gather.shown, gather.shared) == ("slopes", "slopes", "slopes[h]", "block")
    assert gather.offset_call("x") == "gather0_offset(position.head, arguments)"
    assert gather.addend("ds", "dx", "x") == "ds * gather0_factor(q, k, arguments)"
    for line in (
        "// Returns the row-major offset of slopes[h] in the array.",
        "__device__ __forceinline__ long long gather0_offset(int h, const TestArguments& arguments) {",
        "// Returns the gradient of slopes[h] divided by the gradient of the modified score.",
        "  return min(static_cast<unsigned>(h), arguments.slopes_size[0] - 1u);",
        "__device__ __forceinline__ float gather0_factor(int q, int k, const TestArguments& arguments) {",
        "  return static_cast<float>(k - q);",
    ):
        assert line in text.splitlines(), line


def test_an_added_gather_has_only_a_position() -> None:
    text = rendered("relative bias")
    assert "_factor(" not in text
    for line in (
        "  long long offset = min(static_cast<unsigned>(h), arguments.table_size[0] - 1u);",
        "  offset = offset * arguments.table_size[1] "
        "+ min(static_cast<unsigned>(min(max(k - q, -3), 3) + 3), arguments.table_size[1] - 1u);",
        "  return offset;",
    ):
        assert line in text.splitlines(), line
    (gather,) = gradient_of("relative bias").gathers
    assert gather.shared == "distance" and gather.addend("ds", "dx", "x") == "ds"


def test_an_added_gather_reuses_the_gradient_of_the_score() -> None:
    """A term that is added to the score in softcap needs no derivative and no tanh of its own."""
    biased, of_alibi = (score_gradient(fg.AttentionSpec(64, score=score)) for score in (
        lambda s, b, h, q, k: cap_of(s + TABLE[h, k]), fg.softcap(30)(fg.alibi(SLOPES)),
    ))  # fmt: skip
    assert biased is not None and of_alibi is not None
    assert biased.gathers[0].addend("ds", "dx", "x") == "dx" and biased.gathers[0].factor is None
    assert of_alibi.gathers[0].addend("ds", "dx", "x") == "dx * gather0_factor(q, k, arguments)"
    assert "gradient of slopes[h] divided by the gradient of the unmodified score." in rendered("softcap of alibi")


def test_negative_indices_are_clamped() -> None:
    (first, *_), text = gradient_of("everything").gathers, rendered("everything")
    assert first.shown == "table[h, q - k]" and "static_cast<unsigned>(max(q - k, 0))" in text


def test_elements_that_several_scores_share() -> None:
    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        number = fg.to_int(fg.floor(s))
        return s + TABLE[b, h] + TABLE[h, q] + TABLE[h, IDS[k]] + TABLE[q, k % 2] + SLOPES[number] + SLOPES[4]

    found = score_gradient(fg.AttentionSpec(64, score=score))
    assert found is not None
    assert [gather.shared for gather in found.gathers] == ["block", "query", "key", "some", "some", "block"]
    assert found.gathers[4].offset_call("x") == "gather4_offset(x * kScale, arguments)"


def test_common_subexpressions_are_printed_once() -> None:
    """Each magnitude doubles the derivative when it is written as a tree."""

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for _ in range(40):
            s = abs(s * SLOPES[h] - 1)
        return s

    found = score_gradient(fg.AttentionSpec(64, score=score))
    assert found is not None and found.gathers[0].factor is not None
    assert len(found.function.declarations) < 300 and len(found.gathers[0].factor.declarations) < 300


def test_nothing_is_emitted_without_gradients() -> None:
    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return fg.where(TABLE[h, q] > 0, s, 2 * s) + fg.to_int(SLOPES[h])

    found = score_gradient(fg.AttentionSpec(64, score=score))
    assert found is not None and found.gathers == ()
    assert score_gradient(fg.AttentionSpec(64)) is None
    assert "gather" not in rendered("everything", with_gathers=False)


# ---- Values ---------------------------------------------------------------------------------------------------------


def sample() -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(8)
    values = {str(symbol): random.integers(0, 9, ROWS).astype(np.int32) for symbol in INDICES}
    return values | {"score": (random.integers(-80, 80, ROWS) / 8 + 0.03).astype(np.float32)}


def captured() -> dict[str, Any]:
    random = np.random.default_rng(9)
    return {
        "slopes": random.normal(size=5).astype(np.float32),
        "table": random.normal(size=(4, 7)).astype(np.float16),
        "ids": random.integers(-3, 9, 6).astype(np.int32),
        "cap": 2.5,
    }


def layout_of(spec: fg.AttentionSpec, gradient: ScoreGradient) -> ArgumentLayout:
    fields = [Field("const int*", f"{symbol}_at") for symbol in INDICES]
    fields += [Field("const float*", "score_at"), Field("float*", "value"), Field("float*", "slope")]
    for number in range(len(gradient.gathers)):
        fields += [Field("long long*", f"place{number}"), Field("float*", f"change{number}")]
    return ordered([*fields, Field("int", "len_q"), Field("int", "len_k"), *capture_fields(captures_read(spec))])


def source_of(spec: fg.AttentionSpec) -> tuple[str, ArgumentLayout]:
    """A kernel with one thread per row, which writes all results of the functions."""
    variant, templates = backward_variant(spec), environment()
    gradient = variant.gradient
    assert gradient is not None
    layout = layout_of(spec, gradient)
    names: dict[sympy.Basic, str] = {symbol: f"arguments.{symbol}_at[i]" for symbol in INDICES}
    product = f"arguments.score_at[i] * {1 / SCALE}f"  # exact, being a power of two
    product = product if gradient.function.operand == "product" else f"({product})"
    lines = ["const int i = blockIdx.x * 32 + threadIdx.x;", "float slope = 1.0f;"]
    lines += [f"arguments.value[i] = {gradient.call(product, 'slope', names)};", "arguments.slope[i] = slope;"]
    for number, gather in enumerate(gradient.gathers):
        lines.append(f"arguments.place{number}[i] = {gather.offset_call(product, names)};")
        lines.append(f"arguments.change{number}[i] = {gather.addend('1.0f', 'slope', product, names)};")
    functions = templates.get_template("variant.cuh.jinja").render(struct=STRUCT, variant=variant, position=False)
    head = f'extern "C" __global__ void derivatives(const __grid_constant__ {STRUCT} arguments) {{\n  '
    text = f"constexpr float kScale = {SCALE}f;\n{functions}\n{head}" + "\n  ".join(lines) + "\n}\n"
    device, shared = primitives_for(text, TARGETS["sm_80"])
    types = templates.get_template("types.cuh.jinja").render(struct=STRUCT, element=None, layout=layout)
    primitives = templates.get_template("primitives.cuh.jinja").render(
        device_primitives=device, shared_primitives=shared, uses_shared_memory=False
    )
    return tidy(f"{types}\n{primitives}\n{text}"), layout


def computed(spec: fg.AttentionSpec) -> dict[str, np.ndarray[Any, Any]]:
    source, layout = source_of(spec)
    arrays: dict[str, Any] = {f"{name}_at": value for name, value in sample().items()} | captured()
    arrays |= {
        field.name: np.full(ROWS, -77, np.int64 if "long" in field.type else np.float32)
        for field in layout.fields
        if field.type in ("float*", "long long*")
    }
    numbers = {"len_q": [9], "len_k": [9], "cap": [arrays.pop("cap")]}
    for name in captured():
        if name in arrays:
            numbers |= {f"{name}_stride": arrays[name].strides, f"{name}_size": arrays[name].shape}
    pointers = {field.name: arrays[field.name] for field in layout.fields if field.type.endswith("*")}
    flat: list[Any] = []
    for field in layout.fields:
        flat += [0] if field.name in pointers else numbers[field.name]
    places = [(layout.offset(name), array) for name, array in pointers.items()]
    kernel = compile_host(source, "derivatives")
    emulator.launch(kernel, (ROWS // 32, 1, 1), (32, 1, 1), 0, struct.pack(layout.format, *flat), places)
    return pointers


def place_in_numpy(gather: Load, values: dict[sympy.Basic, Any], captures: dict[str, Any]) -> np.ndarray[Any, Any]:
    shape: Sequence[int] = captures[gather.capture.name].shape
    indices = [np.broadcast_to(evaluate(index, values, captures), (ROWS,)) for index in gather.indices]
    return np.ravel_multi_index(tuple(indices), tuple(shape), mode="clip")


@pytest.mark.parametrize("name", SCORES)
def test_values_equal_numpys(name: str) -> None:
    spec = fg.AttentionSpec(64, scale=SCALE, score=SCORES[name])
    assert spec.score is not None
    found, captures, rows = computed(spec), captured(), sample()
    values: dict[sympy.Basic, Any] = {symbol: rows[str(symbol)] for symbol in (BATCH, HEAD, QUERY, KEY)}
    values |= {SCORE: rows["score"], LEN_Q: 9, LEN_K: 9}
    expression = spec.score.expression
    expected = {"value": expression, "slope": derivative(expression, SCORE)}
    changing = [gather for gather in gathers(spec) if derivative(expression, gather) != 0]
    for number, gather in enumerate(changing):
        expected[f"change{number}"] = derivative(expression, gather)
        np.testing.assert_array_equal(found[f"place{number}"], place_in_numpy(gather, values, captures))
    assert set(expected) == {key for key, array in found.items() if array.dtype == np.float32} - {"score_at", "slopes"}
    for key, node in expected.items():
        reference = np.broadcast_to(evaluate(node, values, captures).astype(np.float64), (ROWS,))
        np.testing.assert_allclose(found[key], reference, rtol=2e-5, atol=2e-5, err_msg=key)


@pytest.mark.skipif(not nvrtc.is_available(), reason="needs CuPy and NVRTC: pip install '.[cuda13]'")
@pytest.mark.parametrize("name", SCORES)
def test_they_compile_with_nvrtc(name: str) -> None:
    source, _ = source_of(fg.AttentionSpec(64, scale=SCALE, score=SCORES[name]))
    assert nvrtc.compile(source, "sm_80", "derivatives").resources.spill_stores == 0
