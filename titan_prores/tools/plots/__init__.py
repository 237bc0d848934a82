"""Figures of the ProRes paper from run folders. matplotlib, an extra, is loaded to draw."""
