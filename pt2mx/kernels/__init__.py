"""Kernels: `reference` and its neighbours define the numbers, and the tests compare each kernel with its definition."""
