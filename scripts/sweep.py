#!/usr/bin/env python
"""Train a grid of variants of one recipe and make one table of them: python scripts/sweep.py FILE. See --help."""

import sys

from titan_prores.sweep.command import main

if __name__ == "__main__":
    sys.exit(main())
