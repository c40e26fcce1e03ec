"""The versions of vLLM that this package was tested with. It refuses all others."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

TESTED = ("0.33",)
"""Minor versions. vLLM changes the interface of attention backends between them."""


def check_version() -> None:
    """Raises ImportError, which vLLM shows to those who select the backend, if the installed vLLM was not tested."""
    try:
        installed = version("vllm")
    except PackageNotFoundError:
        raise ImportError(f"flashgen_vllm needs vLLM, which is not installed: pip install '{_wanted()}'") from None
    if ".".join(installed.split(".")[:2]) not in TESTED:
        raise ImportError(
            f"flashgen_vllm was tested with vLLM {', '.join(TESTED)}, and {installed} is installed: "
            f"pip install '{_wanted()}', install a flashgen_vllm that was tested with {installed}, or select another "
            "attention backend"
        )


def _wanted() -> str:
    return f"vllm=={TESTED[-1]}.*"
