"""The versions of SGLang that the backend was tested with. Its interfaces change between minor versions."""

from __future__ import annotations

from importlib import metadata
from typing import NoReturn

from flashgen.errors import UnsupportedError

TESTED_VERSIONS = ("0.5.23",)


def check_version() -> None:
    """Raises an UnsupportedError if the installed version of SGLang was not tested."""
    if _installed() not in TESTED_VERSIONS:
        refuse_version(None)


def refuse_version(cause: Exception | None) -> NoReturn:
    """Raises the error for a version of SGLang that was not tested."""
    tested = ", ".join(TESTED_VERSIONS)
    raise UnsupportedError(
        f"flashgen-sglang was tested with SGLang {tested}, and SGLang {_installed()} is installed: "
        f"pip install 'sglang=={TESTED_VERSIONS[-1]}', or choose another --attention-backend"
    ) from cause


def _installed() -> str:
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return "of an unknown version"
