"""Measures kernels on a GPU beside their peers, in one run: `flashgen bench`."""

from flashgen.bench.measure import Row, environment, forward_rows
from flashgen.bench.plans import plan_rows

__all__ = ["Row", "environment", "forward_rows", "plan_rows"]
