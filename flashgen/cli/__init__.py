"""The command line, `flashgen`. Each command has a file of its own; `app` combines them."""

from __future__ import annotations


def main() -> None:
    """The entry point: parses sys.argv, runs the command and exits."""
    from flashgen.cli.app import app

    app(prog_name="flashgen")
