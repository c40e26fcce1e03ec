"""Which specs Hopper's own kernels leave to the kernels of mma.sync, and why."""

from __future__ import annotations

from flashgen.codegen.hopper.pages import cache_problem
from flashgen.language.spec import AttentionSpec

_MAX_COLUMNS = 256  # of a wgmma: a warpgroup accumulates 64 rows of so many columns in half of its registers


def columns_problem(spec: AttentionSpec) -> str | None:
    """Returns why Hopper's own kernels cannot hold the columns of a spec; None if they can."""
    if spec.max_dim > _MAX_COLUMNS:
        return f"{spec.widest} is for the kernels of mma.sync; those of wgmma have up to {_MAX_COLUMNS} columns"
    return None


def forward_problem(spec: AttentionSpec) -> str | None:
    """Returns why Hopper's own forward kernels cannot run a spec; None if they can."""
    return columns_problem(spec) or cache_problem(spec)
