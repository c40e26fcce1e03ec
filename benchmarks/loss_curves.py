"""Compares the loss curves of trainings that differ in their attention alone.

Training amplifies rounding differences: the losses of two runs whose attentions round differently diverge until they
differ as much as those of any two runs. A curve is therefore compared with that of standard attention in two ways:

- over the first steps, unsmoothed, before differences have grown: a wrong attention differs from the beginning;
- over all steps, smoothed by a trailing mean, which keeps the trend and removes spikes.

The floor of both comparisons is the difference between standard attention and standard attention in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

STANDARD, FLOOR = "standard", "standard in float32"
FIRST, SMOOTHED = 30, 30
"""The number of first steps that are compared unsmoothed, and the window of the trailing mean."""


def smoothed(losses: Sequence[float], steps: int = SMOOTHED) -> list[float]:
    """Returns the trailing mean over `steps` losses; the first means are over fewer."""
    sums = [0.0, *accumulate(losses)]
    return [(sums[i + 1] - sums[max(i + 1 - steps, 0)]) / min(i + 1, steps) for i in range(len(losses))]


def apart(curve: Sequence[float], wanted: Sequence[float]) -> float:
    """Returns the maximum relative difference of a curve from the wanted curve of the same length."""
    return max(abs(a - b) / abs(b) for a, b in zip(curve, wanted, strict=True))


def compared(curves: Mapping[str, Sequence[float]]) -> list[str]:
    """Returns a line per curve, the floor first; no lines if the curve of standard attention is missing."""
    wanted = curves.get(STANDARD)
    others = [name for name in (FLOOR, *curves) if name in curves and name != STANDARD]
    if not wanted or not others:
        return []
    first = min(FIRST, len(wanted))
    lines = [
        f"losses of {len(wanted)} steps beside standard attention's: maximum difference of means over {SMOOTHED} "
        f"steps; of single losses among the first {first}"
    ]
    for name in dict.fromkeys(others):
        whole = apart(smoothed(curves[name]), smoothed(wanted))
        begin = apart(curves[name][:first], wanted[:first])
        what = "the floor, " if name == FLOOR else ""
        lines.append(f"{what}{name}: {100 * whole:.2f}%; {100 * begin:.3f}%")
    return lines
