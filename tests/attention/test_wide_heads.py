"""Heads of more than 256 columns: the columns of the output and of gradients are split over warps."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.errors import UnsupportedError
from flashgen.verify import Case, verify
from flashgen.verify.problems import Shape

SPECS: Mapping[str, dict[str, Any]] = {
    "512": {"head_dim": 512, "dtype": "bfloat16", "mask": fg.causal()},
    "264": {"head_dim": 264, "mask": fg.sliding_window(40)},
    "320 and 512": {"head_dim": 320, "value_dim": 512, "score": fg.alibi("slopes")},
    "384 and 64": {"head_dim": 384, "value_dim": 64, "score": fg.softcap(20.0), "mask": fg.causal()},
    "steep scores": {"head_dim": 512, "scale": 1.0},
    "sink": {"head_dim": 512, "sink": fg.Tensor("sinks", "float32", 1), "layout": "bshd"},
    "varlen": {"head_dim": 512, "layout": "thd", "mask": fg.causal(), "dtype": "bfloat16"},
    "documents": {"head_dim": 512, "mask": fg.document("ids"), "out_dtype": "float32"},
    "pages": {"head_dim": 512, "page_size": 16, "mask": fg.causal()},
    "dropout": {"head_dim": 512, "dropout": 0.25},
}
TARGETS = ("sm_80", "sm_86", "sm_90")
TRAINED = {name: options for name, options in SPECS.items() if "page_size" not in options} | {
    "learned": {
        "head_dim": 320,
        "score": fg.relative_bias(fg.Tensor("table", "float32", 2, grad=True), 30),
        "grad_dtype": "float32",
    },
    "learned sink": {"head_dim": 264, "sink": fg.Tensor("sinks", "float32", 1, grad=True), "layout": "thd"},
}
NO_ROOM = {("dropout", "sm_80"), ("dropout", "sm_86")}  # for the backward
MAX_SPILLS = 60  # bytes


@pytest.mark.rotated(3)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", SPECS)
def test_forward(name: str, target: str) -> None:
    if (name, target) == ("dropout", "sm_86"):
        pytest.skip("too little shared memory")
    shape = Shape(70, 70, 2, 4, 2) if name == "documents" else Shape(70, 150, 2, 4, 2)
    for result in verify([Case(fg.AttentionSpec(**SPECS[name]), shape)], target=target, emulate=True):
        assert result.ok, (result.problem, result.verdicts)


@pytest.mark.rotated(3)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", TRAINED)
def test_backward(name: str, target: str, deterministic: bool) -> None:
    if (name, target) in NO_ROOM:
        pytest.skip("too little shared memory")
    shape = Shape(70, 70, 1, 4, 2) if name == "documents" else Shape(70, 100, 1, 4, 2)
    cases = [Case(fg.AttentionSpec(**TRAINED[name]), shape)]
    given: Any = {"passes": ("backward",), "deterministic": deterministic, "target": target, "emulate": True}
    for result in verify(cases, **given):
        assert result.ok, (result.problem, result.verdicts)


@pytest.mark.rotated(2)
@pytest.mark.parametrize("sanitize", ["address", "thread"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_races_and_overflows(direction: Any, sanitize: Any) -> None:
    """One and two stages, two and four warps with the same rows, in several orders of threads and copies."""
    given: Any = {"passes": (direction,), "emulate": True, "sanitize": sanitize, "schedule_count": 2}
    for options in ({"mask": fg.causal()}, {"score": fg.softcap(20.0), "mask": fg.document("ids")}):
        cases = [Case(fg.AttentionSpec(512, **options), Shape(70, 70, 1, 2, 1))]
        for target in ("sm_80", "sm_90"):
            for deterministic in (False, True)[: 1 + (direction == "backward")]:
                for result in verify(cases, target=target, deterministic=deterministic, **given):
                    assert result.ok, (result.problem, result.verdicts)


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", SPECS)
def test_on_a_gpu(name: str, direction: Any) -> None:
    shape = Shape(600, 600, 2, 4, 2) if name == "documents" else Shape(600, 1000, 2, 4, 2)
    for result in verify([Case(fg.AttentionSpec(**SPECS[name]), shape)], passes=(direction,), target="sm_90"):
        assert result.ok, (result.problem, result.verdicts)


@pytest.mark.rotated(4)
@pytest.mark.parametrize("name", SPECS)
def test_default_plans_spill_no_registers(name: str) -> None:
    for target in TARGETS:
        if (name, target) != ("dropout", "sm_86"):
            assert not fg.compile(fg.AttentionSpec(**SPECS[name]), target=target).resources.spills, target


@pytest.mark.rotated(4)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", TRAINED)
def test_default_backward_plans_spill_few_registers(name: str, deterministic: bool) -> None:
    for target in TARGETS:
        if (name, target) not in NO_ROOM:
            compiled = fg.compile(fg.AttentionSpec(**TRAINED[name]), target=target, deterministic=deterministic)
            for kernel, used in compiled.backward_resources.items():
                assert used.spills <= MAX_SPILLS, (kernel, target, used)


REFUSALS: Any = [
    ({}, {"target": "sm_90a"}, "head_dim=512: forward kernels of sm_90a have up to 256 columns; take target='sm_90'"),
    ({}, {"target": "sm_75"}, "head_dim=512: a block of sm_75 has 65536 bytes .* tiles of up to 384 columns"),
    ({"dropout": 0.5}, {"target": "sm_86"}, "head_dim=512: a block of sm_86 .* tiles of up to 320 columns"),
    ({"kv_dtype": "int8"}, {"target": "sm_80"}, "the warps of a decode kernel hold up to 256 columns"),
    ({"page_size": 16, "layout": "thd"}, {"target": "sm_80"}, "the warps of a decode kernel hold up to 256 columns"),
]


@pytest.mark.parametrize(("options", "where", "message"), REFUSALS)
def test_what_has_no_kernel_is_refused_by_name(options: Any, where: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        fg.compile(fg.AttentionSpec(512, **options), **where)


def test_calls_that_have_no_kernel_are_refused_by_name() -> None:
    compiled = fg.compile(fg.AttentionSpec(512), target="sm_80", emulate=True)
    q, k = np.ones((1, 1, 1, 512), "float16"), np.ones((1, 1, 300, 512), "float16")
    assert np.array_equal(compiled(q, k, k), q), "few queries run in the forward kernel"
    with pytest.raises(UnsupportedError, match="the warps of a decode kernel hold up to 256 columns"):
        compiled(q, k, k, num_splits=2)
