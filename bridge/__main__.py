"""`python -m bridge`: the command line, without an installation."""

from bridge.cli import main

main()
