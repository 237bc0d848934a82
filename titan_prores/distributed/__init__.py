"""Ranks: mesh, signals, agreement, watchdog, crash reports."""
