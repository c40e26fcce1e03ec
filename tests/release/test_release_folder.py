"""Release folders: written, checked, updated, and used in place of a compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import flashgen
from flashgen import release
from flashgen.build import KernelCache, nvrtc
from flashgen.build.prebuilt import PrebuiltFolder
from flashgen.build.resources import Resources
from flashgen.codegen.dispatch import render_forward
from flashgen.codegen.targets import target_named
from flashgen.errors import BuildError, FlashgenWarning, UnsupportedError
from flashgen.language import AttentionSpec, causal, document

TWO = "[[kernels]]\nmask = ['causal()', 'full()']\nhead_dim = 64\ntarget = 'sm_80'\n"
ONE = "[[kernels]]\nmask = 'causal()'\nhead_dim = 64\ntarget = 'sm_80'\n"
CAUSAL = AttentionSpec(head_dim=64, mask=causal())

needs_nvrtc = pytest.mark.skipif(not nvrtc.is_available(), reason="needs CuPy and NVRTC: pip install '.[cuda13]'")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A mock compiler that derives bytes from names, a separate cache, and the list of compiled names."""
    names: list[str] = []

    def compile(source: str, architecture: str, name: str) -> nvrtc.Compiled:
        names.append(name)
        return nvrtc.Compiled(f"cubin of {name}".encode(), "", Resources(96), (13, 0))

    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    monkeypatch.setattr(nvrtc, "compile", compile)
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    return names


def manifest(folder: Path, text: str) -> Path:
    path = folder / "release.toml"
    path.write_text(text)
    return path


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def without_nvrtc() -> tuple[int, int]:
    raise BuildError("there is no NVRTC")


def test_sources_only_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "version", without_nvrtc)
    seen: list[tuple[int, int, str]] = []
    written = release.build(
        manifest(tmp_path, TWO), tmp_path / "out", sources_only=True, progress=lambda *step: seen.append(step)
    )
    names = [kernel["name"] for kernel in written["kernels"]]
    assert sorted(content(tmp_path / "out")) == sorted([*(f"{name}.cu" for name in names), "manifest.json"])
    assert seen == [(1, 2, names[0]), (2, 2, names[1])]
    assert release.check(tmp_path / "out") == []


def test_the_manifest_describes_each_kernel(tmp_path: Path, compiled: list[str]) -> None:
    written = release.build(manifest(tmp_path, TWO), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "manifest.json").read_text()) == written
    kernel = written["kernels"][0]
    assert AttentionSpec.from_json(json.dumps(kernel["spec"])) == CAUSAL
    assert (kernel["target"], kernel["architecture"]) == ("sm_80", "sm_80")
    assert kernel["resources"]["registers"] == 96
    assert kernel["nvrtc_version"] == written["nvrtc_version"] == [13, 0]
    assert kernel["plan"]["tile_q"] > 0
    assert (tmp_path / "out" / kernel["files"]["source"]["path"]).read_text().count(kernel["entry"]) >= 1
    assert release.check(tmp_path / "out") == []


def test_builds_are_reproducible(tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = manifest(tmp_path, TWO)
    release.build(path, tmp_path / "one")
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "another cache"))
    release.build(path, tmp_path / "two")
    assert content(tmp_path / "one") == content(tmp_path / "two")
    assert len(compiled) == 4


def test_an_interrupted_build_continues(tmp_path: Path, compiled: list[str]) -> None:
    release.build(manifest(tmp_path, ONE), tmp_path / "one")
    release.build(manifest(tmp_path, TWO), tmp_path / "two")
    assert len(compiled) == 2


def test_a_folder_is_updated(tmp_path: Path, compiled: list[str]) -> None:
    release.build(manifest(tmp_path, TWO), tmp_path / "out")
    release.build(manifest(tmp_path, ONE), tmp_path / "out")
    assert sorted(Path(name).suffix for name in content(tmp_path / "out")) == [".cu", ".cubin", ".h", ".json"]
    assert release.check(tmp_path / "out") == []


def test_a_folder_of_the_first_format_is_read_and_updated(tmp_path: Path, compiled: list[str]) -> None:
    """That format did not describe launches."""
    out = tmp_path / "out"
    written = json.loads(json.dumps(release.build(manifest(tmp_path, ONE), out)))
    (out / f"{written['kernels'][0]['name']}.h").unlink()
    for kernel in written["kernels"]:
        for name in ("part", "grid", "arguments", "argument_bytes"):
            del kernel[name]
        del kernel["files"]["header"]
    del written["formulas"]
    (out / "manifest.json").write_text(json.dumps(written | {"format": 1}))
    assert release.check(out) == []
    assert PrebuiltFolder.open(out).find(render_forward(CAUSAL, target_named("sm_80")).source, "sm_80") is not None
    assert release.build(manifest(tmp_path, ONE), out)["format"] == 2
    assert release.check(out) == [] and (out / f"{written['kernels'][0]['name']}.h").exists()


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(BuildError, match=r"holds '.*' and no manifest\.json, so it is not a release folder"):
        release.build(manifest(tmp_path, ONE), tmp_path, sources_only=True)
    with pytest.raises(BuildError, match="must be a folder"):
        release.build(manifest(tmp_path, ONE), tmp_path / "thesis.tex", sources_only=True)
    assert sorted(content(tmp_path)) == ["release.toml", "thesis.tex"]


def test_unsupported_specs_are_refused_before_anything_is_written(tmp_path: Path, compiled: list[str]) -> None:
    text = "[[kernels]]\nhead_dim = 64\ndtype = ['float16', 'bfloat16']\ntarget = 'sm_75'\n"
    with pytest.raises(UnsupportedError, match=r"bf16-d64-full-\w+ for sm_75: .*take it out of the release manifest"):
        release.build(manifest(tmp_path, text), tmp_path / "out")
    assert compiled == []
    assert not (tmp_path / "out").exists()


def test_a_mask_with_lists_adds_its_list_kernel(tmp_path: Path) -> None:
    spec = AttentionSpec(head_dim=64, mask=lambda b, h, q, k: (q // 16 + k // 16) % 2 == 0)
    if not render_forward(spec, target_named("sm_80")).reads:
        pytest.fail("this mask was to have no closed form")
    path = tmp_path / "release.json"
    path.write_text(json.dumps({"kernels": [{"spec": spec.to_json(), "target": "sm_80"}]}))
    written = release.build(path, tmp_path / "out", sources_only=True)
    assert [kernel["name"].split("-")[0] for kernel in written["kernels"]] == ["fwd", "lists"]


def test_passes_add_their_kernels(tmp_path: Path) -> None:
    text = """
        [[kernels]]
        mask = ["causal()", "causal() & document('ids')"]
        head_dim = 64
        target = "sm_80"
        passes = ["forward", "backward"]
        deterministic = [false, true]
        """
    written = release.build(manifest(tmp_path, text), tmp_path / "out", sources_only=True)
    plans = {kernel["name"]: kernel.get("plan") for kernel in written["kernels"]}
    assert release.check(tmp_path / "out") == []
    sources = {path.read_text() for path in (tmp_path / "out").glob("*.cu")}
    for mask in (causal(), causal() & document("ids")):
        for deterministic in (False, True):
            spec = AttentionSpec(head_dim=64, mask=mask)
            attention = flashgen.compile(spec, target="sm_80", emulate=True, deterministic=deterministic)
            assert {*attention.sources.values(), *attention.backward_sources.values()} <= sources
    assert [name for name, plan in plans.items() if name.startswith("fwd") and plan is None] == []


@needs_nvrtc
def test_a_backward_of_a_release_compiles_nothing(tmp_path: Path) -> None:
    text = ONE + "passes = ['forward', 'backward']\n"
    release.build(manifest(tmp_path, text), tmp_path / "out")
    script = (
        "import flashgen as fg\n"
        "attention = fg.compile(fg.AttentionSpec(head_dim=64, mask=fg.causal()), target='sm_80')\n"
        "print(len(attention.backward_resources))"
    )
    assert run_with_release(script, tmp_path) == ("3\n", "")


def test_check_finds_missing_altered_and_extra_files(tmp_path: Path, compiled: list[str]) -> None:
    out = tmp_path / "out"
    first, second = release.build(manifest(tmp_path, TWO), out)["kernels"]
    (out / f"{first['name']}.cu").unlink()
    cubin = out / f"{second['name']}.cubin"
    cubin.write_bytes(cubin.read_bytes()[:-1] + b"x")
    (out / "notes.txt").touch()
    assert {(finding.path, finding.problem.partition(" (")[0]) for finding in release.check(out)} == {
        (f"{first['name']}.cu", "cannot be read"),
        (cubin.name, "is not what was written"),
        ("notes.txt", "is not listed in manifest.json"),
    }


@pytest.mark.parametrize("text", [None, "{", "[]", '{"format": 99}', '{"format": 1, "kernels": [{}]}'])
def test_check_of_a_folder_that_is_no_release(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    (finding,) = release.check(tmp_path)
    assert finding.path == "manifest.json"


def test_check_finds_a_key_that_would_never_match(tmp_path: Path, compiled: list[str]) -> None:
    release.build(manifest(tmp_path, ONE), tmp_path / "out")
    path = tmp_path / "out" / "manifest.json"
    path.write_text(path.read_text().replace('"key": "', '"key": "0'))
    (finding,) = release.check(tmp_path / "out")
    assert "another key" in finding.problem


def test_stale_lists_changed_sources(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first, second = release.build(manifest(tmp_path, TWO), out, sources_only=True)["kernels"]
    assert release.stale(manifest(tmp_path, TWO), out) == []
    (out / f"{first['name']}.cu").write_text("an older kernel")
    assert release.stale(manifest(tmp_path, ONE), out) == [
        release.Finding(f"{first['name']}.cu", "differs from what is emitted now"),
        release.Finding(f"{second['name']}.cu", "is no longer requested"),
    ]


def test_a_release_is_searched_first_and_needs_no_nvrtc(
    tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = release.build(manifest(tmp_path, ONE), tmp_path / "out")
    compiled.clear()
    monkeypatch.setattr(nvrtc, "version", without_nvrtc)
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("FLASHGEN_RELEASE", str(tmp_path / "out"))
    monkeypatch.setenv("FLASHGEN_JIT", "0")
    kernel = render_forward(CAUSAL, target_named("sm_80"))
    entry = KernelCache.from_environment().load_or_compile(kernel.name, kernel.source, "sm_80")
    assert entry.hit
    assert entry.cubin == entry.cubin_path.read_bytes() == f"cubin of {kernel.name}".encode()
    assert entry.cubin_path.parent == tmp_path / "out"
    assert entry.resources == Resources(96)
    assert entry.meta["nvrtc_version"] == [13, 0]
    assert written["kernels"][0]["key"] == entry.meta["key"]
    assert not (tmp_path / "empty").exists()


def test_missing_kernels_are_compiled_or_refused(
    tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    release.build(manifest(tmp_path, ONE), tmp_path / "out")
    cache = KernelCache(tmp_path / "other", release=tmp_path / "out")
    assert not cache.load_or_compile("new", "another source", "sm_80").hit
    cache = KernelCache(tmp_path / "empty", release=tmp_path / "out", jit=False)
    with pytest.raises(BuildError, match=r"neither in the release folder .*out nor in the cache .*empty"):
        cache.load_or_compile("new", "another source", "sm_80")


def test_a_damaged_kernel_of_a_release_warns_and_is_not_used(tmp_path: Path, compiled: list[str]) -> None:
    (kernel,) = release.build(manifest(tmp_path, ONE), tmp_path / "out")["kernels"]
    (tmp_path / "out" / f"{kernel['name']}.cubin").write_bytes(b"bad")
    source = (tmp_path / "out" / f"{kernel['name']}.cu").read_text()
    cache = KernelCache(tmp_path / "other", release=tmp_path / "out")
    with pytest.warns(FlashgenWarning, match=r"release folder .* is damaged: .*\.cubin is not what was written"):
        entry = cache.load_or_compile(kernel["name"], source, "sm_80")
    assert (entry.hit, entry.path.parent) == (False, tmp_path / "other")


@pytest.mark.parametrize("text", [None, "{}", "no JSON"])
def test_an_invalid_release_is_an_error(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(BuildError, match="flashgen release build"):
        KernelCache(tmp_path / "cache", release=tmp_path).load_or_compile("k", "source", "sm_80")


@needs_nvrtc
def test_the_callable_uses_a_release(tmp_path: Path) -> None:
    """Built by NVRTC, then used by a process that cannot compile."""
    release.build(manifest(tmp_path, ONE), tmp_path / "out")
    assert release.check(tmp_path / "out") == []
    script = (
        "import flashgen as fg\n"
        "attention = fg.compile(fg.AttentionSpec(head_dim=64, mask=fg.causal()), target='sm_80')\n"
        "print(attention.resources.registers > 0)"
    )
    assert run_with_release(script, tmp_path) == ("True\n", "")


def run_with_release(script: str, folder: Path) -> tuple[str, str]:
    """Returns the output of a process with kernels in folder/out and without JIT."""
    settings = {"FLASHGEN_RELEASE": folder / "out", "FLASHGEN_JIT": 0, "FLASHGEN_CACHE_DIR": folder / "empty"}
    environment = {**os.environ, **{name: str(value) for name, value in settings.items()}}
    environment["PYTHONPATH"] = str(Path(flashgen.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    return done.stdout, done.stderr
