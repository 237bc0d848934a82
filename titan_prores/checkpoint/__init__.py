"""Saving and resuming, whatever the storage format."""
