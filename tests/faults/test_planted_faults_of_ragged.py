"""Mistakes in what kernels of ragged batches have of their own, planted in emitted text; each must be noticed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.errors import LaunchError
from flashgen.verify import judged, judged_gradients
from flashgen.verify.gradients import gradients_by_name

LENGTHS_Q, LENGTHS_K = (150, 0, 70, 33), (140, 20, 70, 90)
USED = np.array([130, 20, 0, 90], np.int32)
LISTED = fg.trace_mask(lambda b, h, q, k: (q // 16 + k // 16 + b) % 3 != 0)


def offsets(lengths: tuple[int, ...], first: int) -> Any:
    return (first + np.concatenate([[0], np.cumsum(lengths)])).astype(np.int32)


class Call:
    """A ragged call and its backward, with garbage where calls promise that nobody looks."""

    def __init__(self, mask: fg.Mask, target: str, deterministic: bool = False) -> None:
        self.spec = fg.AttentionSpec(64, layout="thd", mask=mask)
        self.options = {"target": target, "emulate": True, "deterministic": deterministic}
        random = np.random.default_rng(4)
        rows_q, rows_k = sum(LENGTHS_Q) + 7, sum(LENGTHS_K) + 9
        self.q, self.k, self.v = (
            random.standard_normal((rows, 2, 64), dtype=np.float32).astype(np.float16)
            for rows in (rows_q, rows_k, rows_k)
        )
        self.d_out = random.standard_normal(self.q.shape, dtype=np.float32).astype(np.float16)
        self.starts = {"cu_seqlens_q": offsets(LENGTHS_Q, 3), "cu_seqlens_k": offsets(LENGTHS_K, 4), "seqused_k": USED}
        self.unused = np.ones(rows_k, np.bool_)
        for begin, used in zip(self.starts["cu_seqlens_k"], USED, strict=False):
            self.unused[begin : begin + used] = False

    def texts(self) -> dict[str, str]:
        """Every kernel's text by its name."""
        compiled = fg.compile(self.spec, **self.options)
        return {**compiled.sources, **compiled.backward_sources}

    def is_right(self, texts: dict[str, str] | None = None, sanitize: Any = None) -> bool:
        compiled = fg.compile(self.spec, source=texts, sanitize=sanitize, **self.options)
        k, v = self.k.copy(), self.v.copy()
        k[self.unused] = v[self.unused] = np.nan
        out = np.full_like(self.q, np.nan)
        lse = np.full((2, len(self.q)), np.nan, np.float32)
        compiled(self.q, k, v, return_lse=True, out=(out, lse), **self.starts)
        if not judged(self.spec, self.q, self.k, self.v, out, lse, self.starts).ok:
            return False
        into = tuple(np.full_like(array, np.nan) for array in (self.q, k, v))
        found = gradients_by_name(compiled.backward(self.d_out, self.q, k, v, out, lse, into=into, **self.starts))
        verdicts = judged_gradients(self.spec, self.q, self.k, self.v, self.d_out, found, **self.starts)
        return all(verdict.ok for verdict in verdicts.values())


def planted(call: Call, kind: str, right: str, wrong: str) -> dict[str, str]:
    """The texts of the kernels whose name begins like that, with the mistake in each."""
    changed = {
        name: text.replace(right, wrong)
        for name, text in call.texts().items()
        if name.startswith(kind) and right in text
    }
    assert changed, f"{right!r} stands in no kernel of {sorted(call.texts())}"
    return changed


CASES = {
    "sm_80": Call(fg.causal(), "sm_80"),
    "sm_80 listed": Call(LISTED, "sm_80", deterministic=True),
    "sm_90a": Call(fg.causal(), "sm_90a"),
    "sm_90a listed": Call(LISTED, "sm_90a", deterministic=True),
}
every_case = pytest.mark.parametrize("case", CASES)


@every_case
def test_what_is_emitted_is_right(case: str) -> None:
    assert CASES[case].is_right()


FAULTS = {
    "a slot too late": ("", "+ middle < slot) least", "+ middle + 1 < slot) least"),
    "sequences without room for a tile of each": ("", "number + 1);\n  const int rows_", "number);\n  const int rows_"),
    "keys in use not asked for": ("", "if (launched.seqused_k)", "if (false)"),
    "lengths of the whole batch": ("fwd", "arguments.len_k = sequence.len_k;", "arguments.len_k = launched.len_k;"),
    "rows of the first sequence": (
        "fwd",
        "sequence.first_k = first_row_of(number,",
        "sequence.first_k = first_row_of(0,",
    ),
    "an LSE of no sequence": ("fwd", "arguments.lse += sequence.first_q", "arguments.lse += 0"),
    "gradients of keys in use alone": ("bwd-keys", "max(rows_k, 0);\n", "max(min(rows_k, 64), 0);\n"),
    "statistics of other rows": ("bwd-keys", "/ kRowMultiple + number + 1)", "/ kRowMultiple + number)"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("case", ["sm_80", "sm_90a"])
def test_a_mistake_is_noticed(case: str, fault: str) -> None:
    kind, right, wrong = FAULTS[fault]
    texts = planted(CASES[case], kind, right, wrong)
    try:
        noticed = not CASES[case].is_right(texts)
    except LaunchError:
        noticed = True
    assert noticed


@pytest.mark.parametrize("case", ["sm_80 listed", "sm_90a listed"])
def test_lists_of_another_slot_are_noticed(case: str) -> None:
    call = CASES[case]
    assert not call.is_right(planted(call, "", "list_strides.head + work.slot", "list_strides.head + work.slot / 2"))


@pytest.mark.parametrize("kind", ["fwd", "bwd-keys"])
def test_copies_that_are_not_clipped_are_noticed(kind: str) -> None:
    """A tile that runs into the next sequence writes over rows of it, or takes them for keys."""
    call = CASES["sm_90a"]
    right = "return min(max(count - row, 0), kMapRows);"
    assert not call.is_right(planted(call, kind, right, "return kMapRows;"))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["sm_80", "sm_90a"])
def test_offsets_that_are_not_clamped_are_found_by_address_sanitizer(case: str) -> None:
    call = CASES[case]
    texts = planted(call, "fwd", "min(max(__ldg(cu_seqlens + number), 0), total)", "__ldg(cu_seqlens + number)")
    starts = {**call.starts, "cu_seqlens_q": np.array([-64, 20, 90, 100, 150], np.int32)}
    for source in (None, texts):
        compiled = fg.compile(call.spec, source=source, sanitize="address", **call.options)
        if source is None:
            compiled(call.q, call.k, call.v, **starts)
            continue
        with pytest.raises(LaunchError, match=r"AddressSanitizer|outside|overflow"):
            compiled(call.q, call.k, call.v, **starts)
