"""A rank that dies or stands still: the others end with an error that names it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="flashgen.torch needs torch: pip install 'flashgen[torch]'")

LOADED = importlib.util.spec_from_file_location("pool", Path(__file__).with_name("pool.py"))
assert LOADED and LOADED.loader
pool: Any = importlib.util.module_from_spec(LOADED)
LOADED.loader.exec_module(pool)


@pytest.mark.parametrize(("how", "rank"), [("dies", 1), ("stands still", 2)])
def test_the_others_are_told_which_rank_it_is(how: str, rank: int) -> None:
    ranks = pool.Pool(4, timeout=8)  # longer than a rank computes that has compiled
    try:
        ranks.ask("one_rank_fails", how=how, rank=rank)
        for other in {0, 1, 2, 3} - {rank}:
            answer = ranks.answer(other)
            assert answer["error"] is None, answer
            assert answer["result"].startswith(f"rank {rank} "), answer
    finally:
        ranks.kill()


def test_a_program_that_has_no_log_is_told_before_a_message_fails(tmp_path: Path) -> None:
    """Over NCCL a message to a rank that is gone does not fail before torch ends the process."""
    with (tmp_path / "said").open("w+") as said:
        ranks = pool.Pool(2, timeout=8, said=said)
        try:
            ranks.ask("one_rank_dies_unseen")
            assert ranks.answer(0)["error"] is None
        finally:
            ranks.kill()
        said.seek(0)
        assert "FlashgenWarning: flashgen: rank 1 is not answering" in said.read()
