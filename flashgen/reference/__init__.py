"""The NumPy reference that every kernel is judged by, and the papers' algorithms with their HBM traffic."""

from flashgen.reference import numerics
from flashgen.reference.backward import backward, backward_of_rounded_output, low_precision_backward
from flashgen.reference.dropout import dropout_keep, threshold
from flashgen.reference.gradients import Gradients
from flashgen.reference.merging import merge_states
from flashgen.reference.numerics import Verdict, judge
from flashgen.reference.oracle import attention, low_precision
from flashgen.reference.philox import philox4x32
from flashgen.reference.splits import flash_decoding
from flashgen.reference.tiled import flash1, flash2, standard
from flashgen.reference.tiled_backward import flash_backward, standard_backward
from flashgen.reference.traffic import (
    Blocks,
    HbmTraffic,
    flash1_blocks,
    flash2_blocks,
    traffic_flash1,
    traffic_flash2,
    traffic_flash_backward,
    traffic_flash_decoding,
    traffic_standard,
    traffic_standard_backward,
)

__all__ = [
    "Blocks",
    "Gradients",
    "HbmTraffic",
    "Verdict",
    "attention",
    "backward",
    "backward_of_rounded_output",
    "dropout_keep",
    "flash1",
    "flash1_blocks",
    "flash2",
    "flash2_blocks",
    "flash_backward",
    "flash_decoding",
    "judge",
    "low_precision",
    "low_precision_backward",
    "merge_states",
    "numerics",
    "philox4x32",
    "standard",
    "standard_backward",
    "threshold",
    "traffic_flash1",
    "traffic_flash2",
    "traffic_flash_backward",
    "traffic_flash_decoding",
    "traffic_standard",
    "traffic_standard_backward",
]
