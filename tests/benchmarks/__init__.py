"""Benchmarks: each prints one table of ratios measured in one run. Nothing here is a test."""
