"""Checks whether a release folder is unaltered, and whether it matches what this version of flashgen would build."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashgen.build import kernel_key, nvrtc
from flashgen.build.entries import DamagedEntry
from flashgen.build.prebuilt import MANIFEST, PrebuiltFolder
from flashgen.errors import BuildError
from flashgen.release.folder import emit
from flashgen.release.request import read_requests


@dataclass(frozen=True)
class Finding:
    """A problem of a release folder: the file, and what is wrong with it.

    Attributes:
        path: the file.
        problem: what is wrong with it.
    """

    path: str
    problem: str


def check(folder: Path | str) -> list[Finding]:
    """Returns a finding for each file of a release folder that is missing, altered or not in the manifest.

    Raises BuildError if the folder does not exist.

    Args:
        folder: the folder of the release.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise BuildError(f"there is no folder {folder}; name one that `flashgen release build` wrote")
    try:
        release = PrebuiltFolder.open(folder)
    except BuildError as error:
        return [Finding(MANIFEST, str(error).removeprefix(f"{folder / MANIFEST} "))]
    kernels = release.manifest["kernels"]
    findings = [finding for kernel in kernels for finding in _find_problems(release, kernel)]
    listed = {file["path"] for kernel in kernels for file in kernel["files"].values()}
    extra = sorted({path.name for path in folder.iterdir()} - listed - {MANIFEST})
    return findings + [Finding(name, f"is not listed in {MANIFEST}") for name in extra]


def stale(manifest_path: Path | str, folder: Path | str) -> list[Finding]:
    """Returns a finding for each source that differs from what this version of flashgen emits for a release manifest.

    Cubins are not compared, because they depend on the compiler. Raises the errors of `build` for a wrong manifest.

    Args:
        manifest_path: the file of requests, in TOML.
        folder: the folder of the release.
    """
    folder = Path(folder)
    expected = {f"{kernel.stem}.cu": kernel.rendered.source for kernel in emit(read_requests(manifest_path))}
    findings = []
    for name, source in expected.items():
        path = folder / name
        if not path.is_file():
            findings.append(Finding(name, "is missing"))
        elif path.read_bytes() != source.encode():
            findings.append(Finding(name, "differs from what is emitted now"))
    extra = sorted({path.name for path in folder.glob("*.cu")} - set(expected))
    return findings + [Finding(name, "is no longer requested") for name in extra]


def _find_problems(release: PrebuiltFolder, kernel: Mapping[str, Any]) -> Iterator[Finding]:
    damaged = False
    for file in kernel["files"].values():
        try:
            release.read(file)
        except DamagedEntry as damage:
            damaged = True
            name = str(file["path"])
            yield Finding(name, str(damage).removeprefix(f"{name} "))
    if damaged or release.nvrtc_version is None:
        return
    source = release.read(kernel["files"]["source"]).decode(errors="replace")
    architecture = kernel["architecture"]
    if "cubin" not in kernel["files"]:
        yield Finding(kernel["name"], "has no cubin, though the folder records the NVRTC that made them")
    elif kernel.get("key") != kernel_key(
        source, architecture, nvrtc.options(architecture, release.nvrtc_version), release.nvrtc_version
    ):
        yield Finding(
            kernel["name"],
            "has another key than its source and this version's options give, so it is never found; build it again",
        )
