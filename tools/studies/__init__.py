"""Comparisons and measurements, with their shared modules."""
