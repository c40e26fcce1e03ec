"""Specs that operators of torch have no arguments for."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import flashgen as fg
import flashgen.torch
from flashgen.errors import UnsupportedError


def test_ragged_batches_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"flashgen\.torch is not supported for layout='thd'"):
        flashgen.torch.register(fg.AttentionSpec(64, layout="thd"), emulate=True)
