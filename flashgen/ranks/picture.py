"""A plan as a table: what each rank computes in each step, and what it sends; and as numbers for a program."""

from __future__ import annotations

from typing import Any

from flashgen.analysis.intervals.evaluation import EMPTY, FULL, PARTIAL
from flashgen.ranks.blocks import Block, Step
from flashgen.ranks.plan import Plan

_GLYPHS = {EMPTY: "·", PARTIAL: "▒", FULL: "█"}
_MOST_DRAWN = 16  # ranks
LEGEND = "▒ masked score by score   █ whole, without mask code   · nothing sent, nothing launched"


def columns(plan: Plan) -> list[str]:
    """The heading of `rows`."""
    steps = [f"step {number}" for number in range(_most_steps(plan))]
    return ["rank", "positions", *steps, "of the work", "sends forward", "and backward"]


def rows(plan: Plan) -> list[list[str]]:
    """A row for each rank: its positions; by step whose keys it meets, how, and what of them it receives; its share of
    the scores that count, and the bytes that it sends."""
    every = sum(plan.work(rank) for rank in range(plan.ranks)) or 1.0
    return [
        [
            str(rank),
            ", ".join(f"{start}-{start + plan.queries.chunk - 1}" for start in plan.queries.starts(rank)),
            *(_cell(plan, number, step) for number, step in enumerate(plan.steps(rank))),
            *["·"] * (_most_steps(plan) - len(plan.steps(rank))),
            f"{plan.work(rank) / every:.1%}",
            _bytes(sum(plan.sent(rank)) + plan.exchanged()),
            _bytes(sum(plan.sent(rank, backward=True)) + plan.exchanged(backward=True)),
        ]
        for rank in range(plan.ranks)
    ]


def drawing(plan: Plan) -> list[str]:
    """The scores by chunks, queries downwards and keys to the right, in the order of positions: each line begins with
    the rank that computes it, and the heading says whose keys stand in a column. Nothing for more than 16 ranks."""
    if plan.ranks > _MOST_DRAWN:
        return []
    owners = [rank for rank, _ in plan.keys.in_order()]
    width = len(str(plan.ranks - 1)) + 1
    lines = [" " * width + "".join(f"{owner:>{width}}" for owner in owners)]
    for number, (rank, _) in enumerate(plan.queries.in_order()):
        kinds = (plan.kind(number, column) for column in range(len(owners)))
        lines.append(f"{rank:>{width}}" + "".join(f"{_GLYPHS[kind]:>{width}}" for kind in kinds))
    return lines


def summary(plan: Plan) -> list[str]:
    """What the rows come to."""
    ranks = range(plan.ranks)
    forward = sum(sum(plan.sent(rank)) + plan.exchanged() for rank in ranks) * plan.heads
    backward = sum(sum(plan.sent(rank, backward=True)) + plan.exchanged(backward=True) for rank in ranks) * plan.heads
    said = [
        f"balance {plan.balance:.1%}: what ranks compute at the mean, of what the busiest does",
        f"moved in all: {_bytes(forward)} forward, {_bytes(backward)} backward",
    ]
    if plan.heads > 1:
        of = "all ranks" if plan.ranks == 1 else f"{plan.heads} ranks that have a row here together"
        said.append(f"{of} exchange heads for positions first, {_bytes(plan.exchanged())} each in a pass")
    return said


def to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as JSON holds it."""
    return {
        "spec": plan.spec.name,
        "scheme": plan.scheme,
        "ranks": plan.ranks,
        "heads_exchanged_by": plan.heads,
        "length": plan.queries.length,
        "length_k": plan.keys.length,
        "shards": plan.queries.shards,
        "balance": plan.balance,
        "by_rank": [_of_rank(plan, rank) for rank in range(plan.ranks)],
    }


def _of_rank(plan: Plan, rank: int) -> dict[str, Any]:
    return {
        "positions": [[start, start + plan.queries.chunk] for start in plan.queries.starts(rank)],
        "steps": [
            {
                "owner": step.owner,
                "received_rows": [list(piece) for piece in step.pieces],
                "blocks": [
                    {**block._asdict(), "kind": "full" if block.kind == FULL else "partial"} for block in step.blocks
                ],
            }
            for step in plan.steps(rank)
        ],
        "scores": plan.work(rank),
        "sent_forward": list(plan.sent(rank)),
        "sent_backward": list(plan.sent(rank, backward=True)),
        "exchanged_forward": plan.exchanged(),
        "exchanged_backward": plan.exchanged(backward=True),
    }


def _most_steps(plan: Plan) -> int:
    """Of any rank: one with fewer neighbours has fewer."""
    return max(len(plan.steps(rank)) for rank in range(plan.ranks))


def _cell(plan: Plan, number: int, step: Step) -> str:
    """ "3 █ 16.8 MB": from rank 3, whole, so many bytes received."""
    if not step.blocks:
        return "·"
    whose = "all" if plan.scheme == "all_gather" else "own" if number == 0 else str(step.owner)
    received = plan.received(step)
    return " ".join([whose, _kinds(step.blocks), *([_bytes(received)] if received else [])])


def _kinds(blocks: tuple[Block, ...]) -> str:
    return "".join(_GLYPHS[block.kind] for block in blocks)


def _bytes(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"
