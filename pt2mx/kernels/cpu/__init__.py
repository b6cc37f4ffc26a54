"""Kernels for the CPU: C++ in `src/`, built at first use."""
