"""Errors that refuse something name the page of limits, and the pages on limits and stability match the code."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flashgen as fg
from flashgen.attention.swapped_axes import _FEW_ROWS, _MANY_HEADS
from flashgen.codegen.dispatch import render_backward_kernels, render_forward_kernels
from flashgen.codegen.stages import RENAMED_ROLES
from flashgen.codegen.targets import TARGETS
from flashgen.errors import LIMITS_PAGE, SpecError, UnsupportedError
from flashgen.language.operations import LONGEST, MAX_HEADS
from flashgen.language.spec import MAX_HEAD_DIM, MAX_VALUE_DIM

ROOT = Path(__file__).parents[2]
LIMITS = (ROOT / LIMITS_PAGE).read_text(encoding="utf-8")


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def sm_75() -> Any:
    return fg.compile(fg.AttentionSpec(64, "bfloat16"), target="sm_75")


@pytest.mark.parametrize(
    "refused",
    [
        lambda: fg.AttentionSpec(64, "float32"),
        lambda: fg.AttentionSpec(MAX_HEAD_DIM + 8),
        lambda: fg.AttentionSpec(40, page_size=16, kv_dtype="int8"),
        lambda: fg.AttentionSpec(64, layout="thd", kv_dtype="int8"),
        lambda: fg.AttentionSpec(64, page_size=16, sharded=True),
        lambda: fg.compile(fg.AttentionSpec(64), target="sm_70"),
        lambda: fg.compile(fg.AttentionSpec(512), target="sm_75"),
        lambda: fg.AttentionSpec(64, shared_kv=True, kv_dtype="int8"),
        lambda: fg.AttentionSpec(512, "bfloat16", shared_kv=True, page_size=64, kv_dtype="fp8_ds_mla"),
        lambda: fg.AttentionSpec(576, value_dim=512, shared_kv=True, page_size=64, kv_dtype="fp8_ds_mla"),
        lambda: fg.compile(fg.AttentionSpec(64, layout="thd"), target="sm_80").tiles(64),
        lambda: fg.compile(fg.AttentionSpec(64, page_size=16), target="sm_80").build_backward(),
        sm_75,
    ],
)
def test_what_is_refused_names_the_page_once_in_one_line(refused: Callable[[], Any]) -> None:
    with pytest.raises((SpecError, UnsupportedError)) as caught:
        refused()
    message = str(caught.value)
    assert message.count(LIMITS_PAGE) == 1 and "\n" not in message


def test_the_page_has_the_widest_dims_of_sm_75() -> None:
    target = TARGETS["sm_75"]
    for render, dim in ((render_forward_kernels, MAX_VALUE_DIM), (render_backward_kernels, 384)):
        with pytest.raises(UnsupportedError) as caught:
            render(fg.AttentionSpec(dim), target)
        (widest,) = re.findall(r"up to (\d+) columns", str(caught.value))
        assert re.search(rf"sm_75 .*\b{widest}\b", LIMITS)


def test_the_page_names_every_target_and_the_limits_of_the_code() -> None:
    assert set(TARGETS) <= set(re.findall(r"sm_\d+a?", LIMITS))
    assert f"head dims of more than {MAX_HEAD_DIM} columns" in LIMITS
    assert f"value dims of more than {MAX_VALUE_DIM} columns" in LIMITS and f"{MAX_HEADS} sequences or heads" in LIMITS
    assert LONGEST == 10**9 and "10^9 keys" in LIMITS
    assert f"at least {_MANY_HEADS} heads" in page("entry-points.md")
    assert f"at most {_FEW_ROWS} rows" in page("entry-points.md")


def test_every_renamed_kernel_is_in_the_table_of_deprecations() -> None:
    (row,) = [line for line in page("stability.md").splitlines() if line.startswith("| kernels ")]
    for old, new in RENAMED_ROLES.items():
        assert f"`{old}`" in row and f"`{new}`" in row
