"""The layers of quantized models."""
