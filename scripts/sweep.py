#!/usr/bin/env python
"""Train a grid of variants of one recipe and make one table of them: python scripts/sweep.py FILE. See --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that a checkout works without being installed

from titan_prores.sweep.command import main

if __name__ == "__main__":
    sys.exit(main())
