"""`BlockMask` and `create_block_mask`: FlexAttention's block masks, held as a mask function and lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashgen.analysis.tile_classes import FULL, PARTIAL, tile_map
from flashgen.errors import ArgumentError, SpecError
from flashgen.language.modifiers import Mask, as_mask
from flashgen.torch.mask_functions import MaskFunction, noop_mask
from flashgen.torch.tensors import Tensor
from flashgen.torch.traced_functions import check_mask_function

_BLOCK = 128
_MAX_SHOWN = 20  # rectangles across a picture of blocks
Blocks = tuple[Tensor, Tensor]
"""Which blocks of queries x keys are partial, and which are full: each bool (batch, heads, rows, columns)."""


class _Lists:
    """An attribute that lists blocks as FlexAttention's class does, or is None without full blocks.

    It is computed when it is read. A class with `__getattr__` instead would take longer to read its other attributes.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._is_full, self._is_of_queries = name.startswith("full_"), name.startswith(("q_", "full_q_"))
        self._counts = name.endswith("num_blocks")

    def __get__(self, mask: BlockMask, owner: type) -> Any:
        if self._is_full and not mask._has_full:
            return None
        partial, full = mask.blocks()
        blocks = full if self._is_full else partial if mask._has_full else partial | full
        blocks = blocks.mT if self._is_of_queries else blocks
        if self._counts:
            return blocks.sum(-1, dtype=torch.int32)
        return torch.argsort(blocks.int(), dim=-1, descending=True, stable=True).int()


class BlockMask:
    """A mask of (batch or 1, heads or 1, len_q, len_k), as `create_block_mask` returns it.

    It holds no blocks: kernels know their tiles in closed form, or list them on the device in each call. The block data
    of FlexAttention's class is computed on the CPU when it is read: `kv_num_blocks`, `kv_indices`, their `full_` and
    `q_` forms, `to_dense`, `sparsity`, `to_string`. A block mask that is created from blocks, by the constructor, by
    `from_kv_blocks` or by indexing, holds these blocks and keeps nothing outside of them.

    Attributes:
        mask_mod: the mask function; it may be set.
        seq_lengths: (len_q, len_k); it may be set.
        function: what kernels keep, as a mask function: `mask_mod` within the blocks, if there are any.
    """

    def __init__(
        self,
        seq_lengths: tuple[int, int],
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None = None,
        full_kv_indices: Tensor | None = None,
        q_num_blocks: Tensor | None = None,
        q_indices: Tensor | None = None,
        full_q_num_blocks: Tensor | None = None,
        full_q_indices: Tensor | None = None,
        BLOCK_SIZE: int | tuple[int, int] = _BLOCK,
        mask_mod: MaskFunction = noop_mask,
        **_triton_options: Any,
    ) -> None:
        """Creates a block mask from lists of blocks, with the arguments of FlexAttention's constructor.

        Args:
            seq_lengths: (len_q, len_k).
            kv_num_blocks: (batch or 1, heads or 1, rows), the number of partial blocks in each row of blocks.
            kv_indices: (batch or 1, heads or 1, rows, columns), the columns of each row's partial blocks, first in each
                row. `mask_mod` decides within these blocks.
            full_kv_num_blocks, full_kv_indices: the same for full blocks, which are kept entirely.
            q_num_blocks, q_indices, full_q_num_blocks, full_q_indices: ignored, as are the arguments for the order in
                which dQ is written: kernels here do not need them.
            BLOCK_SIZE: queries and keys of a block.
            mask_mod: the mask function.
            _triton_options: ignored.

        Raises:
            ArgumentError: the lists have other shapes, or the lengths exceed the blocks.
        """
        if kv_indices.ndim != 4 or (full_kv_num_blocks is None) != (full_kv_indices is None):
            raise ArgumentError(
                f"kv_indices has shape {tuple(kv_indices.shape)}: give (batch, heads, rows, columns), and of full "
                "blocks both numbers and indices or neither"
            )
        _check_triton_options(_triton_options)
        partial = _blocks_from_lists(kv_num_blocks, kv_indices)
        full = torch.zeros_like(partial)
        if full_kv_num_blocks is not None and full_kv_indices is not None:
            full = _blocks_from_lists(full_kv_num_blocks, full_kv_indices)
        block = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
        _check_lengths(seq_lengths, partial, block)
        shape = (partial.shape[0], partial.shape[1], seq_lengths[0], seq_lengths[1])
        has_full = full_kv_num_blocks is not None
        self._set(mask_mod, shape, block, kv_indices.device, (partial, full), has_full)

    kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices = _Lists(), _Lists(), _Lists(), _Lists()
    q_num_blocks, q_indices, full_q_num_blocks, full_q_indices = _Lists(), _Lists(), _Lists(), _Lists()

    @classmethod
    def _create(cls, *given: Any) -> BlockMask:
        """Creates a block mask from a function and a shape, with or without known blocks: see `_set`."""
        mask = cls.__new__(cls)
        mask._set(*given)
        return mask

    def _set(
        self,
        mask_mod: MaskFunction,
        shape: tuple[int, int, int, int],
        block_size: tuple[int, int],
        device: Any = None,
        blocks: Blocks | None = None,
        has_full: bool = True,
    ) -> None:
        """Sets the fields. has_full: whether full blocks have lists of their own."""
        self._mask_mod, self.batch_and_heads, self.seq_lengths = mask_mod, shape[:2], (shape[2], shape[3])
        self.BLOCK_SIZE, self.device, self._blocks = block_size, torch.device(device or "cpu"), blocks
        self._has_full = has_full

    @classmethod
    def from_kv_blocks(
        cls,
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None = None,
        full_kv_indices: Tensor | None = None,
        BLOCK_SIZE: int | tuple[int, int] = _BLOCK,
        mask_mod: MaskFunction | None = None,
        seq_lengths: tuple[int, int] | None = None,
        compute_q_blocks: bool = True,
        **_triton_options: Any,
    ) -> BlockMask:
        """Creates a block mask from lists of blocks, as the constructor.

        Args:
            kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, BLOCK_SIZE: as in the constructor.
            mask_mod: the mask function; None keeps all elements of the blocks.
            seq_lengths: (len_q, len_k); by default the lengths that the blocks cover.
            compute_q_blocks, _triton_options: ignored.
        """
        block = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
        rows, columns = kv_indices.shape[-2:]
        lengths = seq_lengths or (rows * block[0], columns * block[1])
        given: dict[str, Any] = {"full_kv_num_blocks": full_kv_num_blocks, "full_kv_indices": full_kv_indices}
        given |= {"BLOCK_SIZE": block, "mask_mod": mask_mod or noop_mask, **_triton_options}
        return cls(lengths, kv_num_blocks, kv_indices, **given)

    def as_tuple(self, flatten: bool = True) -> tuple[Any, ...]:
        """Returns lengths, lists, block sizes and function, as FlexAttention's class of the installed torch does.

        flatten: return lengths and block sizes as two numbers each instead of pairs.
        """
        from torch.nn.attention.flex_attention import BlockMask as Theirs

        lists: Any = {name: getattr(self, name) for name in _LISTS}
        theirs: Any = Theirs(self.seq_lengths, **lists, BLOCK_SIZE=self.BLOCK_SIZE, mask_mod=self._mask_mod)
        return tuple(theirs.as_tuple(flatten))

    @property
    def mask_mod(self) -> MaskFunction:
        return self._mask_mod

    @mask_mod.setter
    def mask_mod(self, function: MaskFunction) -> None:
        self._mask_mod = function

    @property
    def function(self) -> Callable[..., Any] | Mask:
        """What kernels keep, as a mask function: `mask_mod`, limited to the blocks if there are any."""
        if self._blocks is None:
            return self._mask_mod
        (partial, full), (rows, columns), mask_mod = self._blocks, self.BLOCK_SIZE, self._mask_mod
        has_batch, has_heads = partial.shape[0] > 1, partial.shape[1] > 1

        def listed(b: Any, h: Any, q: Any, k: Any) -> Any:
            block = (b if has_batch else 0, h if has_heads else 0, q // rows, k // columns)
            return full[block] | (partial[block] & mask_mod(b, h, q, k))

        return listed

    def function_for(self, q_shape: torch.Size, k_shape: torch.Size) -> Callable[..., Any] | Mask:
        """Returns `function`.

        Args:
            q_shape: the shape of the query, (batch, heads, queries, dim).
            k_shape: the shape of the key, (batch, heads of keys, keys, dim).

        Raises:
            ArgumentError: the mask is for other shapes.
        """
        (batch, heads), (len_q, len_k) = self.batch_and_heads, self.seq_lengths
        if len_q != q_shape[2] or len_k != k_shape[2]:
            raise ArgumentError(
                f"block_mask is for {len_q} queries and {len_k} keys; query has {q_shape[2]} and key {k_shape[2]}: "
                "create it for these lengths"
            )
        for name, size, given in (("B", batch, q_shape[0]), ("H", heads, q_shape[1])):
            if size != 1 and size != given:
                raise ArgumentError(
                    f"block_mask was created for {name}={size}; query has {given}: give 1, None or {given}"
                )
        return self._mask_mod if self._blocks is None else self.function

    @property
    def mask(self) -> Mask:
        """The mask that kernels keep, traced when it is read."""
        return as_mask(self.function, "mask_mod")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (*self.batch_and_heads, *self.seq_lengths)

    def size(self, dim: int | None = None) -> Any:
        """Returns the shape, or one of its sizes.

        Args:
            dim: the dimension; None for all.
        """
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        batch, heads, len_q, len_k = self.shape
        return batch * heads * len_q * len_k

    def blocks(self) -> Blocks:
        """Returns the partial blocks and the full blocks, each bool (batch, heads, rows of blocks, columns)."""
        if self._blocks is not None:
            return self._blocks
        mask = self.mask
        captures = {name: array.on_host() for name, array in mask.bound.items()}
        batch, heads, len_q, len_k = self.shape
        classes = tile_map(mask.expression, self.BLOCK_SIZE, len_q, len_k, batch, heads, captures).classes
        found = torch.from_numpy(classes).to(self.device).expand(batch, heads, *classes.shape[2:])
        return found == PARTIAL, found == FULL

    def to_dense(self) -> Tensor:
        """Returns int32 (batch or 1, heads or 1, blocks of queries, blocks of keys): 1 for visited blocks."""
        partial, full = self.blocks()
        return (partial | full).to(torch.int32)

    def sparsity(self) -> float:
        """Returns the percentage of blocks that are not visited."""
        return 100 * (1 - self.to_dense().double().mean().item())

    def to(self, device: Any) -> BlockMask:
        """Returns a copy that reports its blocks on a device. Arrays that the mask closes over stay where they are.

        Args:
            device: the device of the tensors.
        """
        blocks = self._blocks and (self._blocks[0].to(device), self._blocks[1].to(device))
        return BlockMask._create(self._mask_mod, self.shape, self.BLOCK_SIZE, device, blocks, self._has_full)

    def __getitem__(self, index: Any) -> BlockMask:
        """Returns the blocks at an index of batch, head and row of blocks.

        Batch, head and query indices of the result begin at 0. Before the result is used in a call, its `mask_mod` must
        be set to a function of these indices.
        """
        given = index if isinstance(index, tuple) else (index,)
        items = tuple(slice(i, i + 1 or None) if isinstance(i, int) else i for i in given)
        partial, full = (each[items] for each in self.blocks())
        shape = (*partial.shape[:2], *self.seq_lengths)
        blocks = (partial, full)
        return BlockMask._create(_mask_mod_to_be_set, shape, self.BLOCK_SIZE, self.device, blocks, self._has_full)

    def _adjust(self, new_q_len: int, new_kv_len: int) -> BlockMask:
        """Returns the mask for other lengths, with the first blocks. FlexAttention's errors tell users to call it."""
        rows, columns = (-(-new // block) for new, block in zip((new_q_len, new_kv_len), self.BLOCK_SIZE, strict=True))
        blocks = self._blocks and (self._blocks[0][..., :rows, :columns], self._blocks[1][..., :rows, :columns])
        shape = (*self.batch_and_heads, new_q_len, new_kv_len)
        return BlockMask._create(self._mask_mod, shape, self.BLOCK_SIZE, self.device, blocks, self._has_full)

    def to_string(self, grid_size: int | tuple[int, int] = _MAX_SHOWN, limit: int = 4) -> str:
        """Returns a picture of the first `limit` maps of blocks.

        Each pair of equal characters stands for a rectangle of blocks: █ if all of them are visited, ░ if some are, a
        space if none is.

        Args:
            grid_size: the maximum number of rows and columns, one number or a pair; -1 is no maximum.
            limit: the maximum number of maps.
        """
        dense = self.to_dense().double().flatten(0, 1)
        max_sizes = (grid_size, grid_size) if isinstance(grid_size, int) else grid_size
        steps = [1 if n < 0 else max(1, -(-size // n)) for size, n in zip(dense.shape[1:], max_sizes, strict=True)]
        pictures = []
        for number, blocks in enumerate(dense[:limit]):
            shares = [[part.mean().item() for part in row.split(steps[1], 1)] for row in blocks.split(steps[0])]
            lines = ["".join("█" if x == 1 else "░" if x else " " for x in row for _ in "ab") for row in shares]
            pictures.append("\n".join([str(divmod(number, self.shape[1])), *lines, ""]))
        return "\n".join([*pictures, *(_MORE if len(dense) > limit else [])])

    def __repr__(self) -> str:
        return f"BlockMask({self.mask.name}, shape={self.shape}, BLOCK_SIZE={self.BLOCK_SIZE})"

    def __str__(self) -> str:
        return f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%, \n{self.to_string().strip()}\n)"


_LISTS = tuple(name for name, attribute in vars(BlockMask).items() if isinstance(attribute, _Lists))
_ORDER = ("dq_write_order", "dq_write_order_full", "dq_kv_order", "dq_kv_order_spt")
_MORE = (  # FlexAttention's own words
    "...",
    "To print out more, set BlockMask.to_string(limit=N)",
    "You can also index (BlockMask[batch, head]) to choose a specific batch or head",
)


def _check_triton_options(given: dict[str, Any]) -> None:
    """Raises ArgumentError for arguments that FlexAttention's block masks do not have."""
    if unknown := sorted(set(given) - set(_ORDER)):
        raise ArgumentError(f"BlockMask has no argument {', '.join(unknown)}")


def _check_lengths(lengths: tuple[int, int], blocks: Tensor, block_size: tuple[int, int]) -> None:
    """Raises ArgumentError if the lengths exceed what the blocks cover."""
    covered = tuple(count * size for count, size in zip(blocks.shape[2:], block_size, strict=True))
    if any(length > size for length, size in zip(lengths, covered, strict=True)):
        raise ArgumentError(
            f"seq_lengths={tuple(lengths)}: the lists have {blocks.shape[2]} rows and {blocks.shape[3]} columns of "
            f"blocks {block_size}, which cover {covered[0]} queries and {covered[1]} keys"
        )


def _blocks_from_lists(numbers: Tensor, indices: Tensor) -> Tensor:
    """Converts lists to booleans of blocks: in each row, the first `numbers` entries of `indices` are set."""
    columns = indices.shape[-1]
    named = torch.arange(columns, device=indices.device) < numbers[..., None]
    found = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    return found.scatter_(-1, torch.where(named, indices, columns).long(), True)[..., :columns].contiguous()


def _mask_mod_to_be_set(_b: Any, _h: Any, _q: Any, _k: Any) -> Any:
    raise SpecError(
        "a part of a block mask counts its queries, batch and heads from 0: set its mask_mod to a function of these, "
        "as in part.mask_mod = lambda b, h, q, k: whole.mask_mod(b, h, q + offset, k)"
    )


def create_block_mask(
    mask_mod: Callable[..., Any] | Mask,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = _BLOCK,
    _compile: bool = False,
    **_triton_options: bool,
) -> BlockMask:
    """Creates the block mask of `mask_mod(b, h, q, k)`, as FlexAttention's function of the same name.

    Args:
        mask_mod: a function of indices, which may close over arrays of any library, or a flashgen mask.
        B, H: batch and heads of the mask; None for any number.
        Q_LEN, KV_LEN: the lengths.
        device: the device of tensors that describe the blocks; None is the CPU. Attention does not need it.
        BLOCK_SIZE: queries and keys of the blocks that are reported. Kernels have tiles of their own.
        _compile: ignored.
        separate_full_blocks: whether full blocks have lists of their own; True by default.
        compute_dq_write_order, dq_kv_order: ignored.

    Raises:
        ArgumentError: a length is not an integer of at least 0, or an argument is unknown.
        SpecError: mask_mod cannot be traced.
    """
    for name, size in (("Q_LEN", Q_LEN), ("KV_LEN", KV_LEN)):
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise ArgumentError(f"{name}={size!r} must be an integer of at least 0")
    unknown = set(_triton_options) - {"separate_full_blocks", "compute_dq_write_order", "dq_kv_order"}
    if unknown:
        raise ArgumentError(f"create_block_mask has no argument {', '.join(sorted(unknown))}")
    block = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
    has_full = _triton_options.get("separate_full_blocks", True)
    check_mask_function(mask_mod)
    return BlockMask._create(mask_mod, (B or 1, H or 1, Q_LEN, KV_LEN), block, device, None, has_full)
