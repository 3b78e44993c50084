"""Helpers of tests in several folders."""
