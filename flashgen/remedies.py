"""Returns the commands that install missing parts. flashgen is on no package index, so they name its origin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse


def install(*extras: str) -> str:
    """Returns the command that installs flashgen with extras, from its checkout or the origin that pip recorded."""
    wanted = f"[{','.join(extras)}]" if extras else ""
    checkout = Path(__file__).resolve().parents[1]
    if _is_checkout(checkout):
        return f"pip install '{'.' if checkout == Path.cwd() else checkout}{wanted}'"
    recorded = _recorded_origin()
    address = str(recorded.get("url", ""))
    if address.startswith("file:"):
        return f"pip install '{unquote(urlparse(address).path)}{wanted}'"
    if "vcs_info" in recorded:
        address = f"{recorded['vcs_info']['vcs']}+{address}"
    return f"pip install 'flashgen{wanted}{f' @ {address}' if address else ''}'"


def install_cuda() -> str:
    """Returns the command that installs CuPy, NVRTC and their dependencies, for either kind of driver."""
    return f"{install('cuda13')} (cuda12 in place of cuda13 for a driver older than 580)"


def missing(framework: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Returns the error for importing `flashgen.<framework>` if a module of the framework is not installed."""
    return ModuleNotFoundError(f"flashgen.{framework} needs {error.name}: {install(framework)}", name=error.name)


def _is_checkout(folder: Path) -> bool:
    project = folder / "pyproject.toml"
    return project.is_file() and 'name = "flashgen"' in project.read_text(encoding="utf-8")


def _recorded_origin() -> dict[str, Any]:
    """Returns the origin from which pip installed flashgen (PEP 610); {} if it came from an index."""
    import importlib.metadata  # slow to import, and rarely needed

    try:
        recorded = importlib.metadata.distribution("flashgen").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return {}
    return dict(json.loads(recorded)) if recorded else {}
