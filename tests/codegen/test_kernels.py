"""The kernels of a spec: those that its callable launches, with unique names."""

from __future__ import annotations

import pytest

import flashgen.language as fg
from flashgen.attention import compile
from flashgen.codegen.costs import backward_cost
from flashgen.codegen.stages import kernels_of
from flashgen.codegen.targets import TARGETS
from flashgen.errors import SpecError

SM_80 = TARGETS["sm_80"]
CAUSAL = fg.AttentionSpec(64, mask=fg.causal())
LISTED = fg.AttentionSpec(64, mask=fg.causal() & fg.document("ids"))
LEARNED = fg.AttentionSpec(64, mask=fg.causal(), score=fg.alibi(fg.Tensor("slopes", "float32", 1, grad=True)))


def test_parts_of_each_pass() -> None:
    assert list(kernels_of(CAUSAL, SM_80)) == ["forward"]
    assert list(kernels_of(LISTED, SM_80)) == ["lists", "forward"]
    assert list(kernels_of(CAUSAL, SM_80, ("backward",))) == ["preprocess", "dkdv", "postprocess"]
    assert list(kernels_of(CAUSAL, SM_80, ("backward",), deterministic=True)) == ["preprocess", "dkdv", "dq"]
    assert list(kernels_of(LEARNED, SM_80, ("backward",))) == [
        "preprocess",
        "dkdv",
        "postprocess",
    ]  # accumulated in place
    assert list(kernels_of(LEARNED, SM_80, ("backward",), deterministic=True))[2:] == ["dq", "d_slopes"]
    listed = kernels_of(LISTED, SM_80, ("forward", "backward"), deterministic=True)
    parts = ["lists", "forward", "query_lists", "backward_lists", "preprocess", "dkdv", "dq"]
    assert list(listed) == parts


def test_the_backward_has_five_products_and_the_forward_two() -> None:
    spec = fg.AttentionSpec(64, value_dim=32, score=fg.alibi(fg.Tensor("slopes", "float16", 1, grad=True)))
    parts = kernels_of(spec, SM_80, ("backward",))
    costs = {part: backward_cost(part, spec) for part in parts}
    assert list(costs) == ["preprocess", "dkdv", "postprocess", "d_slopes"]
    assert (
        costs["dkdv"].flops_text
        == f"{2 * (3 * 64 + 2 * 32)} * batch * heads_q * len_q * len_k * (share of tiles visited)"
    )
    # a query: Q and dO, LSE and D, its sums of dQ read and written; a key: K and V, dK and dV
    moved = f"{2 * 96 + 8 + 8 * 64} * batch * heads_q * len_q + {4 * 96} * batch * heads_kv * len_k bytes, at least"
    assert costs["dkdv"].hbm_text == moved
    assert costs["d_slopes"].hbm_text == "6 * elements of slopes bytes, at least"
    keys, queries = (backward_cost(part, spec, dq_apart=True) for part in ("dkdv", "dq"))
    assert keys.flops_text.startswith(f"{2 * (2 * 64 + 2 * 32)} *") and queries.flops_text.startswith(
        f"{2 * (2 * 64 + 32)} *"
    )


def test_an_unknown_pass_is_refused() -> None:
    with pytest.raises(SpecError, match="pass 'sideways' is not known; choose from forward, decode, backward"):
        kernels_of(CAUSAL, SM_80, ("sideways",))  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", [CAUSAL, LISTED, LEARNED], ids=lambda spec: spec.name)
def test_they_are_the_kernels_that_the_callable_launches(spec: fg.AttentionSpec) -> None:
    for deterministic in (False, True):
        attention = compile(spec, target="sm_80", emulate=True, deterministic=deterministic)
        forward = kernels_of(spec, SM_80, ("forward",))
        assert [(kernel.name, kernel.source) for kernel in forward.values()] == list(attention.sources.items())
        backward = kernels_of(spec, SM_80, ("backward",), deterministic=deterministic)
        assert [(kernel.name, kernel.source) for kernel in backward.values()] == list(
            attention.backward_sources.items()
        )


@pytest.mark.parametrize("spec", [CAUSAL, LISTED, LEARNED], ids=lambda spec: spec.name)
def test_names_of_kernels_are_unique(spec: fg.AttentionSpec) -> None:
    kernels = [
        kernel
        for deterministic in (False, True)
        for kernel in kernels_of(
            spec, SM_80, ("forward", "backward"), deterministic=deterministic, unique_names=True
        ).values()
    ]
    sources: dict[str, str] = {}
    assert all(sources.setdefault(kernel.name, kernel.source) == kernel.source for kernel in kernels)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_a_kernel_prints_as_a_line(target: str) -> None:
    compiled = compile(LISTED, target=target, emulate=True)
    for kernel in compiled.kernels:
        shown = repr(kernel)
        assert kernel.name in shown and target in shown and f"{kernel.threads} threads" in shown
        assert f"{len(kernel.source.splitlines())} lines" in shown and len(shown) < 200
    assert len(repr(compiled.kernels)) < 400 and "#include" not in repr(compiled.backward_kernels)
