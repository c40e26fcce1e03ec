"""The attention backend "flashgen" of SGLang, for dense models: `--attention-backend flashgen`.

SGLang calls `register` in each of its processes, by the entry point "flashgen" of the group `sglang.srt.plugins`.
"""

from __future__ import annotations

from typing import Any

from flashgen_sglang.versions import TESTED_VERSIONS, check_version

__all__ = ["NAME", "TESTED_VERSIONS", "create_backend", "register"]
__version__ = "0.1.0"

NAME = "flashgen"
"""The name for `--attention-backend`, `--prefill-attention-backend` and `--decode-attention-backend`."""


def register() -> None:
    """Adds the backend to SGLang's registry and to the choices of its command line.

    Versions of SGLang that were not tested list the name as well, as far as they have both, so that those who select
    it get the error of `create_backend`, not that of an unknown choice.
    """
    try:
        from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
    except ImportError:
        check_version()
        raise
    register_attention_backend(NAME)(create_backend)
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])


def create_backend(runner: Any) -> Any:
    """Creates the backend of a model runner. Raises ImportError in a version of SGLang that was not tested."""
    check_version()
    from flashgen_sglang.backend import FlashgenAttentionBackend

    return FlashgenAttentionBackend(runner)
