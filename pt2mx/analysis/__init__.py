"""Measurements of what quantization does to tensors: sums of errors, statistics, comparisons of formats."""
