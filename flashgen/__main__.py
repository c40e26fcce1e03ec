"""The command line, for `python -m flashgen`."""

from flashgen.cli import main

main()
