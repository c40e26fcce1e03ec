"""Calls with heads and rows swapped are recognised by their sizes, and other calls are not."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import flashgen.language as fg
from flashgen import attention
from flashgen.attention.swapped_axes import warn_if_swapped
from flashgen.codegen.sizes import Sizes
from flashgen.errors import ArgumentError, FlashgenWarning

SPEC = fg.AttentionSpec(8)
VARLEN = fg.AttentionSpec(8, layout="thd")


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float16)


def warned(spec: fg.AttentionSpec, heads: int, heads_kv: int, rows: int, keys: int) -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_swapped(spec, Sizes(1, heads, heads_kv, rows, keys, total_q=rows, total_k=keys))
    return bool(caught)


def test_a_swapped_call_warns_once_and_names_both_remedies() -> None:
    q = zeros(1, 512, 2, 8)  # (batch, length, heads, dim)
    compiled = attention.compile(SPEC, emulate=True)
    with pytest.warns(FlashgenWarning, match=r"512 heads of 2 rows .*layout='bshd'.*swapaxes\(1, 2\)") as caught:
        compiled(q, q, q)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(q, q, q)  # from the launch cache


@pytest.mark.parametrize(("heads", "heads_kv", "rows", "keys"), [(1024, 1024, 32, 32), (4096, 4096, 128, 8)])
@pytest.mark.parametrize("spec", [SPEC, VARLEN])
def test_sizes_that_only_swapped_arrays_have(
    spec: fg.AttentionSpec, heads: int, heads_kv: int, rows: int, keys: int
) -> None:
    assert warned(spec, heads, heads_kv, rows, keys)


@pytest.mark.parametrize(
    ("heads", "heads_kv", "rows", "keys"),
    [
        (128, 128, 16, 16),  # as many heads as DeepSeek-V3 has, of a short prompt
        (128, 1, 1, 4096),  # decoding
        (512, 512, 100, 100),  # a batch that was folded into the heads
        (512, 64, 8, 8),  # heads that share keys
        (1024, 1024, 32, 77),  # cross-attention
        (1024, 1024, 0, 0),
        (32, 8, 4096, 4096),
    ],
)
def test_other_sizes_raise_no_alarm(heads: int, heads_kv: int, rows: int, keys: int) -> None:
    assert not warned(SPEC, heads, heads_kv, rows, keys)


def test_pages_have_axes_of_their_own() -> None:
    assert not warned(fg.AttentionSpec(8, page_size=16), 1024, 1024, 32, 32)


def test_an_error_about_heads_says_so_only_if_swapped_arrays_would_fit() -> None:
    compiled = attention.compile(SPEC, emulate=True)
    with pytest.raises(ArgumentError, match=r"20 heads, no multiple .*: declare layout='bshd'"):
        compiled(zeros(1, 20, 4, 8), zeros(1, 30, 2, 8), zeros(1, 30, 2, 8))
    with pytest.raises(ArgumentError, match=r"6 heads, no multiple of the 4 .* of the spec says$"):
        compiled(zeros(1, 6, 100, 8), zeros(1, 4, 100, 8), zeros(1, 4, 100, 8))
