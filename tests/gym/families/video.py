"""Masks of video: near in space or in time, with a sink and a text prefix; and text that looks at images.

spatial, temporal: Sparse VideoGen, arXiv:2502.01776. flamingo: arXiv:2204.14198.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import flashgen.language as fg
from families.entry import Captures, Entry, nowhere, positions
from flashgen.verify import Shape

IMG, IV = fg.Tensor("img", "int32", 1), fg.Tensor("iv", "int32", 2)


def spatial(frame: int, frames_near: float, block: int, prefix: int) -> fg.Mask:
    """Keys within a number of frames, in full blocks; the prefix sees all, and it and the first frame are seen."""
    reach = int(frames_near * frame) // block * block

    def spatial(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (abs(q - k) < reach) | (k < prefix + frame) | (q < prefix)

    return fg.trace_mask(spatial, f"spatial({frame}, {frames_near}, {block}, {prefix})")


def temporal(frame: int, frames_near: float, number: int, prefix: int) -> fg.Mask:
    """Keys at nearly the same position of any frame; the prefix as in `spatial`."""
    reach = int(frames_near * frame) // number

    def temporal(b: Any, h: Any, q: Any, k: Any) -> Any:
        near = abs((q - prefix) % frame - (k - prefix) % frame) < reach
        return near | (k < prefix + frame) | (q < prefix)

    return fg.trace_mask(temporal, f"temporal({frame}, {frames_near}, {number}, {prefix})")


def flamingo(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Keys are tokens of images; text sees an image from its position up to the next one."""
    return (IV[IMG[k], 0] <= q) & (q < IV[IMG[k], 1])


def images(shape: Shape, random: np.random.Generator) -> Captures:
    """Five images of random sizes. Text before the first, and some after the third, sees none of them."""
    cuts = np.sort(random.choice(np.arange(1, shape.len_k), size=4, replace=False))
    img = np.searchsorted(cuts, np.arange(shape.len_k), side="right").astype(np.int32)
    starts = np.linspace(shape.len_q // 7, shape.len_q, 6).astype(np.int32)
    ends = starts[1:].copy()
    ends[2] -= (ends[2] - starts[2]) // 2
    return {"img": img, "iv": np.stack([starts[:-1], ends], axis=1)}


def with_sink(shape: Shape, near: np.ndarray, prefix: int, frame: int) -> np.ndarray:
    near = near.copy()
    near[:, : prefix + frame] = True
    near[:prefix] = True
    return near


def spatially(shape: Shape, frame: int, frames_near: float, block: int, prefix: int) -> np.ndarray:
    reach, allowed = int(np.floor(frames_near * frame / block)) * block, nowhere(shape)
    for q in range(shape.len_q):
        allowed[q, max(0, q - reach + 1) : q + reach] = True
    return with_sink(shape, allowed, prefix, frame)


def temporally(shape: Shape, frame: int, frames_near: float, number: int, prefix: int) -> np.ndarray:
    q, k = positions(shape)
    place_q, place_k = np.mod(q - prefix, frame), np.mod(k - prefix, frame)  # NumPy's floored division
    distance = np.maximum(place_q - place_k, place_k - place_q)
    return with_sink(shape, distance < np.floor(frames_near * frame / number), prefix, frame)


def looked_at(shape: Shape, captures: Captures) -> np.ndarray:
    allowed = nowhere(shape)
    for image, (start, end) in enumerate(captures["iv"]):
        for k in np.flatnonzero(captures["img"] == image):
            allowed[start:end, k] = True
    return allowed


def entries(length: int) -> tuple[Entry, ...]:
    frame = length // 9
    in_space, in_time = (frame, 1.5, 16, length // 20), (frame, 2.0, 9, length // 20)
    return (
        Entry("spatial", spatial(*in_space), allowed=lambda s, c: spatially(s, *in_space)),
        Entry("temporal", temporal(*in_time), allowed=lambda s, c: temporally(s, *in_time)),
        Entry("flamingo", fg.trace_mask(flamingo), captures=images, allowed=looked_at),
    )
