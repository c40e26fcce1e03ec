"""The package: its entry point, its versions, and the error for others. These tests need no kernels."""

from __future__ import annotations

import importlib
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

import flashgen_sglang
from flashgen_sglang import versions

PACKAGE = Path(__file__).parents[1]
PROJECT = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
README = (PACKAGE / "README.md").read_text(encoding="utf-8")


def sglang_of(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.metadata, "version", lambda name: version)


def test_the_versions_agree() -> None:
    assert PROJECT["version"] == flashgen_sglang.__version__
    for version in flashgen_sglang.TESTED_VERSIONS:
        assert f"SGLang {version}" in README


def test_other_versions_of_sglang_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything of SGLang is imported."""
    sglang_of("0.6.0", monkeypatch)
    with pytest.raises(ImportError, match=r"SGLang 0\.5\.23, and 0\.6\.0 is installed: pip install 'sglang==0\.5\.23'"):
        flashgen_sglang.create_backend(SimpleNamespace())


def test_a_missing_sglang_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(versions.metadata, "version", version)
    with pytest.raises(ImportError, match=r"not installed: pip install 'sglang==0\.5\.23'"):
        versions.check_version()


def test_a_version_without_the_registry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sglang")
    sglang_of("0.7.0", monkeypatch)
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.choices", None)
    with pytest.raises(ImportError, match=r"0\.7\.0 is installed"):
        flashgen_sglang.register()


def test_sglang_loads_the_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang finds the package by the metadata that pip would write, and adds the backend to its choices."""
    pytest.importorskip("sglang")
    plugins, choices, registry = (
        importlib.import_module(f"sglang.srt.{name}")
        for name in ("plugins", "arg_groups.choices", "layers.attention.attention_registry")
    )
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    monkeypatch.setattr(registry, "ATTENTION_BACKENDS", {})
    others = [name for name in choices.ATTENTION_BACKEND_CHOICES if name != flashgen_sglang.NAME]
    monkeypatch.setattr(choices, "ATTENTION_BACKEND_CHOICES", others)
    monkeypatch.setattr(choices, "add_attention_backend_choices", others.extend)
    folder = tmp_path / "flashgen_sglang-0.dist-info"
    folder.mkdir()
    points = PROJECT["entry-points"]["sglang.srt.plugins"]
    lines = [f"{name} = {value}" for name, value in points.items()]
    (folder / "entry_points.txt").write_text("\n".join(["[sglang.srt.plugins]", *lines]), encoding="utf-8")
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: flashgen-sglang\nVersion: 0\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert metadata.entry_points(group="sglang.srt.plugins", name="flashgen")
    plugins.load_plugins()
    assert others.count(flashgen_sglang.NAME) == 1
    assert registry.ATTENTION_BACKENDS[flashgen_sglang.NAME] is flashgen_sglang.create_backend


def test_the_name_is_a_choice_of_the_command_line() -> None:
    pytest.importorskip("sglang")
    flashgen_sglang.register()
    arguments = importlib.import_module("sglang.srt.server_args")
    words = ["--model-path", "model", "--attention-backend", flashgen_sglang.NAME, "--page-size", "64"]
    assert arguments.prepare_server_args(words).attention_backend == flashgen_sglang.NAME
