"""Loss curves of trainings that differ in their attention alone, compared so that an error shows and chaos does not.

Training amplifies whatever differs: two runs whose attentions round differently part by a factor in each step, until
they are as far apart as any two good runs. So a curve is judged twice beside standard attention's, and beside a floor:
what standard attention itself is apart from standard attention with other roundings.

- The first steps as they are, before anything was amplified: an attention that is wrong is apart from the beginning.
- All steps, smoothed as the curves of papers are: by a trailing mean, which leaves the trend and takes the leaps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

STANDARD, FLOOR = "standard", "standard in float32"
FIRST, SMOOTHED = 30, 30
"""How many of the first steps are compared as they are; over how many steps a curve is smoothed."""


def smoothed(losses: Sequence[float], steps: int = SMOOTHED) -> list[float]:
    """The mean of the last `steps` losses at each step, of as many as there are at the first ones."""
    sums = [0.0, *accumulate(losses)]
    return [(sums[i + 1] - sums[max(i + 1 - steps, 0)]) / min(i + 1, steps) for i in range(len(losses))]


def apart(curve: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest difference of two curves of as many steps, relative to the second."""
    return max(abs(a - b) / abs(b) for a, b in zip(curve, wanted, strict=True))


def compared(curves: Mapping[str, Sequence[float]]) -> list[str]:
    """A line for each curve beside standard attention's, the floor first; nothing where there is no standard's."""
    wanted = curves.get(STANDARD)
    others = [name for name in (FLOOR, *curves) if name in curves and name != STANDARD]
    if not wanted or not others:
        return []
    first = min(FIRST, len(wanted))
    lines = [
        f"losses of {len(wanted)} steps beside standard attention's: the largest difference of means over "
        f"{SMOOTHED} steps; and of single ones among the first {first}"
    ]
    for name in dict.fromkeys(others):
        whole = apart(smoothed(curves[name]), smoothed(wanted))
        begin = apart(curves[name][:first], wanted[:first])
        what = "the floor, " if name == FLOOR else ""
        lines.append(f"{what}{name}: {100 * whole:.2f}%; {100 * begin:.3f}%")
    return lines
