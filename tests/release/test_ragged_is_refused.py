"""Releases say by name what they do not hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashgen.errors import UnsupportedError
from flashgen.release.folder import build


def test_ragged_batches(tmp_path: Path) -> None:
    manifest = tmp_path / "release.toml"
    manifest.write_text('[[kernels]]\nmask = "causal()"\nhead_dim = 64\nlayout = "thd"\ntarget = ["sm_80"]\n')
    with pytest.raises(UnsupportedError, match="a release is not supported for layout='thd'"):
        build(manifest, tmp_path / "out", sources_only=True)
