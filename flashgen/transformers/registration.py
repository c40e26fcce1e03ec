"""`register`: flashgen under a name among transformers' attention implementations."""

from __future__ import annotations

import functools
from typing import Any

from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from flashgen.errors import UnsupportedError
from flashgen.transformers.forward import attention_forward
from flashgen.transformers.mask import attention_mask

_OWN_NAMES: set[str] = set()
_ANY_OF = ("attention_backend", "sdpa", "flash_attn", "flex_attn")  # what models of the common interface support


def register(name: str = "flashgen", *, emulate: bool | None = None, deterministic: bool | None = None) -> None:
    """Makes `attn_implementation="flashgen"` known to transformers, its masks included.

    Args:
        name: what models ask for.
        emulate: run models on the CPU by the emulator; None is what `flashgen.torch.emulated()` says.
        deterministic: gradients that are bitwise equal from run to run; None is what torch was told.

    Models that take no attention implementations of others are refused, with UnsupportedError, when they are told to
    use it.
    """
    forward = functools.partial(attention_forward, emulate=emulate, deterministic=deterministic)
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, attention_mask)
    if not _OWN_NAMES:
        _keep_own_names()
    _OWN_NAMES.add(name)


def _keep_own_names() -> None:
    """Has models take our names as they are.

    transformers loads flash-attn, or a kernel of its hub, for every name that contains "flash", and gives some models
    another implementation than the one of such a name.
    """
    known = PreTrainedModel._check_and_adjust_attn_implementation

    @functools.wraps(known)
    def check(self: Any, attn_implementation: str | None, *arguments: Any, **keywords: Any) -> Any:
        if attn_implementation not in _OWN_NAMES:
            return known(self, attn_implementation, *arguments, **keywords)
        if not any(getattr(self, f"_supports_{what}", False) for what in _ANY_OF):
            raise UnsupportedError(
                f"{type(self).__name__} has an attention of its own, and takes no "
                f"attn_implementation={attn_implementation!r}"
            )
        return attn_implementation

    PreTrainedModel._check_and_adjust_attn_implementation = check  # type: ignore[method-assign]
