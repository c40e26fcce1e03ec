"""Launch facts read from kernel texts: complete for emitted kernels, as far as known for edited ones."""

from __future__ import annotations

import pytest

import flashgen.language as fg
from flashgen.codegen.source_text import constants, entry_points, struct_members, without_comments
from flashgen.codegen.stages import kernels_of
from flashgen.codegen.targets import target_named

SLOPES = fg.Tensor("slopes", "float16", 1, grad=True)
SPECS = (
    fg.AttentionSpec(64, mask=fg.causal()),
    fg.AttentionSpec(40, value_dim=72, mask=fg.document("ids") & fg.causal(), score=fg.alibi(SLOPES), dropout=0.1),
)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_emitted_kernel_is_parsed(spec: fg.AttentionSpec, target: str, deterministic: bool) -> None:
    kernels = kernels_of(spec, target_named(target), ("forward", "backward"), deterministic=deterministic)
    for part, kernel in kernels.items():
        code = without_comments(kernel.source)
        ((entry, struct),) = entry_points(code).items()
        assert entry == kernel.entry and struct.endswith("Arguments")
        members = struct_members(code, struct)
        assert members == tuple(field.declaration.removesuffix(";") for field in kernel.layout.fields)
        known = constants(code)
        if "capture" not in kernel.name:
            assert known.get("kThreads", 32 * known.get("kWarps", 0)) == kernel.threads, part


def test_other_ways_to_declare_a_kernel() -> None:
    code = without_comments("""
        // __global__ void commented(A a)
        /* __global__ void commented(A a) */
        __device__ void helper(A a);
        extern "C" __launch_bounds__(128) __global__ void one(const __grid_constant__ A a) {}
        __global__ __launch_bounds__(kThreads, max(1, 2)) void two(A a) {}
        __global__ void
        three(float* x, int n) {}
        extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
        four(A a) {}
        """)
    assert entry_points(code) == {"one": "A", "two": "A", "three": "", "four": "A"}


def test_members_of_a_struct() -> None:
    code = without_comments("struct B { int x; };\nstruct A {\n  const   int* x;   // of B {\n  long long s[2];\n};\n")
    assert struct_members(code, "A") == ("const int* x", "long long s[2]")
    assert struct_members(code, "C") is None


def test_constants_that_can_be_computed() -> None:
    code = """
        constexpr int kA = 12;
        constexpr int kB = kA * (2 + 3) / 7 % 5 - 1;
        constexpr unsigned kC = kA > 3 ? 1 : 2;
        constexpr int kD = missing + 1;
        constexpr float kE = 1.5f;
        constexpr int kF = kA / 0;
        constexpr int kG = __import__("os");
        """
    assert constants(code) == {"kA": 12, "kB": 2}
