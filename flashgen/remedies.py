"""What to type where a part of flashgen is missing. It is on no index, so a command names where it came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse


def install(*extras: str) -> str:
    """The command that installs flashgen with these extras, from its checkout or from what pip says it installed."""
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
    """How to get CuPy, NVRTC and what goes with them, for either kind of driver."""
    return f"{install('cuda13')} (cuda12 in place of cuda13 for a driver older than 580)"


def missing(framework: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """What importing `flashgen.<framework>` raises where the framework, or a part of it, is not installed."""
    return ModuleNotFoundError(f"flashgen.{framework} needs {error.name}: {install(framework)}", name=error.name)


def _is_checkout(folder: Path) -> bool:
    project = folder / "pyproject.toml"
    return project.is_file() and 'name = "flashgen"' in project.read_text(encoding="utf-8")


def _recorded_origin() -> dict[str, Any]:
    """What pip wrote down of where it got flashgen from (PEP 610); nothing of an index."""
    import importlib.metadata  # slow to import, and seldom needed

    try:
        recorded = importlib.metadata.distribution("flashgen").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return {}
    return dict(json.loads(recorded)) if recorded else {}
