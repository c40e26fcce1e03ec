"""Sequences on several GPUs, beside torch's and a ring over FlashAttention-2: `flashgen bench context`.

Each rank is a process that this package starts, so that no launcher is needed.
"""

from benchmarks.context.ranks import gpus_here
from benchmarks.context.rows import CONTENDERS, ContextRow, Shape, context_rows, context_summary

__all__ = ["CONTENDERS", "ContextRow", "Shape", "context_rows", "context_summary", "gpus_here"]
