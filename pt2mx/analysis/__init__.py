"""Measure the quantization errors of tensors: sums of errors, statistics, comparisons of formats."""
