"""The NumPy reference: what every kernel is judged by, and the papers' algorithms with their HBM traffic."""

from flashgen.reference import numerics
from flashgen.reference.dropout import dropout_keep, threshold
from flashgen.reference.numerics import Verdict, judge
from flashgen.reference.oracle import attention, low_precision
from flashgen.reference.philox import philox4x32
from flashgen.reference.tiled import flash1, flash2, standard
from flashgen.reference.traffic import (
    Blocks,
    HbmTraffic,
    flash1_blocks,
    flash2_blocks,
    traffic_flash1,
    traffic_flash2,
    traffic_standard,
)

__all__ = [
    "Blocks",
    "HbmTraffic",
    "Verdict",
    "attention",
    "dropout_keep",
    "flash1",
    "flash1_blocks",
    "flash2",
    "flash2_blocks",
    "judge",
    "low_precision",
    "numerics",
    "philox4x32",
    "standard",
    "threshold",
    "traffic_flash1",
    "traffic_flash2",
    "traffic_standard",
]
