"""Presents a plan: as a table of what each rank computes and sends in each step, as a drawing, and as JSON."""

from __future__ import annotations

from typing import Any

from flashgen.analysis.intervals.evaluation import EMPTY, FULL, PARTIAL
from flashgen.ranks.blocks import Block, Step
from flashgen.ranks.plan import Plan

_GLYPHS = {EMPTY: "·", PARTIAL: "▒", FULL: "█"}
_MAX_DRAWN_RANKS = 16
LEGEND = "▒ partial, masked per score   █ full, without mask code   · nothing sent, nothing launched"


def columns(plan: Plan) -> list[str]:
    """Returns the column headings of `rows`."""
    steps = [f"step {number}" for number in range(_max_steps(plan))]
    return ["rank", "positions", *steps, "share of work", "sent forward", "sent backward"]


def rows(plan: Plan) -> list[list[str]]:
    """Returns a table row for each rank.

    Its cells are the positions of the rank; for each step the owner of the keys, the classes of the blocks and the
    bytes received; the rank's share of the unmasked scores; and the bytes that it sends in the forward and backward.
    """
    total = sum(plan.work(rank) for rank in range(plan.ranks)) or 1.0
    return [
        [
            str(rank),
            ", ".join(f"{start}-{start + plan.queries.chunk - 1}" for start in plan.queries.starts(rank)),
            *(_cell(plan, number, step) for number, step in enumerate(plan.steps(rank))),
            *["·"] * (_max_steps(plan) - len(plan.steps(rank))),
            f"{plan.work(rank) / total:.1%}",
            _bytes(sum(plan.sent(rank)) + plan.exchanged()),
            _bytes(sum(plan.sent(rank, backward=True)) + plan.exchanged(backward=True)),
        ]
        for rank in range(plan.ranks)
    ]


def drawing(plan: Plan) -> list[str]:
    """Draws the classes of the chunks of the score matrix, with queries downwards and keys to the right.

    Chunks are in the order of positions. Each line starts with the rank that computes it. The heading has the ranks
    that own the keys of each column. Returns no lines for more than 16 ranks.
    """
    if plan.ranks > _MAX_DRAWN_RANKS:
        return []
    owners = [rank for rank, _ in plan.keys.in_order()]
    width = len(str(plan.ranks - 1)) + 1
    lines = [" " * width + "".join(f"{owner:>{width}}" for owner in owners)]
    for number, (rank, _) in enumerate(plan.queries.in_order()):
        kinds = (plan.kind(number, column) for column in range(len(owners)))
        lines.append(f"{rank:>{width}}" + "".join(f"{_GLYPHS[kind]:>{width}}" for kind in kinds))
    return lines


def summary(plan: Plan) -> list[str]:
    """Returns the totals of a plan as lines of text."""
    ranks = range(plan.ranks)
    forward = sum(sum(plan.sent(rank)) + plan.exchanged() for rank in ranks) * plan.heads
    backward = sum(sum(plan.sent(rank, backward=True)) + plan.exchanged(backward=True) for rank in ranks) * plan.heads
    lines = [
        f"balance {plan.balance:.1%}: mean work of a rank, relative to the busiest rank",
        f"sent by all ranks: {_bytes(forward)} forward, {_bytes(backward)} backward",
    ]
    if plan.heads > 1:
        group = "all ranks" if plan.ranks == 1 else f"each group of {plan.heads} ranks that share a table row"
        lines.append(f"before that, {group} exchange heads for positions: {_bytes(plan.exchanged())} per rank and pass")
    return lines


def to_dict(plan: Plan) -> dict[str, Any]:
    """Returns the plan as a dict for JSON."""
    return {
        "spec": plan.spec.name,
        "scheme": plan.scheme,
        "ranks": plan.ranks,
        "heads_exchanged_by": plan.heads,
        "length": plan.queries.length,
        "length_k": plan.keys.length,
        "shards": plan.queries.shards,
        "balance": plan.balance,
        "by_rank": [_rank_to_dict(plan, rank) for rank in range(plan.ranks)],
    }


def _rank_to_dict(plan: Plan, rank: int) -> dict[str, Any]:
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


def _max_steps(plan: Plan) -> int:
    """Returns the maximum number of steps of any rank: a rank with fewer neighbours has fewer steps."""
    return max(len(plan.steps(rank)) for rank in range(plan.ranks))


def _cell(plan: Plan, number: int, step: Step) -> str:
    """Returns a cell such as "3 █ 16.8 MB": keys of rank 3, a full block, bytes received."""
    if not step.blocks:
        return "·"
    owner = "all" if plan.scheme == "all_gather" else "own" if number == 0 else str(step.owner)
    received = plan.received(step)
    return " ".join([owner, _kinds(step.blocks), *([_bytes(received)] if received else [])])


def _kinds(blocks: tuple[Block, ...]) -> str:
    return "".join(_GLYPHS[block.kind] for block in blocks)


def _bytes(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"
