"""Measures kernels on a GPU beside their peers, in one run: `flashgen bench`."""

from flashgen.bench.beside_flex import VariantRow, variant_rows
from flashgen.bench.cases import Timed
from flashgen.bench.measure import Row, environment, speed_rows
from flashgen.bench.paper import PaperRow, paper_rows
from flashgen.bench.plans import plan_rows
from flashgen.bench.variants import chosen_variants

__all__ = [
    "PaperRow",
    "Row",
    "Timed",
    "VariantRow",
    "chosen_variants",
    "environment",
    "paper_rows",
    "plan_rows",
    "speed_rows",
    "variant_rows",
]
