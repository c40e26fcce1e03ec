"""flashgen: declare an attention variant, get a readable CUDA kernel.

    import flashgen as fg

    spec = fg.AttentionSpec(head_dim=64, dtype="float16", mask=fg.causal())
    attention = fg.compile(spec)            # for this GPU; or target="sm_80"; or emulate=True on the CPU
    out = attention(q, k, v)

Names are imported when they are first used, so that `import flashgen` is fast.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashgen import errors as errors
    from flashgen import reference as reference
    from flashgen import verify as verify
    from flashgen.attention import MAX_DECODE_QUERIES as MAX_DECODE_QUERIES
    from flashgen.attention import append_kv as append_kv
    from flashgen.attention import compile as compile
    from flashgen.attention import merge_states as merge_states
    from flashgen.language import *  # noqa: F403
    from flashgen.language.functions import *  # noqa: F403
    from flashgen.language.masks import *  # noqa: F403
    from flashgen.language.scores import *  # noqa: F403

__version__ = "1.0.0"

_MODULES = ("errors", "reference", "verify")
_FRAMEWORKS = ("torch", "transformers", "jax")
_TOOLS = ("ranks", "release")
_ATTENTION_NAMES = ("MAX_DECODE_QUERIES", "append_kv", "compile", "merge_states")


def __getattr__(name: str) -> Any:
    """Returns a module of _MODULES, a name of `flashgen.attention` or `flashgen.language`, or `__all__`."""
    if name in _MODULES:
        return importlib.import_module(f"flashgen.{name}")
    if name in _ATTENTION_NAMES:
        value = getattr(importlib.import_module("flashgen.attention"), name)
    elif name == "__all__":
        value = sorted((*_ATTENTION_NAMES, *_MODULES, *_language().__all__))
    elif not name.startswith("_") and name in _language().__all__:
        value = getattr(_language(), name)
    else:
        raise AttributeError(f"module 'flashgen' has no attribute {name!r}{_hint(name)}")
    globals()[name] = value
    return value


def _hint(name: str) -> str:
    """Returns a hint at the name that was meant; "" for names that Python itself asks for."""
    if name in _FRAMEWORKS:
        return f" before it is imported by itself: import flashgen.{name}"
    if name.startswith("_"):
        return ""
    import difflib

    matches = difflib.get_close_matches(name, __dir__(), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


def __dir__() -> list[str]:
    """Returns the public names: those of `__all__`, the version, and the public subpackages that are imported."""
    loaded = (name for name in (*_FRAMEWORKS, *_TOOLS) if f"flashgen.{name}" in sys.modules)
    return sorted({*__getattr__("__all__"), *loaded, "__version__"})


def _language() -> Any:
    return importlib.import_module("flashgen.language")
