"""Finds NVIDIA's files and programs: in installed wheels, in a CUDA toolkit, on the PATH."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from flashgen.errors import BuildError
from flashgen.remedies import install


def wheel_roots() -> Iterator[Path]:
    """Yields the folders of NVIDIA's wheels: `nvidia/cu13` (CUDA 13), or `nvidia/cuda_nvrtc` and others (CUDA 12)."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(path for path in Path(folder).iterdir() if path.is_dir())


def cuda_roots() -> Iterator[Path]:
    """Yields the folders of CUDA toolkits: CUDA_HOME, CUDA_PATH, then those in /usr/local."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable])
    yield Path("/usr/local/cuda")
    yield from sorted(Path("/usr/local").glob("cuda-*"), reverse=True)


def find_tool(name: str) -> Path | None:
    """Returns the path of one of NVIDIA's programs, such as `nvdisasm`, or None."""
    for root in (*wheel_roots(), *cuda_roots()):
        candidate = root / "bin" / name
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate
    on_path = shutil.which(name)
    return Path(on_path) if on_path else None


def require_tool(*names: str) -> Path:
    """Returns the first of the programs that is installed. Raises BuildError that says what to install."""
    for name in names:
        found = find_tool(name)
        if found:
            return found
    raise BuildError(
        f"{' or '.join(names)} is not installed; {install('inspect')} installs it, or set CUDA_HOME to a CUDA toolkit"
    )
