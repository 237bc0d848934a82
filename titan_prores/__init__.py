"""Titan-ProRes: composable training recipes for PyTorch-native pretraining, with Progressive Residual Warmup."""

__version__ = "0.1.0"
