#!/usr/bin/env python
"""Draw figures from run folders: as titan-prores plot, from a checkout that is not installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from titan_prores.cli import main

if __name__ == "__main__":
    sys.exit(main(["plot", *sys.argv[1:]]))
