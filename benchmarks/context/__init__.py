"""Attention of one sequence on several GPUs, beside other implementations: `python -m benchmarks context`.

This package starts a process for each rank, so that no launcher is needed.
"""

from benchmarks.context.ranks import gpus_here
from benchmarks.context.rows import CONTENDERS, ContextRow, Shape, context_rows, context_summary

__all__ = ["CONTENDERS", "ContextRow", "Shape", "context_rows", "context_summary", "gpus_here"]
