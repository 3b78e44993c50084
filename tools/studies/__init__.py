"""Comparisons and measurements, and the parts that they share: see README.md."""
