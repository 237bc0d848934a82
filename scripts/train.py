#!/usr/bin/env python
"""Train from a recipe: torchrun scripts/train.py --config train_configs/x.toml. See --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that a checkout works without being installed

from titan_prores.cli import main

if __name__ == "__main__":
    sys.exit(main())
