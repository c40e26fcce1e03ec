"""`python -m flashgen.cli`."""

from flashgen.cli import main

main()
