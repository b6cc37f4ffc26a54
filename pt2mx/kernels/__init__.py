"""Kernels: `reference` is the definition, every other kernel is a twin of it, tested to the bit."""
