"""Weights, transforms, memory and activations of a model."""
