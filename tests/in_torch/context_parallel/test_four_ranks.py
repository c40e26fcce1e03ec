"""Context parallelism on the CPU with four processes: cases that need more than two ranks, such as mixed schemes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="flashgen.torch needs torch: pip install 'flashgen[torch]'")

import pool


@pytest.fixture(scope="module")
def four() -> Iterator[Any]:
    ranks = pool.Pool(4)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("scheme", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("shards", ["zigzag", "random"])
@pytest.mark.covering(4)
def test_four_ranks_equal_one(four: Any, scheme: str, shards: str) -> None:
    assert four.run("acceptance", spec="causal", scheme=scheme, shards=shards)[0] == []


@pytest.mark.parametrize("spec", ["causal", "of_heads", "learned", "sinks", "dropped"])
@pytest.mark.parametrize("shards", ["zigzag", "plain", "random"])
@pytest.mark.covering(6)
def test_heads_within_a_node_and_a_ring_across(four: Any, spec: str, shards: str) -> None:
    assert four.run("acceptance", spec=spec, scheme="ulysses_ring", shards=shards)[0] == []


@pytest.mark.parametrize("spec", ["window", "documents", "all_of_it"])
@pytest.mark.parametrize("shards", ["zigzag", "plain"])
@pytest.mark.covering(4)
def test_variants_in_a_ring(four: Any, spec: str, shards: str) -> None:
    assert four.run("acceptance", spec=spec, scheme="ring", shards=shards)[0] == []


@pytest.mark.parametrize("spec", ["window", "dropped"])
@pytest.mark.parametrize("shards", ["zigzag", "plain"])
@pytest.mark.covering(3)
def test_halos_between_neighbours(four: Any, spec: str, shards: str) -> None:
    assert four.run("boundaries", spec=spec, shards=shards)[0] == []


@pytest.mark.parametrize("shards", ["zigzag", "plain"])
def test_halos_with_exchanged_heads(four: Any, shards: str) -> None:
    """A ring of two halves, each with a halo, across two ranks that exchange heads."""
    assert four.run("boundaries", spec="both_sides", shards=shards, scheme="ulysses_ring")[0] == []


def test_the_baseline_ring(four: Any) -> None:
    assert four.run("ring_over_flash") == [[]] * 4


@pytest.mark.parametrize(("spec", "scale"), [("causal", 1), ("window", 8)])
@pytest.mark.parametrize("shards", ["zigzag", "plain"])
def test_sent_bytes_equal_the_plan(four: Any, spec: str, scale: int, shards: str) -> None:
    for forward, planned, backward, planned_backward in four.run(
        "bytes_are_those_of_the_plan", spec=spec, scheme="ring", shards=shards, scale=scale
    ):
        assert (forward, backward) == (planned, planned_backward)
