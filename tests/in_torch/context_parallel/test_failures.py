"""A rank that dies or hangs: the other ranks end with an error within the timeout of the process group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="flashgen.torch needs torch: pip install 'flashgen[torch]'")

import pool

TIMEOUT = 3  # seconds; a forward without compilation takes a fraction of it


@pytest.fixture(scope="module")
def four() -> Iterator[Any]:
    ranks = pool.Pool(4)
    yield ranks
    ranks.kill()


def errors_of_others(ranks: Any, rank: int, **arguments: Any) -> list[str]:
    """Returns the errors of all ranks except the failing one."""
    ranks.ask("one_rank_fails", rank=rank, timeout=TIMEOUT, **arguments)
    answers = {other: ranks.answer(other) for other in range(4)}
    others = [answer for other, answer in answers.items() if other != rank]
    assert not any(answer["error"] for answer in others), answers
    return [answer["result"] for answer in others]


@pytest.mark.parametrize(
    ("scheme", "during"),
    [("ring", "forward"), ("ring", "backward"), ("all_gather", "backward"), ("ulysses", "backward")],
)
@pytest.mark.rotated(3)
def test_a_rank_that_hangs(four: Any, scheme: str, during: str) -> None:
    """The errors say where to set the timeout.

    torch reports the connection whose timeout ends first, and closes others.
    """
    errors = errors_of_others(four, 1, how="stands still", scheme=scheme, during=during)
    assert any(f"waiting {TIMEOUT}000ms" in error for error in errors), errors
    for error in errors:
        assert "Another rank has ended, stands still or makes other calls" in error, error
        assert "init_process_group(timeout=...), new_group(timeout=...)" in error


def test_a_rank_that_dies(four: Any) -> None:
    """The last test, because the remaining ranks cannot run further cases."""
    for error in errors_of_others(four, 1, how="dies", scheme="ring", during="backward"):
        assert "Another rank has ended, stands still or makes other calls" in error, error
