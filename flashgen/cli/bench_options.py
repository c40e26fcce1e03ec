"""Options that several commands of `flashgen bench` share, and the parsing of comma-separated values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from flashgen.cli.options import Passes
from flashgen.errors import ArgumentError

Output = Annotated[Path, typer.Option("--output", "-o", help="The JSON file to write.")]
Timed = Annotated[Passes, typer.Option("--pass", help="The pass to time; both times the forward and the backward.")]
PEERS_HELP = 'Baselines to compare with, comma-separated; "" for none.'


def numbers(text: str, option: str) -> list[int]:
    """Parses positive integers: "1024,4096" -> [1024, 4096]."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentError(f"{option} {text!r} must be comma-separated integers, such as 1024,4096") from None
    if min(found) < 1:
        raise ArgumentError(f"{option} {text!r} must be positive")
    return found


def listed(text: str) -> list[str]:
    """Parses names: "window 1024, full" -> ["window 1024", "full"]; "" -> []."""
    return [name.strip() for name in text.split(",") if name.strip()]


def chosen(text: str, option: str, offered: Sequence[str]) -> list[str]:
    """Parses names that must be among those offered: "FA2,Flex" -> ["FA2", "Flex"]; "" -> []."""
    names = listed(text)
    unknown = [name for name in names if name not in offered]
    if unknown:
        raise ArgumentError(f"{option} {text!r}: {unknown[0]!r} is not one of {', '.join(offered)}")
    return names
