"""Quantization in the exporters of transformers."""
