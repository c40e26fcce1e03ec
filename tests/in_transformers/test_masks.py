"""The masks that transformers' functions request: what they keep, and that later writes do not change them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="flashgen.transformers needs torch")
transformers = pytest.importorskip(
    "transformers", reason="flashgen.transformers needs transformers: pip install 'flashgen[transformers]'"
)

from transformers import masking_utils as hf

BATCH, QUERIES, KEYS = 2, 5, 12


class Asked(NamedTuple):
    """Returns the inputs of a mask, and those of its tensors that belong to the model."""

    arguments: dict[str, Any]
    owned: list[Any]


def offset_of_queries() -> Asked:
    """As in StaticCache: its length is a tensor without dimensions."""
    length = torch.tensor(4)
    return Asked({"q_offset": length}, [length])


def offsets_of_both() -> Asked:
    seen, begin = torch.tensor(9), torch.tensor(3)
    window = hf.sliding_window_causal_mask_function(5)
    return Asked({"q_offset": seen, "kv_offset": begin, "mask_function": window}, [seen, begin])


def offset_of_keys() -> Asked:
    begin = torch.tensor([2])
    kept = torch.ones(BATCH, 2 + KEYS, dtype=torch.bool)
    kept[0, :6] = False
    return Asked({"q_offset": 9, "kv_offset": begin, "attention_mask": kept}, [begin, kept])


def holes() -> Asked:
    kept = torch.rand(BATCH, KEYS, generator=torch.Generator().manual_seed(3)) < 0.7
    kept[:, 0] = True
    return Asked({"q_offset": KEYS - QUERIES, "attention_mask": kept}, [kept])


def packed() -> Asked:
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2]]).repeat(BATCH, 1)
    inside = hf.packed_sequence_mask_function(ids)
    return Asked({"q_length": KEYS, "mask_function": hf.and_masks(hf.causal_mask_function, inside)}, [ids])


def remapped() -> Asked:
    positions = torch.cat([torch.arange(4), torch.arange(8)]).repeat(BATCH, 1)
    function = hf.remap_positions_for_packed_sequence(hf.causal_mask_function, positions)
    return Asked({"q_length": KEYS, "mask_function": function}, [positions])


def blocks() -> Asked:
    ids = torch.tensor([[-1, 0, 0, 0, -1, -1, 1, 1, 1, 1, -1, -1]], dtype=torch.int32).repeat(BATCH, 1)
    function = hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(ids))
    return Asked({"q_length": KEYS, "mask_function": function}, [ids])


def chunks() -> Asked:
    left = torch.tensor([0, 3])
    return Asked({"q_length": KEYS, "mask_function": hf.chunked_causal_mask_function(4, left)}, [left])


def whole_mask() -> Asked:
    """A custom function over a mask of all queries and keys."""
    table = torch.rand(KEYS, KEYS, generator=torch.Generator().manual_seed(4)) < 0.6
    table.fill_diagonal_(True)
    return Asked({"q_length": KEYS, "mask_function": lambda b, h, q, k: table[q, k]}, [table])


ALL: list[Callable[[], Asked]] = [
    offset_of_queries, offsets_of_both, offset_of_keys, holes, packed, remapped, blocks, chunks, whole_mask,
]  # fmt: skip


@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_a_mask_keeps_the_values_of_its_creation(make: Callable[[], Asked]) -> None:
    """A model writes to all of its tensors between mask and attention."""
    from flashgen.transformers.mask import attention_mask

    arguments, owned = make()
    arguments = {"batch_size": BATCH, "q_length": QUERIES, "kv_length": KEYS} | arguments
    expected = hf.sdpa_mask(**arguments, allow_is_causal_skip=False).expand(BATCH, -1, -1, -1)
    mask = attention_mask(**arguments)
    for tensor in owned:
        tensor.copy_(~tensor if tensor.dtype == torch.bool else 1 - tensor)
    assert_keeps(mask, expected)


def assert_keeps(mask: Any, expected: Any) -> None:
    """Attention with a mask equals softmax with the booleans."""
    from flashgen.transformers.forward import attention_forward

    random = torch.Generator().manual_seed(5)
    rows, keys = expected.shape[-2:]
    q, k, v = (torch.randn(BATCH, 2, n, 8, generator=random).to(torch.bfloat16) for n in (rows, keys, keys))
    scores = (q.float() @ k.float().transpose(-1, -2) / 8**0.5).masked_fill(~expected, float("-inf"))
    wanted = scores.softmax(-1).nan_to_num(0) @ v.float()
    got, _ = attention_forward(torch.nn.Module(), q, k, v, mask, emulate=True)
    assert (got.transpose(1, 2).float() - wanted).abs().max() <= 0.02 * wanted.abs().max()


@pytest.mark.parametrize("make", [offset_of_queries, holes], ids=lambda make: make.__name__)
def test_masks_of_the_last_queries(make: Callable[[], Asked]) -> None:
    from flashgen.transformers.mask import attention_mask

    arguments = {"batch_size": BATCH, "q_length": QUERIES, "kv_length": KEYS} | make().arguments
    mask = attention_mask(**arguments)
    expected = hf.sdpa_mask(**arguments, allow_is_causal_skip=False).expand(BATCH, -1, -1, -1)
    for begin in (-2, 1, 0, None):
        assert_keeps(mask[:, :, begin:, :], expected[:, :, begin:, :])


def test_per_sequence_offsets_are_refused() -> None:
    from flashgen.errors import UnsupportedError
    from flashgen.transformers.mask import attention_mask

    with pytest.raises(UnsupportedError, match=r"q_offset of shape \(2,\): sequences of a batch share one offset"):
        attention_mask(BATCH, QUERIES, KEYS, q_offset=torch.tensor([4, 5]))
