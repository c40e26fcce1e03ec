"""Helpers for mask functions, as FlexAttention offers them: `and_masks`, `or_masks`, `noop_mask`, `create_mask`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import torch

from flashgen.errors import ArgumentError
from flashgen.language.evaluate import evaluate
from flashgen.language.masks import full
from flashgen.language.modifiers import Mask
from flashgen.language.operations import INDICES, LEN_K, LEN_Q
from flashgen.torch.tensors import Tensor

MaskFunction = Callable[[Any, Any, Any, Any], Any]


def noop_mask(b: Any, _h: Any, _q: Any, _k: Any) -> Any:
    """A mask function that keeps all keys.

    Args:
        b, _h, _q, _k: the indices, which are not read.
    """
    return b.new_ones((), dtype=torch.bool) if isinstance(b, torch.Tensor) else full()(b, _h, _q, _k)


def and_masks(*mask_mods: MaskFunction) -> MaskFunction:
    """Returns a mask function that keeps what all of the masks keep.

    Args:
        mask_mods: functions of (b, h, q, k), or flashgen masks.
    """
    masks = _checked_functions(mask_mods, "and_masks")

    def and_mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return reduce(operator.and_, (mask(b, h, q, k) for mask in masks))

    return and_mask


def or_masks(*mask_mods: MaskFunction) -> MaskFunction:
    """Returns a mask function that keeps what any of the masks keeps.

    Args:
        mask_mods: functions of (b, h, q, k), or flashgen masks.
    """
    masks = _checked_functions(mask_mods, "or_masks")

    def or_mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return reduce(operator.or_, (mask(b, h, q, k) for mask in masks))

    return or_mask


def _checked_functions(given: tuple[Any, ...], name: str) -> tuple[MaskFunction, ...]:
    if not given:
        raise ArgumentError(f"{name}() joins masks: give at least one")
    for each in given:
        if not callable(each):
            raise ArgumentError(f"{name} got {each!r}: give functions of (b, h, q, k), or flashgen's masks")
    return given


def create_mask(
    mod_fn: Callable[..., Any], B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Any = None
) -> Tensor:
    """Returns a mask as booleans (B, H, Q_LEN, KV_LEN), as FlexAttention's function of the same name.

    The tensor has all elements. It is meant for inspection, and for attention functions that take no mask functions.

    Args:
        mod_fn: a mask function, a flashgen mask, or a score function, which keeps keys where it does not return -inf.
        B, H: batch and heads; None is 1.
        Q_LEN, KV_LEN: the lengths.
        device: the device of the result; None is the current accelerator, or the CPU.
    """
    if isinstance(mod_fn, Mask):
        if device is None:
            device = torch.accelerator.current_accelerator() or "cpu"
        return torch.from_numpy(_elements(mod_fn, B or 1, H or 1, Q_LEN, KV_LEN)).to(device)
    from torch.nn.attention.flex_attention import create_mask as torch_create_mask

    mask: Tensor = torch_create_mask(mod_fn, B, H, Q_LEN, KV_LEN, device)
    return mask


def _elements(mask: Mask, *sizes: int) -> np.ndarray[Any, Any]:
    """Evaluates a traced mask by NumPy."""
    values: dict[Any, Any] = dict(zip(INDICES, np.ix_(*map(np.arange, sizes)), strict=True))
    values |= {LEN_Q: sizes[2], LEN_K: sizes[3]}
    captures = {name: array.on_host() for name, array in mask.bound.items()}
    return np.broadcast_to(evaluate(mask.expression, values, captures), sizes).copy()
