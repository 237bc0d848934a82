"""python -m titan_prores: as the command titan-prores."""

import sys

from titan_prores.cli import main

if __name__ == "__main__":
    sys.exit(main())
