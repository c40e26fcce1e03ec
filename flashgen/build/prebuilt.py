"""A folder of prebuilt kernels: what `flashgen release build` wrote, and what FLASHGEN_RELEASE names.

    manifest.json         what each kernel is, its key, and the hash of each of its files
    <name>.cu             the emitted source
    <name>.cubin          the machine code; absent from a release of sources alone

Its keys are computed with the NVRTC version that the manifest records, so a machine without NVRTC can use it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashgen.build.entries import DamagedEntry, describe
from flashgen.build.keys import kernel_key
from flashgen.build.nvrtc import options
from flashgen.errors import BuildError

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1


@dataclass(frozen=True)
class PrebuiltKernel:
    """A kernel of a prebuilt folder, its files checked."""

    cubin_path: Path
    cubin: bytes
    meta: Mapping[str, Any]


@dataclass(frozen=True)
class PrebuiltFolder:
    """A folder of prebuilt kernels with its manifest's content. Open one with `PrebuiltFolder.open`."""

    root: Path
    manifest: Mapping[str, Any]

    @classmethod
    def open(cls, root: Path) -> PrebuiltFolder:
        """Read a folder's manifest. Raises BuildError when there is none, or when it is not one of ours."""
        path = root / MANIFEST
        try:
            manifest = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise BuildError(
                f"{path} cannot be read as a release manifest ({error}); "
                "FLASHGEN_RELEASE must name a folder that `flashgen release build` wrote"
            ) from error
        if (
            not isinstance(manifest, dict)
            or manifest.get("format") != MANIFEST_FORMAT
            or not isinstance(manifest.get("kernels"), list)
        ):
            raise BuildError(
                f"{path} is not a release manifest of format {MANIFEST_FORMAT}; write the folder again with "
                "this version's `flashgen release build`"
            )
        return cls(root, manifest)

    @property
    def nvrtc_version(self) -> tuple[int, int] | None:
        """The NVRTC that made the cubins; None for a folder of sources alone."""
        version = self.manifest.get("nvrtc_version")
        return (int(version[0]), int(version[1])) if version else None

    def find(self, source: str, architecture: str) -> PrebuiltKernel | None:
        """The kernel of exactly this source and architecture, or None.

        Raises:
            DamagedEntry: the manifest lists it and a file of it is missing or altered.
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
        """The bytes of a file that the manifest describes. Raises DamagedEntry when they are not what was written."""
        path = self.root / str(file["path"])
        if path.parent != self.root:
            raise DamagedEntry(f"{MANIFEST} names a file outside of the folder, {file['path']!r}")
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DamagedEntry(f"{path.name} cannot be read ({error.strerror})") from error
        if describe(data) != {name: file.get(name) for name in ("bytes", "sha256")}:
            raise DamagedEntry(f"{path.name} is not what was written ({len(data)} bytes)")
        return data
