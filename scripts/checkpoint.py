#!/usr/bin/env python
"""List, verify, compare and prune the checkpoints of a run: python scripts/checkpoint.py list RUN. See --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that a checkout works without being installed

from components.checkpoint._commands import main

if __name__ == "__main__":
    sys.exit(main())
