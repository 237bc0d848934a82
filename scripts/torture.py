#!/usr/bin/env python
"""Kill and damage small runs, and see that none is lost: python scripts/torture.py --faults 200. See --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/ is in no package that is installed

from tests.integration.torture import main
from titan_prores.shell import run_command

if __name__ == "__main__":
    sys.exit(run_command(main))
