"""`python -m memc`."""

from memc.cli import main

main()
