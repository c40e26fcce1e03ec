"""What `flashgen show --ranks` prints: a sequence on several ranks, before anything runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from flashgen.cli.arrays import load_arrays
from flashgen.cli.console import print_json, print_table
from flashgen.errors import ArgumentError

if TYPE_CHECKING:
    from flashgen.language.spec import AttentionSpec


def show_ranks(
    spec: AttentionSpec,
    ranks: int,
    length: int,
    scheme: str,
    shards: str,
    heads: str,
    exchange: int,
    captures: Path | None,
    json: bool,
) -> None:
    """Prints who computes what, how even that is, and what is sent; with `json` the whole plan."""
    from flashgen.ranks import Sizes, picture, plan_of

    given = {name: array.on_host() for name, array in spec.bound.items()}
    given |= load_arrays(captures, "--captures") if captures else {}
    known = {capture.name: given[capture.name] for capture in spec.mask.captures if capture.name in given}
    heads_q, heads_kv = heads_of(heads)
    sizes = Sizes(1, heads_q, heads_kv)
    plan = plan_of(spec, ranks, length, scheme=scheme, shards=shards, heads=exchange, sizes=sizes, captures=known)
    if json:
        print_json(picture.to_dict(plan))
        return
    for line in (*picture.drawing(plan), ""):
        typer.echo(line)
    print_table(picture.columns(plan), picture.rows(plan))
    for line in (picture.LEGEND, *picture.summary(plan)):
        typer.echo(line)


def heads_of(text: str) -> tuple[int, int]:
    """ "32:8" -> 32 heads of queries over 8 of keys and values; "32" -> as many of both."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    queries, keys = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not queries or not keys or queries % keys:
        raise ArgumentError(f"--heads {text!r} must be HEADS, or HEADS:HEADS_KV that divide, such as 32:8")
    return queries, keys
