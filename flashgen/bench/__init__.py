"""Measures kernels on a GPU beside their peers, in one run: `flashgen bench`."""

from flashgen.bench.measure import Row, environment, forward_rows
from flashgen.bench.plans import plan_rows
from flashgen.bench.variants import VariantRow, variant_count, variant_rows

__all__ = ["Row", "VariantRow", "environment", "forward_rows", "plan_rows", "variant_count", "variant_rows"]
