"""Report what quantization does to a model: formats, noise, bytes, and suggested formats."""
