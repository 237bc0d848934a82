"""Weights, transforms, memory and probes of a model."""
