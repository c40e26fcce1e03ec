"""Functions of masks, as FlexAttention has them beside `create_block_mask`."""

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
    """Keeps everything."""
    return b.new_ones((), dtype=torch.bool) if isinstance(b, torch.Tensor) else full()(b, _h, _q, _k)


def and_masks(*mask_mods: MaskFunction) -> MaskFunction:
    """What all of the masks keep."""
    masks = _functions(mask_mods, "and_masks")

    def and_mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return reduce(operator.and_, (mask(b, h, q, k) for mask in masks))

    return and_mask


def or_masks(*mask_mods: MaskFunction) -> MaskFunction:
    """What one of the masks keeps."""
    masks = _functions(mask_mods, "or_masks")

    def or_mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return reduce(operator.or_, (mask(b, h, q, k) for mask in masks))

    return or_mask


def _functions(given: tuple[Any, ...], name: str) -> tuple[MaskFunction, ...]:
    if not given:
        raise ArgumentError(f"{name}() joins masks: give at least one")
    for each in given:
        if not callable(each):
            raise ArgumentError(f"{name} got {each!r}: give functions of (b, h, q, k), or flashgen's masks")
    return given


def create_mask(
    mod_fn: Callable[..., Any], B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Any = None
) -> Tensor:
    """The booleans (B, H, Q_LEN, KV_LEN) of a mask or a score function, as FlexAttention's function of this name.

    All of them, element by element: to look at, and for attentions that take nothing else. Of a score function, where
    it does not give -inf. device: None is a GPU, where torch has one.
    """
    if isinstance(mod_fn, Mask):
        if device is None:
            device = torch.accelerator.current_accelerator() or "cpu"
        return torch.from_numpy(_elements(mod_fn, B or 1, H or 1, Q_LEN, KV_LEN)).to(device)
    from torch.nn.attention.flex_attention import create_mask as of_functions

    mask: Tensor = of_functions(mod_fn, B, H, Q_LEN, KV_LEN, device)
    return mask


def _elements(mask: Mask, *sizes: int) -> np.ndarray[Any, Any]:
    """A traced mask, by NumPy."""
    values: dict[Any, Any] = dict(zip(INDICES, np.ix_(*map(np.arange, sizes)), strict=True))
    values |= {LEN_Q: sizes[2], LEN_K: sizes[3]}
    captures = {name: array.on_host() for name, array in mask.bound.items()}
    return np.broadcast_to(evaluate(mask.expression, values, captures), sizes).copy()
