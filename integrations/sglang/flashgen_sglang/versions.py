"""The versions of SGLang that this package was tested with. It refuses all others."""

from __future__ import annotations

from importlib import metadata

TESTED_VERSIONS = ("0.5.23",)
"""SGLang changes the interface of attention backends between patch versions."""


def check_version() -> None:
    """Raises ImportError, which those see who select the backend, if the installed SGLang was not tested."""
    try:
        installed = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        raise ImportError(f"flashgen_sglang needs SGLang, which is not installed: {_remedy()}") from None
    if installed not in TESTED_VERSIONS:
        raise ImportError(
            f"flashgen_sglang was tested with SGLang {', '.join(TESTED_VERSIONS)}, and {installed} is installed: "
            f"{_remedy()}, install a flashgen_sglang that was tested with {installed}, or select another "
            "--attention-backend"
        )


def _remedy() -> str:
    return f"pip install 'sglang=={TESTED_VERSIONS[-1]}'"
