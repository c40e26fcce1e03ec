"""The command line, `flashgen`. Each command has a file of its own; `app` combines them."""

from __future__ import annotations


def main() -> None:
    """Parses sys.argv, runs the command and exits; the entry point of the package."""
    from flashgen.cli.app import app

    app(prog_name="flashgen")
