"""Which specs Hopper's own kernels leave to the kernels of mma.sync, and why."""

from __future__ import annotations

from flashgen.codegen.hopper.pages import cache_problem
from flashgen.codegen.padding import MAX_UNSPLIT, is_wide
from flashgen.language.spec import AttentionSpec


def rows_problem(spec: AttentionSpec) -> str | None:
    """Returns why Hopper's own backward kernels cannot hold the rows of a spec; None if they can."""
    if spec.shared_kv:
        return "shared_kv=True is for the kernels of mma.sync; those of wgmma have separate tiles of K and V"
    if is_wide(spec):
        return f"{spec.widest} is for the kernels of mma.sync; those of wgmma have up to {MAX_UNSPLIT} columns"
    return None


def forward_problem(spec: AttentionSpec) -> str | None:
    """Returns why Hopper's own forward kernels cannot run a spec; None if they can.

    Over pages they read neither rows of more than 256 columns, nor V as a part of K. The decode kernel reads both. K
    and V of 8 bits are converted by the producer warpgroup, which reads pages of any size.
    """
    if spec.kv_dtype:
        why = "varlen batches are for the kernels of mma.sync" if spec.is_varlen else rows_problem(spec)
        return f"kv_dtype={spec.kv_dtype!r}: {why}" if why else None
    if spec.page_size and (why := rows_problem(spec)):
        return f"page_size={spec.page_size}: {why}"
    return cache_problem(spec)
