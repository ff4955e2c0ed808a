"""`python -m bridge`: the command line, from a checkout that is not installed."""

from bridge.cli import main

main()
