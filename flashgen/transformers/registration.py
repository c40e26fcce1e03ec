"""Registers flashgen as an attention implementation of transformers."""

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

_REGISTERED_NAMES: set[str] = set()
# A model with the common attention interface supports one of these.
_SUPPORT_FLAGS = ("attention_backend", "sdpa", "flash_attn", "flex_attn")


def register(name: str = "flashgen", *, emulate: bool | None = None, deterministic: bool | None = None) -> None:
    """Registers `attn_implementation="flashgen"` with transformers, including its masks.

    A model with an attention of its own, which ignores attn_implementation, raises UnsupportedError when it is created
    with that name or when `set_attn_implementation` sets it. The same holds for a model that contains such a submodel,
    unless a dictionary gives the submodel another implementation.

    Args:
        name: the name of the implementation.
        emulate: run models on the CPU with the emulator; None for the setting of `flashgen.torch.emulated()`.
        deterministic: compute gradients that are bitwise equal from run to run; None for the setting of torch.
    """
    forward = functools.partial(attention_forward, emulate=emulate, deterministic=deterministic)
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, attention_mask)
    if not _REGISTERED_NAMES:
        _accept_registered_names()
        _check_submodels()
    _REGISTERED_NAMES.add(name)


def _accept_registered_names() -> None:
    """Patches transformers so that models use the registered names unchanged.

    For every name that contains "flash", transformers loads flash-attn or a kernel of its hub, and it gives some models
    another implementation.
    """
    original = PreTrainedModel._check_and_adjust_attn_implementation

    @functools.wraps(original)
    def check(self: Any, attn_implementation: str | None, *arguments: Any, **keywords: Any) -> Any:
        if attn_implementation not in _REGISTERED_NAMES:
            return original(self, attn_implementation, *arguments, **keywords)
        _refuse_unsupported(self, attn_implementation)
        return attn_implementation

    PreTrainedModel._check_and_adjust_attn_implementation = check  # type: ignore[method-assign]


def _check_submodels() -> None:
    """Patches `set_attn_implementation` to raise for unsupported models, where transformers only logs a warning."""
    original = PreTrainedModel.set_attn_implementation

    @functools.wraps(original)
    def set_checked(self: Any, attn_implementation: Any, *arguments: Any, **keywords: Any) -> Any:
        requested = dict(_requested(self.config, attn_implementation))
        for part in self.modules():
            if isinstance(part, PreTrainedModel):
                name = requested.get(id(part.config), requested[id(self.config)])
                if name in _REGISTERED_NAMES:
                    _refuse_unsupported(part, name)
        return original(self, attn_implementation, *arguments, **keywords)

    PreTrainedModel.set_attn_implementation = set_checked  # type: ignore[method-assign]


def _requested(config: Any, implementation: Any) -> Iterator[tuple[int, Any]]:
    """Yields the identity of a configuration and of each sub-configuration, with the implementation requested for it.

    implementation: a name for all of them, or a dictionary by the names of sub-configurations, where "" is the model.
    """
    by_part = isinstance(implementation, dict)
    yield id(config), implementation.get("", config._attn_implementation) if by_part else implementation
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            own = implementation.get(name, part._attn_implementation) if by_part else implementation
            yield from _requested(part, own)


def _refuse_unsupported(model: Any, name: str) -> None:
    """Raises UnsupportedError for a model that does not use the attention interface of transformers."""
    if _computes_by_itself(type(model)):
        why = "has an attention of its own"
    elif not any(getattr(model, f"_supports_{flag}", False) for flag in _SUPPORT_FLAGS):
        why = "declares no support of other attentions"
    else:
        return
    raise UnsupportedError(
        f"{type(model).__name__} {why}, and takes no attn_implementation={name!r}: leave it out; if it is part "
        f"of a model, name the other parts in a dictionary, such as {{'text_config': {name!r}}}"
    )


def _computes_by_itself(model: type) -> bool:
    """Returns whether the modules of a model's classes define an attention, and none has an AttentionInterface."""
    names = {each.__module__ for each in model.__mro__ if issubclass(each, PreTrainedModel)} - {
        PreTrainedModel.__module__
    }
    files = [vars(sys.modules[name]) for name in names if name in sys.modules]
    if any(isinstance(value, AttentionInterface) for file in files for value in file.values()):
        return False
    return any(_is_attention(value) and value.__module__ in names for file in files for value in file.values())


def _is_attention(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.nn.Module) and "Attention" in value.__name__
