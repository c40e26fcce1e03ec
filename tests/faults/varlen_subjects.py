"""Calls of varlen batches on the emulator, forward and backward, with the text of kernels changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import flashgen as fg
from flashgen.runtime.schedule import Schedule
from flashgen.verify import judged, judged_gradients
from flashgen.verify.gradients import gradients_by_name
from planting import Result

_LENGTHS_Q, _LENGTHS_K, _USED_K = (150, 0, 70, 33), (140, 20, 70, 90), (130, 20, 0, 90)
_BEFORE_Q, _BEHIND_Q, _BEFORE_K, _BEHIND_K = 3, 4, 4, 5  # rows that belong to no sequence


def _offsets(lengths: tuple[int, ...], first: int) -> Any:
    return (first + np.concatenate([[0], np.cumsum(lengths)])).astype(np.int32)


@dataclass(frozen=True)
class VarlenSubject:
    """A forward and a backward call, with NaN in keys and values that belong to no sequence.

    Attributes:
        mask: None for a mask whose tiles are listed.
        kernels: the beginning of the names of the kernels in which faults are planted.
        offsets_q: wrong offsets of the sequences in Q: only the forward is called, and its result is not judged.
    """

    target: str
    mask: fg.Mask
    deterministic: bool = False
    kernels: str = ""
    offsets_q: tuple[int, ...] | None = None

    @property
    def _spec(self) -> fg.AttentionSpec:
        return fg.AttentionSpec(64, layout="thd", mask=self.mask)

    def _compiled(self, **options: Any) -> Any:
        return fg.compile(self._spec, self.target, emulate=True, deterministic=self.deterministic, **options)

    def texts(self) -> dict[str, str]:
        compiled = self._compiled()
        every = {**compiled.sources, **compiled.backward_sources}
        return {name: text for name, text in every.items() if name.startswith(self.kernels)}

    def run(
        self, texts: Mapping[str, str] | None, *, sanitize: Any, schedule: Schedule, shared_bytes: int = 0
    ) -> Result:
        compiled = self._compiled(source=texts, sanitize=sanitize, schedule=schedule)
        (q, k, v), d_out, unused = _arrays()
        starts = {
            "cu_seqlens_q": _offsets(_LENGTHS_Q, _BEFORE_Q),
            "cu_seqlens_k": _offsets(_LENGTHS_K, _BEFORE_K),
            "seqused_k": np.array(_USED_K, np.int32),
        }
        if self.offsets_q is not None:
            compiled(q, k, v, **{**starts, "cu_seqlens_q": np.array(self.offsets_q, np.int32)})
            return Result(True)
        poisoned = [np.where(unused[:, None, None], np.float16(np.nan), array) for array in (k, v)]
        out, lse = np.full_like(q, np.nan), np.full((2, len(q)), np.nan, np.float32)
        compiled(q, *poisoned, return_lse=True, out=(out, lse), **starts)
        if not judged(self._spec, q, k, v, out, lse, starts).ok:
            return Result(False)
        into = tuple(np.full_like(array, np.nan) for array in (q, k, v))
        found = compiled.backward(d_out, q, *poisoned, out, lse, into=into, **starts)
        verdicts = judged_gradients(self._spec, q, k, v, d_out, gradients_by_name(found), **starts)
        return Result(all(verdict.ok for verdict in verdicts.values()))


def _arrays() -> tuple[Any, ...]:
    """Returns (Q, K and V; the gradient of the output; which rows of K and V belong to no sequence or are unused)."""
    random = np.random.default_rng(4)
    rows_q = _BEFORE_Q + sum(_LENGTHS_Q) + _BEHIND_Q
    rows_k = _BEFORE_K + sum(_LENGTHS_K) + _BEHIND_K
    q, k, v, d_out = (
        random.standard_normal((rows, 2, 64), dtype=np.float32).astype(np.float16)
        for rows in (rows_q, rows_k, rows_k, rows_q)
    )
    unused = np.ones(rows_k, np.bool_)
    for begin, used in zip(_offsets(_LENGTHS_K, _BEFORE_K), _USED_K, strict=False):
        unused[begin : begin + used] = False
    return (q, k, v), d_out, unused


def varlen_subjects() -> dict[str, VarlenSubject]:
    listed = fg.trace_mask(lambda b, h, q, k: (q // 16 + k // 16 + b) % 3 != 0)
    subjects = {}
    for target in ("sm_80", "sm_90a"):
        for name, kernels in (("", ""), (", forward", "fwd"), (", dK and dV", "bwd-dkdv")):
            subjects[f"{target}{name}"] = VarlenSubject(target, fg.causal(), kernels=kernels)
        subjects[f"{target}, listed tiles"] = VarlenSubject(target, listed, deterministic=True)
        wrong = (-64, 20, 90, 100, 150)
        subjects[f"{target}, wrong offsets"] = VarlenSubject(target, fg.causal(), kernels="fwd", offsets_q=wrong)
    return subjects
