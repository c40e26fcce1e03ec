"""Every call in which faults are planted, by kind and name."""

from __future__ import annotations

from collections.abc import Mapping

from backward_subjects import backward_subjects
from forward_subjects import forward_subjects
from hopper_backward_subjects import hopper_backward_subjects
from instruction_subjects import instruction_subjects
from lists_subjects import lists_subjects
from mixed_subjects import mixed_subjects
from planting import Subject
from varlen_subjects import varlen_subjects

SUBJECTS: Mapping[str, Mapping[str, Subject]] = {
    "forward": forward_subjects(),
    "backward": backward_subjects(),
    "Hopper's backward": hopper_backward_subjects(),
    "Hopper's instructions": instruction_subjects(),
    "mixed batch": mixed_subjects(),
    "varlen batch": varlen_subjects(),
    "tile lists": lists_subjects(),
}
