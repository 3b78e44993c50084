"""Comparisons and measurements, and the modules that they share: see README.md."""
