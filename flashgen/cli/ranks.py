"""`flashgen show --ranks`: prints the plan for one sequence on several ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from flashgen.cli.arrays import load_arrays
from flashgen.cli.console import print_json, print_table
from flashgen.errors import ArgumentError

if TYPE_CHECKING:
    from flashgen.language.spec import AttentionSpec


LENGTH, SCHEME, SHARDS, HEADS, EXCHANGE = 32768, "ring", "zigzag", "32:8", 2


class RankOptions(NamedTuple):
    """The options that need --ranks. None means that the option was not given; the defaults are the constants above."""

    length: int | None
    scheme: str | None
    shards: str | None
    heads: str | None
    exchange: int | None

    def refuse(self) -> None:
        """Raises ArgumentError if an option was given without --ranks."""
        names = [f"--{name}" for name, value in self._asdict().items() if value is not None]
        if names:
            raise ArgumentError(f"{', '.join(names)}: only the plan for several GPUs takes this, add --ranks N")


def refuse_beside_ranks(others: Mapping[str, Any]) -> None:
    """Raises ArgumentError if an option of kernels or tile maps was given with --ranks, which shows neither."""
    names = [name for name, value in others.items() if value is not None]
    if names:
        raise ArgumentError(
            f"{', '.join(names)}: --ranks shows the work of each rank, and does not take this; leave it out"
        )


def show_ranks(spec: AttentionSpec, ranks: int, options: RankOptions, captures: Path | None, json: bool) -> None:
    """Prints the work of each rank, its balance, and the bytes that are sent; with `json`, the full plan."""
    from flashgen.ranks import Sizes, picture, plan_of

    given = {name: array.on_host() for name, array in spec.bound.items()}
    given |= load_arrays(captures, "--captures") if captures else {}
    arrays = {capture.name: given[capture.name] for capture in spec.mask.captures if capture.name in given}
    sizes = Sizes(1, *heads_of(options.heads or HEADS))
    plan = plan_of(
        spec,
        ranks,
        options.length or LENGTH,
        scheme=options.scheme or SCHEME,
        shards=options.shards or SHARDS,
        heads=options.exchange or EXCHANGE,
        sizes=sizes,
        captures=arrays,
    )
    if json:
        print_json(picture.to_dict(plan))
        return
    for line in (*picture.drawing(plan), ""):
        typer.echo(line)
    print_table(picture.columns(plan), picture.rows(plan))
    for line in (picture.LEGEND, *picture.summary(plan)):
        typer.echo(line)


def heads_of(text: str) -> tuple[int, int]:
    """Parses numbers of heads: "32:8" -> 32 query heads and 8 key heads; "32" -> 32 of both."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    queries, keys = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not queries or not keys or queries % keys:
        raise ArgumentError(f"--heads {text!r} must be HEADS, or HEADS:HEADS_KV where HEADS_KV divides HEADS, as 32:8")
    return queries, keys
