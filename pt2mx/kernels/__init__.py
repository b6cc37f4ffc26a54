"""Kernels. `reference` and other modules of this folder define the results; tests compare each kernel with its
definition."""
