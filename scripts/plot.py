#!/usr/bin/env python
"""Draw figures from run folders: python scripts/plot.py loss RUN. See --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that a checkout works without being installed

from titan_prores.plots.command import main

if __name__ == "__main__":
    sys.exit(main())
