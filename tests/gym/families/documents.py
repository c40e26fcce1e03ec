"""Packed documents: by ids and offsets with an inner mask, with shared prefixes, and of equal length."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

import flashgen.language as fg
from families.entry import Captures, Entry, longest, nowhere
from flashgen.verify import Shape

DOC, OFF = fg.Tensor("doc", "int32", 1), fg.Tensor("off", "int32", 1)
PFX = fg.Tensor("pfx", "int32", 1)


def document(inner: fg.Mask) -> fg.Mask:
    """Positions restart in each document, for the inner mask."""

    def document(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (DOC[q] == DOC[k]) & inner(b, h, q - OFF[DOC[q]], k - OFF[DOC[k]])

    return fg.trace_mask(document, f"document({inner.name})")


def shared_prefix(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Causal documents that also see all of another one: the prompt that they share."""
    d = DOC[q]
    p = PFX[d]
    return ((k >= OFF[d]) & (q >= k)) | ((d != p) & (OFF[p] <= k) & (k < OFF[p + 1]))


def batchify(length: int, inner: fg.Mask) -> fg.Mask:
    """Consecutive sequences of equal length."""

    def batchify(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q // length == k // length) & inner(b, h, q % length, k % length)

    return fg.trace_mask(batchify, f"batchify({length}, {inner.name})")


def packed(shape: Shape, random: np.random.Generator) -> Captures:
    """About ten documents of random lengths, one of them with a single token."""
    total = longest(shape)
    cuts = random.choice(np.arange(2, total), size=min(8, total // 8), replace=False)
    off = np.unique(np.concatenate([[0, 1, total], cuts])).astype(np.int32)
    doc = np.repeat(np.arange(len(off) - 1, dtype=np.int32), np.diff(off))
    return {"doc": doc, "off": off}


def packed_ids(shape: Shape, random: np.random.Generator) -> Captures:
    """For an inner mask that reads no positions."""
    return {"doc": packed(shape, random)["doc"]}


def packed_with_prefixes(shape: Shape, random: np.random.Generator) -> Captures:
    captures = packed(shape, random)
    number = len(captures["off"]) - 1
    pfx = np.array([d - d % 4 for d in range(number)], np.int32)  # groups of four share their first document
    return captures | {"pfx": pfx}


def within_documents(shape: Shape, captures: Captures, before: int, after: int) -> np.ndarray:
    """Each document separately, with keys at most `before` positions before the query and `after` after it."""
    allowed, off = nowhere(shape), captures["off"]
    for first, end in itertools.pairwise(off):
        for q in range(first, min(end, shape.len_q)):
            allowed[q, max(first, q - before) : min(end, q + after + 1)] = True
    return allowed


def with_prefixes(shape: Shape, captures: Captures) -> np.ndarray:
    allowed, off = within_documents(shape, captures, longest(shape), 0), captures["off"]
    for d, p in enumerate(captures["pfx"]):
        if d != p:
            allowed[off[d] : off[d + 1], off[p] : off[p + 1]] = True
    return allowed


def in_batches(shape: Shape, length: int, before: int) -> np.ndarray:
    equal = {"off": np.arange(0, longest(shape) + length, length)}
    return within_documents(shape, equal, before, 0)


def entries(length: int) -> tuple[Entry, ...]:
    window, far, equal = length // 9, 2 * length, length // 6
    causal, near = fg.causal(align="top_left"), fg.sliding_window(window, align="top_left")
    both = fg.sliding_window(window, window // 2, align="top_left")
    return (
        Entry(
            "document_full",
            document(fg.full()),
            captures=packed_ids,
            allowed=lambda s, c: c["doc"][: s.len_q, None] == c["doc"][None, : s.len_k],
        ),
        Entry(
            "document_causal", document(causal), captures=packed, allowed=lambda s, c: within_documents(s, c, far, 0)
        ),
        Entry(
            "document_window",
            document(both),
            captures=packed,
            allowed=lambda s, c: within_documents(s, c, window, window // 2),
        ),
        Entry("shared_prefix", fg.trace_mask(shared_prefix), captures=packed_with_prefixes, allowed=with_prefixes),
        Entry("batchify_causal", batchify(equal, causal), allowed=lambda s, c: in_batches(s, equal, far)),
        Entry("batchify_window", batchify(equal, near), allowed=lambda s, c: in_batches(s, equal, window)),
    )
