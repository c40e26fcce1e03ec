"""Shows a kernel as PTX or as machine instructions."""

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
    """Compiles a source to PTX for an architecture such as `sm_80`. Raises BuildError as `nvrtc.compile_ptx` does."""
    return nvrtc.compile_ptx(source, architecture, name)


def sass(cubin: bytes) -> str:
    """Disassembles a cubin with nvdisasm, or with cuobjdump if only that is installed.

    Raises:
        BuildError: neither program is installed, it cannot read the cubin, or a temporary file cannot be written.
    """
    tool = require_tool("nvdisasm", "cuobjdump")
    arguments = ["--print-code"] if tool.name == "nvdisasm" else ["--dump-sass"]
    # cuobjdump runs nvdisasm by its bare name, so the folder of both must be on the PATH of the child process.
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
