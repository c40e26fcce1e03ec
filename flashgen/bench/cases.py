"""The sizes that are timed, their inputs, and their FLOPs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flashgen.codegen.costs import WorkSizes, product_flops
from flashgen.language.spec import AttentionSpec

Timed = Literal["forward", "backward", "both"]
"""The timed pass: the forward, the backward from saved results of the forward, or one after the other."""

Arrays = tuple[Any, Any, Any, Any]
"""q, k, v and the gradient of the output."""

TOKENS = 16384  # batch x length of a case
WIDTH = 2048  # heads x head_dim


@dataclass(frozen=True)
class Case:
    """A size of a spec. By default batch x length is TOKENS and heads x head_dim is WIDTH, as in FlashAttention papers.

    `heads_kv` is the number of heads of k and v; None means as many as q has.
    """

    spec: AttentionSpec
    length: int
    batch: int
    heads: int
    heads_kv: int | None = None

    def flops(self, timed: Timed = "forward") -> float:
        """Returns the FLOPs of the forward (two products), the backward (five), or both; a causal mask halves them."""
        return flops(self.spec, timed, self.work(counted_share(self.spec)))

    def work(self, visited: float = 1.0) -> WorkSizes:
        """Returns the sizes of which FLOPs are a function. `visited` is the share of the scores that is counted."""
        sizes = (self.batch, self.heads, self.heads_kv or self.heads, self.length, self.length)
        return WorkSizes(*sizes, pairs=self.batch * self.length**2, visited=visited)

    def __str__(self) -> str:
        return f"{self.spec.name} {self.batch}x{self.heads}x{self.length}"


def counted_share(spec: AttentionSpec) -> float:
    """Returns the fraction of the scores that is counted: one half for a causal mask, by the usual convention."""
    return 0.5 if spec.mask.name.startswith("causal(") else 1.0


def flops(spec: AttentionSpec, timed: Timed, work: WorkSizes) -> float:
    """Returns the FLOPs of the matrix products of the timed passes."""
    passes: tuple[Literal["forward", "backward"], ...] = ("forward", "backward") if timed == "both" else (timed,)
    return sum(product_flops(spec, pass_, work) for pass_ in passes)


def case(spec: AttentionSpec, length: int) -> Case:
    """Returns the case of a spec at a length."""
    return Case(spec, length, max(TOKENS // length, 1), max(WIDTH // spec.head_dim, 1))


def inputs(case: Case, seed: int = 0) -> Arrays:
    """Returns random q, k, v and dO: torch tensors if torch is installed, for its backends, else CuPy arrays.

    Where V is a part of K, v is None.
    """
    head, value = case.spec.head_dim, case.spec.value_dim
    heads_kv = case.heads_kv or case.heads
    shapes = [
        _shape(case, heads, dim)
        for heads, dim in ((case.heads, head), (heads_kv, head), (heads_kv, value), (case.heads, value))
    ]
    q, k, v, d_out = random_arrays(shapes, case.spec.dtype, seed)
    return q, k, None if case.spec.shared_kv else v, d_out


def _shape(case: Case, heads: int, dim: int) -> tuple[int, ...]:
    return case.spec.batch_layout.from_bhsd((case.batch, heads, case.length, dim))


def has_heads_first(spec: AttentionSpec) -> bool:
    """Returns whether the arrays of a spec are (batch, heads, length, dim), which most peers take."""
    return spec.layout == "bhsd"


def random_arrays(shapes: Sequence[tuple[int, ...]], dtype: str, seed: int) -> list[Any]:
    """Returns random arrays of these shapes: torch tensors if torch is installed, else CuPy arrays."""
    try:
        import torch
    except ImportError:
        import cupy

        from flashgen.dtypes import numpy_dtype

        generator = cupy.random.default_rng(seed)
        return [generator.standard_normal(shape, cupy.float32).astype(numpy_dtype(dtype)) for shape in shapes]
    torch.manual_seed(seed)
    return [torch.randn(shape, device="cuda", dtype=getattr(torch, dtype)) for shape in shapes]
