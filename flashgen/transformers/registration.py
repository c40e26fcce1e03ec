"""`register`: flashgen under a name among transformers' attention implementations."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
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

    A model that computes attention by itself, and asks transformers for no implementation, is refused with
    UnsupportedError when it is made with that name, or given it by `set_attn_implementation`; so is a model that has
    one as a part, unless a dictionary names another implementation for that part.
    """
    forward = functools.partial(attention_forward, emulate=emulate, deterministic=deterministic)
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, attention_mask)
    if not _OWN_NAMES:
        _keep_own_names()
        _check_parts()
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
        _refuse_own_attention(self, attn_implementation)
        return attn_implementation

    PreTrainedModel._check_and_adjust_attn_implementation = check  # type: ignore[method-assign]


def _check_parts() -> None:
    """Has `set_attn_implementation` refuse what cannot follow it: transformers logs a warning, and changes nothing."""
    known = PreTrainedModel.set_attn_implementation

    @functools.wraps(known)
    def set_checked(self: Any, attn_implementation: Any, *arguments: Any, **keywords: Any) -> Any:
        asked = dict(_asked(self.config, attn_implementation))
        for part in self.modules():
            if isinstance(part, PreTrainedModel):
                name = asked.get(id(part.config), asked[id(self.config)])
                if name in _OWN_NAMES:
                    _refuse_own_attention(part, name)
        return known(self, attn_implementation, *arguments, **keywords)

    PreTrainedModel.set_attn_implementation = set_checked  # type: ignore[method-assign]


def _asked(config: Any, implementation: Any) -> Iterator[tuple[int, Any]]:
    """The identity of a configuration and of each within it, and the implementation that it is to use.

    implementation: a name for all of them, or a dictionary by the names of parts, in which "" is the whole.
    """
    by_part = isinstance(implementation, dict)
    yield id(config), implementation.get("", config._attn_implementation) if by_part else implementation
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            yield from _asked(part, implementation.get(name, part._attn_implementation) if by_part else implementation)


def _refuse_own_attention(model: Any, name: str) -> None:
    """UnsupportedError for a model that does not ask transformers for its attention."""
    if _computes_by_itself(type(model)):
        why = "has an attention of its own"
    elif not any(getattr(model, f"_supports_{what}", False) for what in _ANY_OF):
        why = "declares no support of other attentions"
    else:
        return
    raise UnsupportedError(
        f"{type(model).__name__} {why}, and takes no attn_implementation={name!r}: leave it out; where this is "
        f"a part of a model, name the other parts in a dictionary, such as {{'text_config': {name!r}}}"
    )


def _computes_by_itself(model: type) -> bool:
    """Whether the files of a model's classes define an attention, and none of them has the interface."""
    names = {each.__module__ for each in model.__mro__ if issubclass(each, PreTrainedModel)} - {
        PreTrainedModel.__module__
    }
    files = [vars(sys.modules[name]) for name in names if name in sys.modules]
    if any(isinstance(value, AttentionInterface) for file in files for value in file.values()):
        return False
    return any(_is_attention(value) and value.__module__ in names for file in files for value in file.values())


def _is_attention(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.nn.Module) and "Attention" in value.__name__
