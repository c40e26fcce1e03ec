"""What is timed: sizes, their inputs, and how much arithmetic they take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashgen.language.spec import AttentionSpec

TOKENS = 16384  # of a case, over all batches
WIDTH = 2048  # heads x head_dim


@dataclass(frozen=True)
class Case:
    """One size of one spec: batch x length is TOKENS, heads x head_dim is WIDTH, as in the FlashAttention papers."""

    spec: AttentionSpec
    length: int
    batch: int
    heads: int

    @property
    def flops(self) -> float:
        """Of the two products, counted whole for an unmasked spec and half for a causal one."""
        full = 2.0 * self.batch * self.heads * self.length**2 * (self.spec.head_dim + self.spec.value_dim)
        return full * self.share

    @property
    def share(self) -> float:
        """Share of the scores that count: by the usual convention, half for a mask that is exactly causal."""
        return 0.5 if self.spec.mask.name.startswith("causal(") else 1.0

    def __str__(self) -> str:
        return f"{self.spec.name} {self.batch}x{self.heads}x{self.length}"


def case(spec: AttentionSpec, length: int, tokens: int = TOKENS, width: int = WIDTH) -> Case:
    """The case of a spec at a length."""
    return Case(spec, length, max(tokens // length, 1), max(width // spec.head_dim, 1))


def inputs(case: Case, seed: int = 0) -> tuple[Any, Any, Any]:
    """Fresh random q, k, v: torch tensors where torch is installed (its backends need them), else CuPy arrays."""
    shape = (case.batch, case.heads, case.length)
    dims = (case.spec.head_dim, case.spec.head_dim, case.spec.value_dim)
    try:
        import torch
    except ImportError:
        import cupy

        from flashgen.runtime.arrays import numpy_dtype

        generator = cupy.random.default_rng(seed)
        dtype = numpy_dtype(case.spec.dtype)
        return tuple(generator.standard_normal((*shape, d), cupy.float32).astype(dtype) for d in dims)
    torch.manual_seed(seed)
    dtype = getattr(torch, case.spec.dtype)
    return tuple(torch.randn((*shape, d), device="cuda", dtype=dtype) for d in dims)
