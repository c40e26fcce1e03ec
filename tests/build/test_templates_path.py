"""Templates are found in a checkout and in an installed package."""

from __future__ import annotations

from pathlib import Path

import pytest

import flashgen.templates_path as templates_path
from flashgen.errors import BuildError


def test_templates_exist() -> None:
    assert (templates_path.template_root() / "device").is_dir()


@pytest.mark.parametrize("place", ["flashgen/templates", "templates"])
def test_both_locations(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / place).mkdir(parents=True)
    monkeypatch.setattr(templates_path, "__file__", str(tmp_path / "flashgen" / "templates_path.py"))
    assert templates_path.template_root.__wrapped__() == tmp_path / place


def test_a_missing_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates_path, "__file__", str(tmp_path / "flashgen" / "templates_path.py"))
    with pytest.raises(BuildError, match="templates are missing"):
        templates_path.template_root.__wrapped__()
