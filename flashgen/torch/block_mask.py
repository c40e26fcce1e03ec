"""What FlexAttention calls block masks: here a traced mask and the lengths that it is for; kernels list its tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashgen.analysis.tile_classes import EMPTY, TileMap, tile_map
from flashgen.errors import ArgumentError
from flashgen.language.masks import full
from flashgen.language.modifiers import Mask, as_mask
from flashgen.torch.tensors import Tensor

_BLOCK = 128


class BlockMask:
    """A mask of (batch or 1, heads or 1, len_q, len_k), as `create_block_mask` makes it.

    It holds no blocks: kernels know tiles in closed form, or list them on the device in each call. `to_dense` and
    `sparsity` work them out on the CPU.
    """

    def __init__(self, mask: Mask, shape: tuple[int, int, int, int], block_size: tuple[int, int]) -> None:
        self.mask, self.shape, self.BLOCK_SIZE = mask, shape, block_size

    @property
    def mask_mod(self) -> Mask:
        """The mask, which other functions may call."""
        return self.mask

    @property
    def seq_lengths(self) -> tuple[int, int]:
        """(queries, keys)."""
        return self.shape[2], self.shape[3]

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        batch, heads, len_q, len_k = self.shape
        return batch * heads * len_q * len_k

    def to_dense(self) -> Tensor:
        """int32 (batch or 1, heads or 1, blocks of queries, blocks of keys) on the CPU: 1 where one is visited."""
        return torch.from_numpy((self._tiles().classes != EMPTY).astype("int32"))

    def sparsity(self) -> float:
        """The blocks that are not visited, in percent."""
        return 100 * (1 - self._tiles().share)

    def _tiles(self) -> TileMap:
        captures = {name: array.on_host() for name, array in self.mask.bound.items()}
        batch, heads, len_q, len_k = self.shape
        return tile_map(self.mask.expression, self.BLOCK_SIZE, len_q, len_k, batch, heads, captures)

    def to(self, *_device: Any) -> BlockMask:
        """Itself: arrays that the mask closed over are read where they are, or copied to where calls are."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"flashgen.torch.BlockMask has no {name!r}: it holds the mask itself, of which kernels find the tiles; "
            "there are mask_mod, shape, seq_lengths, sparsity() and to_dense()"
        )

    def __repr__(self) -> str:
        return f"BlockMask({self.mask.name}, shape={self.shape})"


def create_block_mask(
    mask_mod: Callable[..., Any] | Mask,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = _BLOCK,
    _compile: bool = False,
) -> BlockMask:
    """The mask of `mask_mod(b, h, q, k)` for sequences of these lengths, as FlexAttention's function of this name.

    Args:
        mask_mod: a function of indices, which may close over arrays of any library, or a flashgen mask.
        B, H: batch and heads that the mask is for; None for any number.
        Q_LEN, KV_LEN: the lengths.
        device, _compile: as they are given to FlexAttention; nothing is computed on a device here.
        BLOCK_SIZE: of the blocks that `to_dense` and `sparsity` speak of; kernels have tiles of their own.
    """
    block = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
    for name, size in (("Q_LEN", Q_LEN), ("KV_LEN", KV_LEN)):
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise ArgumentError(f"{name}={size!r} must be an integer of at least 0")
    return BlockMask(as_mask(mask_mod, "mask_mod"), (B or 1, H or 1, Q_LEN, KV_LEN), block)


def noop_mask(_b: Any, _h: Any, _q: Any, _k: Any) -> Any:
    """Keeps everything."""
    return full()(_b, _h, _q, _k)


def and_masks(*mask_mods: Any) -> Mask:
    """What all of the masks keep."""
    return _joined(mask_mods, "and_masks", lambda left, right: left & right)


def or_masks(*mask_mods: Any) -> Mask:
    """What one of the masks keeps."""
    return _joined(mask_mods, "or_masks", lambda left, right: left | right)


def _joined(mask_mods: tuple[Any, ...], name: str, join: Callable[[Mask, Mask], Mask]) -> Mask:
    if not mask_mods:
        raise ArgumentError(f"{name}() joins masks: give at least one")
    made, *others = (as_mask(mask, name) for mask in mask_mods)
    for mask in others:
        made = join(made, mask)
    return made
