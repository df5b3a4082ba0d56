"""`python -m pagedjax`: the command line. Knows nothing else."""

import sys

from pagedjax.cli import main

if __name__ == "__main__":
    sys.exit(main())
