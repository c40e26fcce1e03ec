"""The command line, `flashgen`. Each command stands in a file of its own; `app` ties them together."""

from __future__ import annotations


def main() -> None:
    """The entry point: parses sys.argv, runs the command and exits."""
    from flashgen.cli.app import app

    app(prog_name="flashgen")
