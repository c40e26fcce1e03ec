"""`python -m flashgen`: the command line."""

from flashgen.cli import main

main()
