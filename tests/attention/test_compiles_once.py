"""Kernels depend only on the variant: lengths, batch, heads and strides do not cause recompilation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen.language as fg
from flashgen import attention
from flashgen.attention import callable as callable_module
from flashgen.attention import compiling
from flashgen.build import host
from flashgen.codegen.dispatch import render_forward
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan
from flashgen.codegen.stages import forward_kernels
from flashgen.codegen.targets import TARGETS
from flashgen.verify import Shape, random_inputs

SHAPES = (
    Shape(1, 1, 1, 1, 1), Shape(33, 70, 2, 4, 2), Shape(300, 20, 1, 6, 1), Shape(70, 70, 3, 1, 1), Shape(0, 9, 1, 1, 1),
)  # fmt: skip


class Counter:
    """Counts the calls of the function that it wraps."""

    def __init__(self, function: Any) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        return self.function(*arguments, **options)


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch) -> Counter:
    counter = Counter(host._run_compiler)
    monkeypatch.setattr(host, "_run_compiler", counter)
    return counter


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Counts compilations, which read the disk cache if it is kept from an earlier run."""
    counter = Counter(host.compile_host)
    monkeypatch.setattr(host, "compile_host", counter)
    return counter


@pytest.fixture
def renders(monkeypatch: pytest.MonkeyPatch) -> Counter:
    counter = Counter(forward_kernels)
    monkeypatch.setattr(callable_module, "forward_kernels", counter)
    return counter


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_sizes_do_not_recompile(layout: str, builds: Counter, renders: Counter) -> None:
    scale = 0.3125 if layout == "bhsd" else 0.4375  # a spec that no other test uses
    spec = fg.AttentionSpec(16, scale=scale, mask=fg.causal() & fg.sliding_window(fg.Scalar("window")), layout=layout)
    compiled = attention.compile(spec, emulate=True)
    before = builds.calls
    assert before >= 1 and renders.calls == 1
    for number, shape in enumerate(SHAPES):
        inputs = random_inputs(spec, shape)
        attention.compile(spec, emulate=True)(inputs.q, inputs.k, inputs.v, window=number)
        padded = np.concatenate([inputs.q, inputs.q], axis=-1)[..., :16]
        compiled(padded, inputs.k, inputs.v, window=number)
    assert builds.calls == before and renders.calls == 1


def test_sizes_of_captures_do_not_recompile(builds: Counter) -> None:
    spec = fg.AttentionSpec(16, scale=0.28125, mask=fg.document("ids"))
    compiled = attention.compile(spec, emulate=True)
    before = builds.calls
    for length in (5, 50, 500):
        inputs = random_inputs(spec, Shape(length, length, 1, 1, 1))
        compiled(inputs.q, inputs.k, inputs.v, **inputs.captures)
    assert builds.calls == before


def test_the_source_contains_no_sizes() -> None:
    spec = fg.AttentionSpec(16, mask=fg.causal())
    compiled = attention.compile(spec, emulate=True)
    inputs = random_inputs(spec, Shape(1237, 11, 1, 1, 1))
    compiled(inputs.q, inputs.k, inputs.v)
    assert "1237" not in compiled.source and compiled.source == render_forward(spec, TARGETS["sm_80"]).source


def test_equal_specs_share_a_callable() -> None:
    spec = fg.AttentionSpec(16, mask=fg.causal())
    first = attention.compile(spec, emulate=True)
    assert attention.compile(fg.AttentionSpec.from_json(spec.to_json()), "sm_80", emulate=True) is first
    assert attention.compile(spec, "sm_86", emulate=True) is not first
    assert attention.compile(spec, emulate=True, plan=ForwardPlan(32, 32, 2)) is not first


def test_the_disk_cache_serves_after_clear(compilers: Counter, renders: Counter) -> None:
    spec = fg.AttentionSpec(16, scale=0.34375)
    attention.compile(spec, emulate=True)
    before = compilers.calls
    compiling.clear()
    attention.compile(spec, emulate=True)
    assert compilers.calls == before and renders.calls == 2


def test_repeated_shapes_prepare_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = fg.AttentionSpec(16, scale=0.40625)
    compiled = attention.compile(spec, emulate=True)
    inputs = random_inputs(spec, SHAPES[1])
    first = compiled(inputs.q, inputs.k, inputs.v)
    counter = Counter(compiled._forward._prepare)
    monkeypatch.setattr(compiled._forward, "_prepare", counter)
    np.testing.assert_array_equal(compiled(inputs.q.copy(), inputs.k.copy(), inputs.v.copy()), first)
    assert counter.calls == 0
    compiled(inputs.q[:, :, 1:], inputs.k, inputs.v)
    assert counter.calls == 1
