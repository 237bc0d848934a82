#!/usr/bin/env python
"""Run the support matrix and write its table into the README: python scripts/support_matrix.py. See --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/ is in no package that is installed

from tests.distributed.matrix import main
from titan_prores.shell import run_command

if __name__ == "__main__":
    sys.exit(run_command(main))
