"""flashgen: declare an attention variant, get a readable CUDA kernel.

    import flashgen as fg

    spec = fg.AttentionSpec(head_dim=64, dtype="float16", mask=fg.causal())
    attention = fg.compile(spec)            # this GPU; or target="sm_80"; or emulate=True on the CPU
    out = attention(q, k, v)

Names are imported when they are first used, so that `import flashgen` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashgen import errors as errors
    from flashgen import reference as reference
    from flashgen import verify as verify
    from flashgen.attention import append_kv as append_kv
    from flashgen.attention import compile as compile
    from flashgen.attention import merge_states as merge_states
    from flashgen.language import *  # noqa: F403
    from flashgen.language.functions import *  # noqa: F403
    from flashgen.language.masks import *  # noqa: F403
    from flashgen.language.scores import *  # noqa: F403

__version__ = "0.1.0"

_MODULES = ("errors", "reference", "verify")
_FRAMEWORKS = ("torch", "transformers", "jax")
_OF_ATTENTION = ("append_kv", "compile", "merge_states")


def __getattr__(name: str) -> Any:
    """One of _MODULES, of _OF_ATTENTION, a name of `flashgen.language`, or `__all__`, which lists them."""
    if name in _MODULES:
        return importlib.import_module(f"flashgen.{name}")
    if name in _OF_ATTENTION:
        value = getattr(importlib.import_module("flashgen.attention"), name)
    elif name == "__all__":
        value = sorted((*_OF_ATTENTION, *_MODULES, *_language().__all__))
    elif not name.startswith("_") and name in _language().__all__:
        value = getattr(_language(), name)
    else:
        raise AttributeError(f"module 'flashgen' has no attribute {name!r}{_instead(name)}")
    globals()[name] = value
    return value


def _instead(name: str) -> str:
    """What else to write; nothing for the names that Python itself asks for."""
    if name in _FRAMEWORKS:
        return f" before it is imported by itself: import flashgen.{name}"
    if name.startswith("_"):
        return ""
    import difflib

    near = difflib.get_close_matches(name, __dir__(), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})


def _language() -> Any:
    return importlib.import_module("flashgen.language")
