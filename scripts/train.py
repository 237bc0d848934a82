#!/usr/bin/env python
"""Train from a recipe: torchrun scripts/train.py --config train_configs/x.toml. See --help."""

import sys

from titan_prores.cli import main

if __name__ == "__main__":
    sys.exit(main())
