#!/usr/bin/env python
"""Check a machine with GPUs: as titan-prores gpu-check, from a checkout that is not installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from titan_prores.cli import main

if __name__ == "__main__":
    sys.exit(main(["gpu-check", *sys.argv[1:]]))
