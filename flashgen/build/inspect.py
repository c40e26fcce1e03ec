"""A kernel as PTX or as machine instructions, for people to read."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from flashgen.build import nvrtc
from flashgen.build.tools import require_tool
from flashgen.errors import BuildError

_TIMEOUT_SECONDS = 300


def ptx(source: str, architecture: str, name: str = "kernel") -> str:
    """The PTX of a source for an architecture such as `sm_80`. Raises BuildError as `nvrtc.compile_ptx` does."""
    return nvrtc.compile_ptx(source, architecture, name)


def sass(cubin: bytes) -> str:
    """The machine instructions of a cubin, by nvdisasm, or by cuobjdump where only that is installed.

    Raises:
        BuildError: neither program is installed, it cannot read the cubin, or there is no room for a temporary file.
    """
    tool = require_tool("nvdisasm", "cuobjdump")
    arguments = ["--print-code"] if tool.name == "nvdisasm" else ["--dump-sass"]
    # cuobjdump calls nvdisasm by its bare name, so its own folder must be on the child's PATH.
    environment = {**os.environ, "PATH": f"{tool.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    try:
        with tempfile.TemporaryDirectory(prefix="flashgen-sass-") as folder:
            file = Path(folder) / "kernel.cubin"
            file.write_bytes(cubin)
            command = [str(tool), *arguments, str(file)]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_TIMEOUT_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{tool} could not disassemble the cubin: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{tool} could not disassemble the cubin:\n{(done.stderr or done.stdout).strip()}")
    return done.stdout
