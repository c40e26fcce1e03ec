"""Block masks: the attributes and constructors of FlexAttention's, slices of them, and combined functions."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="flashgen.torch needs torch: pip install 'flashgen[torch]'")

import torch
from torch.nn.attention import flex_attention as torchs

import flashgen as fg
import flashgen.torch as ours
from flashgen.errors import ArgumentError, SpecError

LENGTH, BLOCK = 80, 16
ONE = torch.ones(1, 1, 1, dtype=torch.int32)
ids = torch.arange(LENGTH) // 23
lengths = torch.tensor([80, 40])


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def documents(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (ids[q] == ids[k]) & (q - k <= 20 * (h + 1))


def padding(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k < lengths[b]


MASKS = {"causal": (causal, None, None), "documents": (documents, None, 2), "padding": (padding, 2, 1)}
LISTS = [f"{full}{side}_{what}" for full in ("", "full_") for side in ("kv", "q") for what in ("num_blocks", "indices")]


def both(name: str, **options: Any) -> list[Any]:
    mask, batch, heads = MASKS[name]
    sizes = (mask, batch, heads, LENGTH, LENGTH, "cpu")
    return [module.create_block_mask(*sizes, BLOCK_SIZE=BLOCK, **options) for module in (ours, torchs)]


@pytest.mark.parametrize("name", MASKS)
def test_attributes_of_blocks(name: str) -> None:
    mine, torchs_own = both(name, _compile=False)
    assert mine.shape == torchs_own.shape and mine.numel() == torchs_own.numel()
    assert mine.seq_lengths == torchs_own.seq_lengths and mine.BLOCK_SIZE == torchs_own.BLOCK_SIZE
    assert torch.equal(mine.to_dense(), torchs_own.to_dense())
    assert mine.sparsity() == pytest.approx(torchs_own.sparsity())
    for which in LISTS:
        ours_, theirs = getattr(mine, which), getattr(torchs_own, which)
        assert ours_.dtype == theirs.dtype == torch.int32 and ours_.shape == theirs.shape, which
        if which.endswith("indices"):  # in each row only those that count
            named = torch.arange(ours_.shape[-1]) < getattr(mine, which.replace("indices", "num_blocks"))[..., None]
            ours_, theirs = ours_[named], theirs[named]
        assert torch.equal(ours_, theirs), which


def test_text_drawing_of_blocks() -> None:
    mask = ours.create_block_mask(causal, 2, 3, 64, 48, BLOCK_SIZE=16)
    shown = mask.to_string(limit=1).splitlines()
    assert shown[:6] == ["(0, 0)", "██    ", "████  ", "██████", "██████", ""] and shown[6] == "..."
    assert mask[1].to_string(grid_size=(2, 2)).splitlines()[-3:] == ["(0, 2)", "░░  ", "████"]
    assert str(mask).startswith("BlockMask(shape=(2, 3, 64, 48), sparsity=25.00%, \n(0, 0)")


@pytest.mark.parametrize("name", MASKS)
def test_drawings_equal_flex_attentions(name: str) -> None:
    mine, torchs_own = both(name)
    assert str(mine) == str(torchs_own)
    for options in ({"grid_size": -1}, {"grid_size": (2, 3)}, {"grid_size": 4, "limit": 1}, {"limit": 0}):
        assert mine.to_string(**options) == torchs_own.to_string(**options)


@pytest.mark.parametrize("separate", [True, False])
def test_tuples_equal_flex_attentions(separate: bool) -> None:
    mine, torchs_own = both("documents", separate_full_blocks=separate)
    for flatten in (True, False):
        for one, other in zip(mine.as_tuple(flatten), torchs_own.as_tuple(flatten), strict=True):
            if isinstance(other, torch.Tensor):  # indices that count are compared elsewhere
                assert one.shape == other.shape and one.dtype == other.dtype
            else:
                assert one == other
    assert torch.equal(mine.kv_num_blocks, torchs_own.kv_num_blocks)
    assert (mine.full_kv_num_blocks is None) == (torchs_own.full_kv_num_blocks is None) == (not separate)


def test_constructors_equal_flex_attentions() -> None:
    """By the constructor, by positions and names; missing blocks are None."""
    q, k, v = (torch.randn(2, 2, LENGTH, 32, dtype=torch.bfloat16) for _ in range(3))
    theirs = torchs.create_block_mask(documents, None, 2, LENGTH, LENGTH, "cpu", BLOCK_SIZE=BLOCK)
    length_q, length_k, *lists = theirs.as_tuple()[:10]
    by_position = ours.BlockMask((length_q, length_k), *lists, (BLOCK, BLOCK), documents)
    named = {which: getattr(theirs, which) for which in LISTS}
    by_name = ours.BlockMask(**named, seq_lengths=(LENGTH, LENGTH), BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=documents)
    expected = ours.flex_attention(q, k, v, block_mask=ours.create_block_mask(documents, None, 2, LENGTH, LENGTH))
    for made in (by_position, by_name):
        assert torch.equal(made.to_dense(), theirs.to_dense()) and made.BLOCK_SIZE == (BLOCK, BLOCK)
        torch.testing.assert_close(ours.flex_attention(q, k, v, block_mask=made), expected, atol=1e-2, rtol=1e-2)
    partial = ours.BlockMask.from_kv_blocks(theirs.kv_num_blocks, theirs.kv_indices, BLOCK_SIZE=BLOCK)
    for mask in (partial, partial[:, :1], partial.to("cpu"), partial._adjust(32, 32)):
        assert all(getattr(mask, which) is None for which in LISTS if which.startswith("full_"))
    assert torch.equal(partial.kv_num_blocks, theirs.kv_num_blocks)


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_from_lists_of_blocks(name: str) -> None:
    """As in models that build block masks themselves: from the function only, or with blocks that it does not need."""
    q, k, v = (torch.randn(2, 2, LENGTH, 32, dtype=torch.bfloat16) for _ in range(3))
    mine, torchs_own = both(name)
    expected = ours.flex_attention(q, k, v, block_mask=mine)
    lists = [getattr(torchs_own, which) for which in ("kv_num_blocks", "kv_indices")]
    full = [getattr(torchs_own, which) for which in ("full_kv_num_blocks", "full_kv_indices")]
    lengths_ = {"BLOCK_SIZE": BLOCK, "seq_lengths": (LENGTH, LENGTH)}
    made = ours.BlockMask.from_kv_blocks(*lists, *full, mask_mod=MASKS[name][0], **lengths_)
    torch.testing.assert_close(ours.flex_attention(q, k, v, block_mask=made), expected, atol=1e-2, rtol=1e-2)
    elements = [ours.create_mask(each.mask, 2, 2, LENGTH, LENGTH, "cpu") for each in (made, mine)]
    assert torch.equal(*elements)
    assert torch.equal(made.to_dense(), mine.to_dense()) and made.to("cpu").shape == mine.shape
    fewer = ours.BlockMask.from_kv_blocks(*full, mask_mod=None, BLOCK_SIZE=(BLOCK, BLOCK))
    blocks = torch.kron(fewer.to_dense(), torch.ones(BLOCK, BLOCK)).bool()
    whole = ours.flex_attention(q, k, v, block_mask=fewer)
    torch.testing.assert_close(whole, ours.scaled_dot_product_attention(q, k, v, blocks), atol=2e-2, rtol=2e-2)


def test_decoding_with_a_row_of_blocks() -> None:
    """An index selects blocks only; the function must then take the new indices, such as a token at an offset."""
    q, k, v = (torch.randn(1, 2, LENGTH, 32, dtype=torch.bfloat16) for _ in range(3))
    whole = ours.create_block_mask(causal, 1, 1, LENGTH, LENGTH, BLOCK_SIZE=BLOCK)
    expected = ours.flex_attention(q, k, v, block_mask=whole)
    for position in (0, 37, 79):
        offset = torch.tensor(position)
        part = whole[:, :, position // BLOCK]
        assert part.kv_num_blocks.shape == (1, 1, 1) and part.shape == (1, 1, LENGTH, LENGTH)
        part.seq_lengths = (1, LENGTH)
        with pytest.raises(SpecError, match="set its mask_mod"):
            ours.flex_attention(q[:, :, :1], k, v, block_mask=part)
        part.mask_mod = lambda b, h, i, j, offset=offset: whole.mask_mod(b, h, i + offset, j)
        out = ours.flex_attention(q[:, :, position : position + 1], k, v, block_mask=part)
        torch.testing.assert_close(out, expected[:, :, position : position + 1], atol=1e-2, rtol=1e-2)


def test_lengths_that_differ() -> None:
    mine, torchs_own = both("documents")
    shorter = mine._adjust(48, 64)
    assert shorter.shape == (1, 2, 48, 64) and torch.equal(shorter.to_dense(), torchs_own.to_dense()[..., :3, :4])
    of_blocks = mine[:, :]._adjust(48, 64)
    assert of_blocks.shape == shorter.shape and torch.equal(of_blocks.to_dense(), shorter.to_dense())


def test_a_mask_with_another_function_is_another_mask() -> None:
    q = torch.randn(1, 2, LENGTH, 32, dtype=torch.bfloat16)
    mask = ours.create_block_mask(causal, None, None, LENGTH, LENGTH)
    first = ours.flex_attention(q, q, q, block_mask=mask)
    mask.mask_mod = documents
    second = ours.flex_attention(q, q, q, block_mask=mask)
    assert not torch.equal(first, second) and mask.mask_mod is documents


def test_combined_functions_are_functions() -> None:
    """They also accept torch's own indices, and may be named."""
    joined = ours.or_masks(ours.and_masks(causal, documents), lambda b, h, q, k: k < 3)
    joined.__name__ = "documents_and_begin"
    mine = ours.create_block_mask(joined, None, 2, LENGTH, LENGTH)
    assert "documents_and_begin" in repr(mine)
    expected = torchs.create_mask(joined, 1, 2, LENGTH, LENGTH, "cpu")
    assert torch.equal(ours.create_mask(joined, None, 2, LENGTH, LENGTH, "cpu"), expected)
    assert torch.equal(ours.create_mask(mine.mask, 1, 2, LENGTH, LENGTH, "cpu"), expected)
    named = ours.create_mask(fg.causal() & fg.padding(lengths), 2, 1, 20, 80, "cpu")
    assert named[1, 0, :, 40:].sum() == 0 and named[0, 0, 0].sum() == 61
    assert ours.create_mask(ours.and_masks(causal, ours.noop_mask), 1, 1, 4, 4, "cpu").sum() == 10
    spec = fg.AttentionSpec(32, mask=ours.and_masks(fg.causal(), ours.noop_mask))
    assert spec.mask.expression == fg.causal().expression
    score = lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf"))
    assert torch.equal(ours.create_mask(score, 1, 1, 5, 5, "cpu")[0, 0], torch.ones(5, 5).tril().bool())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ours.and_masks(), "give at least one"),
        (lambda: ours.or_masks(causal, 3), "or_masks got 3"),
        (lambda: ours.create_block_mask(causal, None, None, 8.0, 8), "Q_LEN=8.0 must be an integer"),
        (lambda: ours.create_block_mask(causal, None, None, 8, 8, separate=True), "no argument separate"),
        (lambda: ours.create_block_mask(causal, None, None, 8, 8).as_list(), "no attribute 'as_list'"),
        (lambda: ours.BlockMask((8, 8), ONE, ONE[..., None], blocks=3), "BlockMask has no argument blocks"),
        (lambda: ours.BlockMask((200, 8), ONE, ONE[..., None]), r"seq_lengths=\(200, 8\): the lists have 1 rows"),
        (lambda: ours.BlockMask((8, 8), ONE, ONE[..., None], ONE), "of full blocks both numbers and indices"),
        (lambda: ours.create_block_mask(lambda b, h, q, k: q.erfinv() > k, 1, 1, 8, 8), "no attribute 'erfinv'"),
        (lambda: ours.BlockMask.from_kv_blocks(torch.ones(1, 2).int(), torch.zeros(1, 2, 2)), r"shape \(1, 2, 2\)"),
    ],
)
def test_refusals(call: Any, message: str) -> None:
    with pytest.raises((ArgumentError, AttributeError), match=message):
        call()
