"""Finds the templates: inside the installed package, or beside it in a checkout."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from flashgen.errors import BuildError
from flashgen.remedies import install


@cache
def template_root() -> Path:
    """Returns the folder that holds `mma_sync/`, `hopper/`, `device/` and the other template folders.

    An installed wheel has it as `flashgen/templates`; a checkout has it as `templates` beside the package.

    Raises:
        BuildError: Neither folder exists, so the installation is incomplete.
    """
    package = Path(__file__).resolve().parent
    candidates = (package / "templates", package.parent / "templates")
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise BuildError(
        f"flashgen's templates are missing: neither {candidates[0]} nor {candidates[1]} is a folder; "
        f"install flashgen again: {install()} --force-reinstall"
    )
