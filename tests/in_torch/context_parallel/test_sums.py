"""Accumulation of gradients from several blocks: each row is rounded once, and rows without gradients are 0."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="flashgen.torch needs torch: pip install 'flashgen[torch]'")

from flashgen.torch.context_parallel.partials import Sums

ROWS = 160
FIRST = [(0, 60), (64, 64)]  # and none of the others
BLOCKS = {
    "none": [],
    "apart": [(0, 20), (20, 24), (100, 28)],
    "shared": [(0, 20), (10, 24), (100, 28), (90, 30), (95, 5)],
    "beside": [(50, 12), (125, 35)],
    "large": [(4, 20), (32, 80), (100, 10)],
    "third": [(4, 20), (32, 80), (30, 60), (0, 160)],
}


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_sums_of_written_and_added_gradients(blocks: str, layout: str) -> None:
    generator = torch.Generator().manual_seed(1)
    axis = 2 if layout == "bhsd" else 1

    def gradient(count: int) -> torch.Tensor:
        shape = (2, 3, count, 8) if layout == "bhsd" else (2, count, 3, 8)
        return torch.randn(*shape, generator=generator).bfloat16()

    like = gradient(ROWS)
    sums, wanted = Sums(layout, like), torch.zeros(like.shape)
    for first, count in FIRST:
        given = gradient(count)
        (room,) = sums.room(first, count) or [None]
        room.copy_(given)
        wanted.narrow(axis, first, count).add_(given)
    assert sums.room(50, 20) is None, "others have written there"
    for first, count in BLOCKS[blocks]:
        given = gradient(count)
        sums.add(first, count, given)
        wanted.narrow(axis, first, count).add_(given)
    if blocks == "third":
        assert sums.room(150, 5) is None, "accumulators are not written to"
    (made,) = sums.rounded()
    assert made.dtype == torch.bfloat16
    assert torch.equal(made, wanted.bfloat16())


def test_empty_sums_are_zero() -> None:
    like = torch.ones(1, 1, 8, 8, dtype=torch.bfloat16)
    assert not Sums("bhsd", like).rounded()[0].any()
