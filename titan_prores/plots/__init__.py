"""Figures of the ProRes paper from run folders: what scripts/plot.py does. matplotlib, an extra, is loaded to draw."""
