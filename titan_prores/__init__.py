"""Titan-ProRes: composable training recipes for PyTorch-native pretraining, with Progressive Residual Warmup.

What a plug-in imports is listed in `__init__.pyi` and stays where it is: `from titan_prores import Section, register`.
Each name is loaded on first use, so that importing this package loads no torch.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
