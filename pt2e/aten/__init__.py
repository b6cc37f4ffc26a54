"""Converted models in core ATen operators and torch's own dtypes."""
