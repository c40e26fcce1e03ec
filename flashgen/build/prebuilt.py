"""A folder of prebuilt kernels, written by `flashgen release build` and named by FLASHGEN_RELEASE.

    manifest.json         for each kernel its description, launch, key, and the hash of each of its files
    <name>.cu             the emitted source
    <name>.cubin          the machine code
    <name>.h              its launch for C++: entry point, threads, grid, the struct of its arguments

A release built with `sources_only` has no cubins and headers.

Keys are computed with the NVRTC version that the manifest records, so a machine without NVRTC can use the folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashgen.build.entries import DamagedEntry, describe
from flashgen.build.keys import kernel_key
from flashgen.build.nvrtc import options
from flashgen.build.resources import Resources
from flashgen.errors import BuildError
from flashgen.files import is_plain_name, read_file
from flashgen.strict_json import parse_json

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 2  # 2 adds the launch of each kernel; 1 can still be read
_READ_FORMATS = (1, MANIFEST_FORMAT)


@dataclass(frozen=True)
class PrebuiltKernel:
    """A kernel of a prebuilt folder, with its files verified."""

    cubin_path: Path
    cubin: bytes
    meta: Mapping[str, Any]


@dataclass(frozen=True)
class PrebuiltFolder:
    """A folder of prebuilt kernels and the content of its manifest. Created by `PrebuiltFolder.open`."""

    root: Path
    manifest: Mapping[str, Any]

    @classmethod
    def open(cls, root: Path) -> PrebuiltFolder:
        """Reads the manifest of a folder. Raises BuildError if it is missing or not a valid release manifest."""
        path = root / MANIFEST
        if not root.is_dir():
            raise BuildError(f"there is no folder {root}; name one that `flashgen release build` wrote")
        try:
            manifest = parse_json(read_file(path))
        except FileNotFoundError as error:
            raise BuildError(f"{path} is missing; name a folder that `flashgen release build` wrote") from error
        except (OSError, ValueError) as error:
            raise BuildError(
                f"{path} cannot be read as a release manifest ({error}); "
                "name a folder that `flashgen release build` wrote"
            ) from error
        if (
            not isinstance(manifest, dict)
            or manifest.get("format") not in _READ_FORMATS
            or not isinstance(manifest.get("kernels"), list)
        ):
            raise BuildError(
                f"{path} is not a release manifest of format {MANIFEST_FORMAT}; write the folder again with "
                "this version's `flashgen release build`"
            )
        flaw = _find_flaw(manifest)
        if flaw is not None:
            raise BuildError(f"{path} is not as `flashgen release build` writes it: {flaw}; write the folder again")
        return cls(root, manifest)

    @property
    def nvrtc_version(self) -> tuple[int, int] | None:
        """The version of the NVRTC that compiled the cubins, or None for a folder without cubins."""
        version = self.manifest.get("nvrtc_version")
        return (int(version[0]), int(version[1])) if version else None

    def find(self, source: str, architecture: str) -> PrebuiltKernel | None:
        """Returns the kernel with exactly this source and architecture, or None.

        Raises:
            DamagedEntry: the manifest lists the kernel, but a file of it is missing or altered.
        """
        if self.nvrtc_version is None:
            return None
        key = kernel_key(source, architecture, options(architecture, self.nvrtc_version), self.nvrtc_version)
        for kernel in self.manifest["kernels"]:
            if kernel.get("key") == key and "cubin" in kernel["files"]:
                file = kernel["files"]["cubin"]
                return PrebuiltKernel(self.root / file["path"], self.read(file), kernel)
        return None

    def read(self, file: Mapping[str, Any]) -> bytes:
        """Returns the bytes of a file that the manifest describes. Raises DamagedEntry if they have been altered."""
        path = self.root / file["path"]
        try:
            data = read_file(path)
        except OSError as error:
            raise DamagedEntry(f"{path.name} cannot be read ({error.strerror})") from error
        if describe(data) != {name: file.get(name) for name in ("bytes", "sha256")}:
            raise DamagedEntry(f"{path.name} is not what was written ({len(data)} bytes)")
        return data


def _find_flaw(manifest: Mapping[str, Any]) -> str | None:
    """Returns what is wrong with a manifest, or None. A manifest is untrusted input."""
    version = manifest.get("nvrtc_version")
    if version is not None and not (isinstance(version, list) and [type(part) for part in version] == [int, int]):
        return f"nvrtc_version={version!r} is not a version"
    for number, kernel in enumerate(manifest["kernels"]):
        flaw = _find_kernel_flaw(kernel) if isinstance(kernel, dict) else "it is not an object"
        if flaw is not None:
            return f"kernel {number}: {flaw}"
    return None


def _find_kernel_flaw(kernel: Mapping[str, Any]) -> str | None:
    files = kernel.get("files")
    if not isinstance(files, dict) or "source" not in files:
        return "its `files` name no source"
    for file in files.values():
        if not isinstance(file, dict) or type(file.get("bytes")) is not int or not isinstance(file.get("sha256"), str):
            return "a file of it has no size or hash"
        if not is_plain_name(file.get("path")) or file["path"] == MANIFEST:
            return f"it names a file outside of the folder, {file.get('path')!r}"
    if not isinstance(kernel.get("name"), str) or not isinstance(kernel.get("architecture"), str):
        return "it has no name or architecture"
    if "cubin" in files:
        try:
            Resources.from_dict(kernel["resources"])
        except (KeyError, TypeError, ValueError, AttributeError):
            return "its `resources` are not what a compiler reports"
    return None
