"""Exports: what is refused, which files are written, and what an earlier export in the folder means."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flashgen.build import nvrtc
from flashgen.build.resources import Resources
from flashgen.cli.app import app
from flashgen.errors import BuildError, FlashgenError
from flashgen.language import AttentionSpec, causal, full
from flashgen.release import export
from flashgen.release.export import VARIANT

CAUSAL = AttentionSpec(64, mask=causal())
FULL = AttentionSpec(64, mask=full())


def forward(out: Path, *specs: AttentionSpec, **options: Any) -> Any:
    """Exports the forward of specs, by default `CAUSAL`, for sm_80."""
    given: dict[str, Any] = {"targets": ["sm_80"], "passes": ["forward"], "name": "causal-attention"}
    return export(specs or (CAUSAL,), out, **(given | options))


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A mock compiler, and a separate cache."""
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    monkeypatch.setattr(
        nvrtc, "compile", lambda source, architecture, name: nvrtc.Compiled(name.encode(), "", Resources(96), (13, 0))
    )
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_files_and_their_hashes(tmp_path: Path) -> None:
    metadata = forward(tmp_path / "out", targets=["sm_80", "sm_90a"])
    files = files_of(tmp_path / "out")
    assert {"README.md", "tests/test_causal_attention.py", f"{VARIANT}/causal_attention/__init__.py"} < files.keys()
    assert json.loads(files.pop(f"{VARIANT}/metadata.json")) == metadata
    hashes = {
        name.removeprefix(f"{VARIANT}/"): base64.b64encode(hashlib.sha256(data).digest()).decode()
        for name, data in files.items()
        if name.startswith(VARIANT)
    }
    assert metadata["digest"] == {"algorithm": "sha256", "files": hashes}
    assert metadata["backend"] == {"type": "cuda", "archs": ["8.0", "9.0a"]} and metadata["python-depends"] == []
    assert re.fullmatch(r"_causal_attention_cuda_[0-9a-f]{10}", metadata["id"])
    assert metadata["id"].encode() in files[f"{VARIANT}/_ops.py"]
    (spec,) = json.loads(files[f"{VARIANT}/specs.json"])
    assert spec["kernels"]["sm_90a"] == {"forward": [f"fwd-sm90a-{CAUSAL.name}"]}


def test_equal_exports_are_equal_and_others_have_another_namespace(tmp_path: Path) -> None:
    for name in ("one", "two"):
        forward(tmp_path / name)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    other = forward(tmp_path / "other", FULL)
    assert other["id"] != forward(tmp_path / "one")["id"]


def test_an_earlier_export_is_updated(tmp_path: Path) -> None:
    out = tmp_path / "out"
    forward(out)
    forward(out, FULL)
    assert not [name for name in files_of(out) if "causal-" in name]
    (out / "README.md").write_text("mine")
    with pytest.raises(BuildError, match=r"README.md would be replaced"):
        forward(out)
    forward(out, force=True)
    assert b"mine" not in files_of(out)["README.md"]
    path = out / VARIANT / "operators.py"
    path.write_text("changed")
    with pytest.raises(BuildError, match=r"operators.py would be replaced"):
        forward(out)


@pytest.mark.parametrize("names", ["other.txt", f"{VARIANT}/metadata.json"])
def test_other_folders_are_refused(names: str, tmp_path: Path) -> None:
    path = tmp_path / "out" / names
    path.parent.mkdir(parents=True)
    path.write_text('{"digest": {"files": {"../../../kept": "AAAA"}}}')
    with pytest.raises(BuildError, match="holds no package that `flashgen export` wrote"):
        forward(tmp_path / "out")
    assert path.exists()


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "pages": (AttentionSpec(64, layout="bshd", page_size=16), {}, "reads a KV cache"),
    "shards": (CAUSAL.shard(), {}, "takes? parts of q and k"),
    "shared": (AttentionSpec(128, value_dim=64, shared_kv=True), {}, "V is a part of K"),
    "name": (CAUSAL, {"name": "Causal_attention"}, "choose one with --name"),
    "backward alone": (CAUSAL, {"passes": ["backward"]}, "export both passes"),
    "deterministic": (CAUSAL, {"deterministic": True}, "deterministic applies to the backward"),
    "target": (AttentionSpec(64, "bfloat16"), {"targets": ["sm_75"]}, "sm_75"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_exported_is_refused(what: str, tmp_path: Path) -> None:
    spec, options, message = REFUSED[what]
    with pytest.raises(FlashgenError, match=message):
        forward(tmp_path / "out", spec, **options)
    assert not (tmp_path / "out").exists()


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "Some_attention"
    arguments = ["export", "causal()", "full()", "--pass", "forward", "--target", "sm_80", "--output", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0 and "some-attention with 2 specs" in result.output
    assert json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)["name"] == "some-attention"
    refused = CliRunner().invoke(app, ["export", "causal()", "--page-size", "16", "--target", "sm_80", "-o", str(out)])
    assert refused.exit_code == 2 and "reads a KV cache" in refused.output
